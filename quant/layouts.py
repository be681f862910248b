"""Tensor types of GGUF files as one table: number, block size in elements, block size in bytes.

Source: the GGUF/ggml type numbering. Every size in the program comes from here.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """One tensor type. `n_elements` consecutive elements of a row are stored in `n_bytes` bytes."""

    name: str
    id: int
    n_elements: int
    n_bytes: int
    is_quantized: bool

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.n_bytes / self.n_elements

    def row_bytes(self, n_columns: int) -> int:
        """Bytes of a row of `n_columns` elements; the caller has checked divisibility."""
        return n_columns // self.n_elements * self.n_bytes


def _plain(name: str, id: int, n_bytes: int) -> Layout:
    return Layout(name, id, 1, n_bytes, False)


def _block(name: str, id: int, n_elements: int, n_bytes: int) -> Layout:
    return Layout(name, id, n_elements, n_bytes, True)


F32 = _plain("F32", 0, 4)
F16 = _plain("F16", 1, 2)
BF16 = _plain("BF16", 30, 2)
I8 = _plain("I8", 24, 1)
I16 = _plain("I16", 25, 2)
I32 = _plain("I32", 26, 4)
I64 = _plain("I64", 27, 8)
F64 = _plain("F64", 28, 8)
Q4_0 = _block("Q4_0", 2, 32, 18)
Q4_1 = _block("Q4_1", 3, 32, 20)
Q5_0 = _block("Q5_0", 6, 32, 22)
Q5_1 = _block("Q5_1", 7, 32, 24)
Q8_0 = _block("Q8_0", 8, 32, 34)
Q2_K = _block("Q2_K", 10, 256, 84)
Q3_K = _block("Q3_K", 11, 256, 110)
Q4_K = _block("Q4_K", 12, 256, 144)
Q5_K = _block("Q5_K", 13, 256, 176)
Q6_K = _block("Q6_K", 14, 256, 210)
IQ4_NL = _block("IQ4_NL", 20, 32, 18)
IQ4_XS = _block("IQ4_XS", 23, 256, 136)

ALL = (
    F32, F16, BF16, I8, I16, I32, I64, F64,
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS,
)
BY_ID: dict[int, Layout] = {layout.id: layout for layout in ALL}
BY_NAME: dict[str, Layout] = {layout.name: layout for layout in ALL}

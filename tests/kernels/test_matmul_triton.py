"""The plain Triton products under Triton's CPU interpreter, and every kernel compiled for cards that are not there."""

import pytest
import torch
from compiling import compiling
from processes import python
from random_blocks import for_kernels, random_raw

from ggufspec.kernels.matmul import cuda, narrow, repack, wide
from ggufspec.kernels.matmul.decode import DECODERS, decode
from ggufspec.kernels.matmul.weight import PackedWeight

CPU = torch.device("cpu")
ROWS, COLUMNS = 40, 512


def weights(type_name: str) -> list[PackedWeight]:
    """A random weight as file bytes and, where its type has them, as the kernels' arrays."""
    raw = random_raw(type_name, ROWS, COLUMNS, seed=1)
    out = [PackedWeight(type_name, (ROWS, COLUMNS), CPU, parts={"file": raw})]
    if type_name in repack.FORMS:
        out.append(for_kernels(raw, type_name, ROWS, COLUMNS))
    return out


def check(type_name: str) -> None:
    """Rows gathered, products and unpacked rows of one type, against the decoder and float64."""
    from ggufspec.kernels.matmul import triton

    dense = decode(random_raw(type_name, ROWS, COLUMNS, seed=1), type_name)
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(2)) * 30
    a = triton.prepare(x)
    assert (repack.disorder(a.rows.float()) * a.scale[:, None] - x).abs().max() < 0.05
    expected = x.double() @ dense.double().T
    for weight in weights(type_name):
        assert torch.equal(triton.gather(weight, torch.tensor([39, 0, 5])), dense[[39, 0, 5]])
        y = triton.multiply(a, weight)
        assert y.shape == (3, ROWS) and (y - expected).norm() / expected.norm() < 1e-3
        assert torch.equal(triton.multiply(triton.prepare(x[1:2]), weight), y[1:2])
        half = torch.empty(10, COLUMNS, dtype=torch.float16)
        triton.unpack_to(half, weight, 3, 4.0)
        assert (repack.disorder(half.float()) / 4 - dense[3:13]).norm() / dense[3:13].norm() < 1e-3


@pytest.mark.slow
def test_plain_kernels_in_the_interpreter():
    done = python("-c", "import interpreter, test_matmul_triton; test_matmul_triton.main()")
    assert done.stdout.split() == list(DECODERS)


def main() -> None:
    for type_name in DECODERS:
        check(type_name)
        print(type_name)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [75, 80, 90, 120])
def test_kernels_compile(capability, monkeypatch):
    from ggufspec.kernels.matmul import triton

    # a card with the shared memory of a consumer one: Q8_0 at 32 tokens must find a smaller tile
    monkeypatch.setattr(narrow, "card", lambda index: (68, 100 << 10, 99 << 10))
    monkeypatch.setattr(narrow, "plan", narrow.plan.__wrapped__)  # kept plans are of one card
    for module in (cuda, narrow, wide):
        monkeypatch.setattr(module, "capability", lambda index: divmod(capability, 10))
    monkeypatch.setattr(wide, "product", lambda a, w, factor, out: None)  # the library's
    with compiling(capability) as names:
        for type_name in ("Q4_K", "Q6_K", "Q8_0", "BF16", "IQ4_XS", "Q3_K", "Q2_K", "F32"):
            group = cuda.fuse((weights(type_name)[-1],))
            for n_tokens in (2, 24, 40, 100, 200):
                a = triton.prepare(torch.zeros(n_tokens, COLUMNS), pdl=capability >= 90)
                (y,) = cuda.matmul(a, group)
                assert y.shape == (n_tokens, ROWS)
        triton.gather(weights("Q4_K")[1], torch.tensor([1]))
    fast = {"narrow", "unpack"} if capability >= 80 else set()
    assert set(names) == {"prepare_rows", "multiply_rows", "add_parts_kernel", "unpack_rows", "gather_rows"} | fast

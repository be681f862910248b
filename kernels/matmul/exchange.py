"""How the programs that share a tile bring its parts together: one trip through memory, without counters or fences.

A program whose work begins inside a tile leaves that part in a slot of its own; the program with the tile's first part
reads the slots of the programs after it, adds them in the order of K, and empties them. A slot's values say themselves
whether they are there: an empty one holds `EMPTY`, a NaN that no arithmetic gives. So a
part is complete, element by element, as soon as it is seen, and what is read needs no order among other memory.

Programs wait only for those with the next numbers, which are started with or right after them; those do their share
of the tile first. Slots are empty between launches, and the launches of a device run one after another.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from ggufspec.kernels.matmul import values
from ggufspec.kernels.matmul.dialect import barrier

EMPTY = gl.constexpr(values.EMPTY.value)
AT_ONCE = gl.constexpr(4)  # values of one lane that wait together


@constexpr_function
def collect_ptx(n_parts, part_bytes):
    """AT_ONCE sums (operands 4..7) and what the slots (8..11) hold for parts 1, 2... below the count in 12..15.

    All parts are asked for together, again and again until none is empty, then added in their order.
    """
    sums = [(k, j) for k in range(1, n_parts) for j in range(AT_ONCE.value)]
    lines = [".reg .pred p, q;", ".reg .b32 e;", f"mov.b32 e, {EMPTY.value};"]
    lines += [f".reg .b32 v{k}_{j};" for k, j in sums]
    lines.append("again:")
    for k, j in sums:
        lines += [
            f"setp.gt.s32 p, ${12 + j}, {k};",
            f"mov.b32 v{k}_{j}, 0;",
            f"@p ld.relaxed.gpu.global.b32 v{k}_{j}, [${8 + j} + {k * part_bytes}];",
        ]
    for i in range(len(sums)):
        k, j = sums[i]
        lines.append(f"setp.eq.or.b32 q, v{k}_{j}, e, q;" if i else f"setp.eq.b32 q, v{k}_{j}, e;")
    lines.append("@q bra again;")
    for k, j in sums:
        lines.append(f"add.rn.f32 ${j}, ${4 + j if k == 1 else j}, v{k}_{j};")
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.jit
def collect(y, slot, here, n_parts, PARTS: gl.constexpr, SHARED: gl.constexpr):
    """y [M, N] and the tile's n_parts - 1 parts in the slots after this program's own; those are emptied.

    slot: pointers [M, N] to the own slot. SHARED: several warps hold the same values and read the same slots.
    """
    size: gl.constexpr = y.shape[0] * y.shape[1]
    live = gl.where(here, n_parts, 0) + gl.zeros_like(y).to(gl.int32)
    y = gl.inline_asm_elementwise(
        collect_ptx(PARTS, 4 * size), "=f,=f,=f,=f,f,f,f,f,l,l,l,l,r,r,r,r",
        [y, slot.to(gl.int64, bitcast=True), live], gl.float32, False, 4,
    )  # fmt: skip
    if SHARED:
        barrier()
    empty = gl.full_like(live, EMPTY).to(gl.float32, bitcast=True)
    for k in gl.static_range(1, PARTS):
        gl.store(slot + k * size, empty, mask=live > k)
    return y

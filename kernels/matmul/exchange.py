"""How parts of a tile come together, from programs or from ranks: one trip through memory, no counters, no fences.

A program whose work begins inside a tile leaves that part in a slot of its own; the program with the tile's first part
reads the slots of the programs after it, adds them in the order of K, and empties them. A slot's values say themselves
whether they are there: an empty one holds `EMPTY`, a NaN that no arithmetic gives. So a part is complete, element by
element, as soon as it is seen, and what is read needs no order among other memory.

Programs wait only for those with the next numbers, which do their share of the tile first. These are on the card at the
same time, or come next: it starts programs in the order of their numbers, and always has room for a few. Slots are
empty between launches, and the launches of a device run one after another. `joint` says why ranks can do the same.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from ggufspec.kernels.matmul import values
from ggufspec.kernels.matmul.dialect import barrier

EMPTY = gl.constexpr(values.EMPTY.value)
AT_ONCE = gl.constexpr(4)  # values of one lane that wait together


@constexpr_function
def collect_ptx(offsets, needed, own, scope):
    """AT_ONCE sums of what lies `offsets` bytes from operands 8..11, and of operands 4..7 as term `own` of them.

    Term i is there if operands 12..15 are above needed[i], and 0 otherwise. All are asked for together, again and again
    until none is empty, then added in their order. scope: "gpu", or "sys" for what another card writes.
    """
    n = len(offsets)
    lines = [".reg .pred p, q;", ".reg .b32 e;", f"mov.b32 e, {EMPTY.value};"]
    lines += [f".reg .b32 v{i}_{j};" for i in range(n) for j in range(AT_ONCE.value)]
    lines.append("again:")
    for i in range(n):
        for j in range(AT_ONCE.value):
            lines += [
                f"setp.gt.s32 p, ${12 + j}, {needed[i]};",
                f"mov.b32 v{i}_{j}, 0;",
                f"@p ld.relaxed.{scope}.global.b32 v{i}_{j}, [${8 + j} + {offsets[i]}];",
            ]
    for i in range(n):
        for j in range(AT_ONCE.value):
            lines.append(f"setp.eq.or.b32 q, v{i}_{j}, e, q;" if i + j else f"setp.eq.b32 q, v{i}_{j}, e;")
    lines.append("@q bra again;")
    for j in range(AT_ONCE.value):
        terms = [f"v{i}_{j}" for i in range(n)]
        terms.insert(own, f"${4 + j}")
        lines.append(f"add.rn.f32 ${j}, {terms[0]}, {terms[1]};")
        lines += [f"add.rn.f32 ${j}, ${j}, {term};" for term in terms[2:]]
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.jit
def collected(y, at, live, ptx: gl.constexpr):
    return gl.inline_asm_elementwise(
        ptx, "=f,=f,=f,=f,f,f,f,f,l,l,l,l,r,r,r,r", [y, at.to(gl.int64, bitcast=True), live], gl.float32, False, 4
    )


@constexpr_function
def parts_ptx(n_parts, part_bytes):
    """The parts after one's own, of as many as operands 12..15 say."""
    later = list(range(1, n_parts))
    return collect_ptx([k * part_bytes for k in later], later, 0, "gpu")


@constexpr_function
def ranks_ptx(rank, size, part_bytes):
    """The other ranks' parts, where operands 12..15 are 1."""
    others = [r for r in range(size) if r != rank]
    return collect_ptx([r * part_bytes for r in others], [0 for r in others], rank, "sys")


@gluon.jit
def collect(y, slot, here, n_parts, PARTS: gl.constexpr, SHARED: gl.constexpr):
    """y [M, N] and the tile's n_parts - 1 parts in the slots after this program's own; those are emptied.

    slot: pointers [M, N] to the own slot. SHARED: several warps hold the same values and read the same slots.
    """
    size: gl.constexpr = y.shape[0] * y.shape[1]
    live = gl.where(here, n_parts, 0) + gl.zeros_like(y).to(gl.int32)
    y = collected(y, slot, live, parts_ptx(PARTS, 4 * size))
    if SHARED:
        barrier()
    empty = gl.full_like(live, EMPTY).to(gl.float32, bitcast=True)
    for k in gl.static_range(1, PARTS):
        gl.store(slot + k * size, empty, mask=live > k)
    return y


@gluon.jit
def boxes_of(boxes, RANKS: gl.constexpr):
    """Every rank's box."""
    found = ()
    for rank in gl.static_range(RANKS):
        box = gl.load(boxes + rank).to(gl.pointer_type(gl.float32), bitcast=True)
        found = found + (box,)  # type: ignore[assignment]
    return found


@gluon.jit
def over_ranks(
    y, boxes, half, n, row, here, RANK: gl.constexpr, RANKS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    SHARED: gl.constexpr,
):  # fmt: skip
    """The sum over all ranks of y [M, N], tokens n by weight rows `row`, where `here`; see `joint`."""
    part: gl.constexpr = ROWS * COLUMNS
    at = half * (RANKS * part) + n * COLUMNS + row
    for r in gl.static_range(RANKS):
        if r != RANK:
            gl.store(boxes[r] + (at + RANK * part), y, mask=here)
    place = boxes[RANK] + at
    live = here.to(gl.int32) + gl.zeros_like(y).to(gl.int32)
    y = collected(y, place, live, ranks_ptx(RANK, RANKS, 4 * part))
    if SHARED:
        barrier()
    empty = gl.full_like(live, EMPTY).to(gl.float32, bitcast=True)
    for r in gl.static_range(RANKS):
        if r != RANK:
            gl.store(place + r * part, empty, mask=here)
    return y

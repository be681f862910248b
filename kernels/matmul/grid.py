"""Programs of a launch waiting for one another, and launches for the one before: assembly that Gluon has no name for.

A launch whose programs wait for one another must have all of them on the card at once; `chain` sees to that.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ggufspec.kernels.matmul.dialect import barrier

# One thread adds its program to the count (what the program wrote is visible to whoever sees the count) and waits until
# all have come. $0: unused, $1: the counter, $2: the count to wait for.
MEET = gl.constexpr("""{
.reg .pred p;
.reg .b32 t, v;
mov.u32 $0, 0;
mov.u32 t, %tid.x;
setp.ne.u32 p, t, 0;
@p bra DONE;
red.release.gpu.global.add.u32 [$1], 1;
AGAIN:
ld.acquire.gpu.global.u32 v, [$1];
setp.lt.u32 p, v, $2;
@p bra AGAIN;
DONE:
}""")


@gluon.jit
def meet(sync, n):
    """Wait for all programs, the n-th time in this launch; what they wrote before can be read afterwards."""
    barrier()
    gl.inline_asm_elementwise(MEET, "=r,l,r", [sync, n * gl.num_programs(0)], gl.int32, False, 1)
    barrier()


@gluon.jit
def leave(sync):
    """The last program out sets both counters back."""
    if gl.atomic_add(sync + 1, 1) == gl.num_programs(0) - 1:
        gl.store(sync, 0)
        gl.store(sync + 1, 0)


@gluon.jit
def release_dependents():
    """Programmatic dependent launch: let the next kernel start its prologue."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def wait_for_inputs():
    """Programmatic dependent launch: wait for the results of the kernels before."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)

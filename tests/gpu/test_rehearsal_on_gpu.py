"""After a rehearsal nothing is left to compile, captured steps included, and streams are what they were."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from two_engines import GREEDY, KINDS, SAMPLED, Family, drain, outcome, same_slots  # noqa: E402

from ggufspec.job import Request, Speculation  # noqa: E402
from ggufspec.rehearsal import rehearse  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_compiled_after_a_rehearsal(kind):
    import triton

    from ggufspec.kernels.ahead import compiled_ahead

    family, names = Family("cuda:0"), []
    options = {"n_slots": 3, "n_ctx": 1024}

    def play(engine):
        jobs = []
        for n in (1, 30, 250, 700):
            jobs.append(engine.submit(Request((family.prompts[0] * 60)[:n], GREEDY, n_predict=8)))
            drain(engine)
        for n_streams in (1, 2, 3):
            for n_max in range(engine.n_max + 1):
                own = Speculation(n_max=n_max)
                jobs += [
                    engine.submit(Request(p, s, n_predict=12, speculation=own))
                    for p, s in zip(family.prompts[:n_streams], (SAMPLED, GREEDY, SAMPLED))
                ]
                drain(engine)
        return list(map(outcome, jobs))

    rehearsed = family.engine(kind, True, **options)
    with compiled_ahead() as kernels:
        rehearse(rehearsed, [SAMPLED])
    assert len(kernels.launched) > 40
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: names.append(fn.name)
    try:
        streams = play(rehearsed)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert not names, sorted(names)
    fresh = family.engine(kind, True, **options)
    assert play(fresh) == streams
    same_slots(rehearsed, fresh)

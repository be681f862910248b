"""Drafts and accepted counts of tiny models whose weights follow from a formula, against the published numbers."""

import pytest
from fixtures import N_GENERATED, PROMPT, RUNS, make_fixture
from loop import generate, load_target, make_drafter


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fixtures")


@pytest.mark.parametrize("name", RUNS)
def test_drafts_are_the_published_ones(folder, name):
    want = RUNS[name]
    paths = {file: folder / f"{file}.gguf" for file in (want.target, want.drafter) if file}
    for file, path in paths.items():
        if not path.exists():
            make_fixture(path, file)
    file, target = load_target(paths[want.target])
    drafter = make_drafter(
        file, target, paths.get(want.drafter), [want.kind], n_max=want.n_max, p_min=want.p_min, type_k="f32",
        type_v="f32",
    )  # fmt: skip
    run = generate(target, drafter, PROMPT, N_GENERATED, banned=(0,))
    assert run.tokens == generate(target, None, PROMPT, N_GENERATED, banned=(0,)).tokens
    assert run.steps[: len(want.first_steps)] == [(draft, a or 0) for draft, a in want.first_steps]
    if want.accepted_at is not None:
        assert {i: a for i, (_, a) in enumerate(run.steps) if a} == want.accepted_at
    assert (run.n_drafted, run.n_accepted) == (want.n_drafted, want.n_accepted)

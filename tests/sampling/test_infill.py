"""The infill filter on hand-made candidates."""

import numpy as np

from ggufspec.sampling.infill import Pieces, infill

VOCABULARY = Pieces([b"a", b"ab", b"abc", b"x", b"", b"<eot>"], frozenset({5}), 5)


def kept(p):
    ids = np.argsort(-np.array(p), kind="stable")
    out = infill(ids, np.array(p)[ids], VOCABULARY)
    return None if out is None else ids[out].tolist()


def test_ending_wins_when_it_is_likely():
    assert kept([0.3, 0.2, 0.1, 0.2, 0.1, 0.1]) == [5]


def test_prefixes_are_merged_into_the_likelier():
    assert kept([0.15, 0.3, 0.25, 0.28, 0.019, 0.001]) == [1, 5]  # a, abc into ab: 0.7; x with 0.28 < 1/3
    assert kept([0.1, 0.15, 0.25, 0.48, 0.019, 0.001]) == [3, 2, 5]  # 0.5 and 0.48 of what is left


def test_nothing_likely_ends_the_text():
    assert kept([0.18, 0.0, 0.0, 0.19, 0.19, 0.0]) is None

"""What a step leaves for the next one, against numbers worked out by hand; the kernels against their twins."""

import pytest
import torch
from processes import python

from ggufspec.kernels import follow


def test_a_step_goes_on_from_the_one_before():
    values = torch.zeros(4, 4, dtype=torch.int64)
    fresh = torch.tensor([[2, 0], [3, 1], [1, 1], [7, 5], [10, 20], [2, 9], [0, 0]])
    taken = follow.take(fresh, values)
    assert taken.tolist() == [[7, 5], [10, 20], [2, 9], [0, 0], [2, 1]]
    tokens = torch.tensor([[1, 2, 3], [4, 0, 0]])
    shown = follow.advance(values, taken, fresh[0], tokens, torch.tensor([1, 0]), torch.tensor([3, 2]))
    assert shown.tolist() == [[1, 2, 3, 1, 3], [4, 0, 0, 0, 2]]
    assert values[:, 2].tolist() == [2, 12, 0, 2] and values[:, 0].tolist() == [4, 21, 8, 1]
    assert not values[:, [1, 3]].any()
    table = torch.tensor([[0, 2, 1], [5, 5, 4], [0, 0, 1], [0, 0, 3], [0, 0, 1], [0, 0, 6], [0, 0, 0]])
    kept = values.clone()
    shown = follow.advance(values, taken, torch.tensor([3, 1]), tokens, torch.tensor([-1, 0]), torch.tensor([0, 1]))
    assert torch.equal(values[:, [0, 2, 3]], kept[:, [0, 2, 3]]) and values[:, 1].tolist() == [4, 21, 8, 0]
    assert shown[0, 3:].tolist() == [-1, 0]
    values.copy_(kept)
    assert follow.take(table, values).tolist() == [[4, 2, 3], [21, 12, 1], [8, 0, 6], [1, 2, 0], [5, 0, 4]]


@pytest.mark.parametrize("script", ["interpreted_follow.py", "compiled_follow.py"])
def test_kernels_equal_their_twins_and_compile(script):
    pytest.importorskip("triton")
    python(script)

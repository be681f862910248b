"""A step's bookkeeping and carried rows against plain Python loops."""

import torch

from ggufspec.kernels import carry, rows


def test_positions():
    every, valid = rows.positions(torch.tensor([5, 0]), torch.tensor([3, 1]), 3)
    assert every.tolist() == [[5, 6, 7], [0, 1, 2]] and valid.tolist() == [[5, 6, 7], [0, -1, -1]]


def test_masked_block():
    tokens, n_rows = rows.masked_block(torch.tensor([4, 9, 0]), 77, 3, torch.tensor([5, 0, -1]))
    assert tokens.tolist() == [[4, 77, 77], [9, 77, 77], [0, 77, 77]] and n_rows.tolist() == [3, 3, 0]


def test_a_draft_ends_at_an_unknown_id():
    last, draft = torch.tensor([1, 2, 3]), torch.tensor([[5, -1, 6], [7, 8, 9], [10, 3, 3]])
    tokens, n_rows = rows.lay_out(last, draft, torch.tensor([3, 2, 3]), 10)
    assert tokens.tolist() == [[1, 5, 0, 6], [2, 7, 8, 9], [3, 9, 3, 3]] and n_rows.tolist() == [2, 3, 1]
    tokens, n_rows = rows.lay_out(last, draft[:, :0], torch.tensor([0, 0, 0]), 10)
    assert tokens.tolist() == [[1], [2], [3]] and n_rows.tolist() == [1, 1, 1]
    for n in (0, 3):  # padding has no row at all
        assert rows.lay_out(last, draft[:, :n], torch.tensor([0, -1, 0]), 10)[1].tolist() == [1, 0, 1]


def test_accepted_prefix():
    tokens = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]])
    sampled = torch.tensor([[1, 2, 3, 9], [1, 5, 3, 9], [1, 2, 3, 9], [9, 2, 3, 9]])
    is_eog = torch.zeros(10, dtype=torch.bool)
    counts = rows.accepted_prefix(tokens, sampled, torch.tensor([4, 4, 2, 4]), is_eog)
    assert counts.tolist() == [3, 1, 1, 0]
    is_eog[2] = True
    assert rows.accepted_prefix(tokens, sampled, torch.tensor([4, 4, 4, 4]), is_eog).tolist() == [1, 1, 1, 0]
    assert rows.accepted_prefix(tokens, sampled, torch.tensor([0, 4, 0, 1]), is_eog).tolist() == [-1, 1, -1, 0]
    assert rows.accepted_prefix(tokens[:, :1], sampled[:, :1], torch.ones(4).long(), is_eog).tolist() == [0] * 4


def test_carried_rows():
    pending, verified, n_verified = torch.randn(3, 4), torch.zeros(3, 5, 4), torch.ones(3).long()
    hidden, slots, n_past = torch.randn(2, 3, 4), torch.tensor([2, 0]), torch.tensor([7, 0])
    first = torch.stack((pending[2], torch.zeros(4)))
    assert torch.equal(carry.before(pending, slots, n_past)[:, 0], first)
    assert torch.equal(carry.before(pending, slots, n_past, hidden), torch.cat((first[:, None], hidden[:, :2]), 1))
    untouched = pending[1].clone()
    carry.keep(pending, verified, n_verified, hidden, slots, torch.tensor([3, 2]), False)
    assert torch.equal(pending, torch.stack((hidden[1, 1], untouched, hidden[0, 2]))) and not verified.any()
    carry.keep(pending, verified, n_verified, hidden, slots, torch.tensor([3, 2]), True)
    assert torch.equal(verified[2, :3], hidden[0]) and n_verified.tolist() == [2, 1, 3]
    carry.take(pending, verified, n_verified, slots, torch.tensor([1, 4]))
    assert torch.equal(pending, torch.stack((hidden[1, 1], untouched, hidden[0, 1])))


def test_padding_leaves_carried_rows_alone():
    held = torch.randn(3, 4), torch.randn(3, 5, 4), torch.tensor([1, 2, 3])
    kept = [t.clone() for t in held]
    slots, hidden = torch.tensor([1, 2]), torch.randn(2, 3, 4)
    assert not carry.before(held[0], slots, torch.tensor([-1, -1])).any()
    carry.keep(*held, hidden, slots, torch.tensor([0, 0]), True)
    carry.take(*held, slots, torch.tensor([-1, -1]))
    assert all(torch.equal(a, b) for a, b in zip(held, kept))

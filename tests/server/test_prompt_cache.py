"""The host-memory cache of slot states: pure, so its rules are tested without a model."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufspec.prompt_cache import Entry, PromptCache, common_prefix

tokens = st.lists(st.integers(0, 3), max_size=12)


@given(tokens, tokens)
def test_common_prefix_equals_a_loop(a, b):
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    assert common_prefix(a, b) == n


def test_usable_leaves_one_token_to_evaluate():
    entry = Entry(np.array([1, 2, 3], np.int32), None, 1)
    assert entry.usable([1, 2, 3]) == 2
    assert entry.usable([1, 2, 3, 4]) == 3
    assert entry.usable([1, 9]) == 1
    assert entry.usable([]) == 0


def test_a_state_with_cuts_is_usable_only_there():
    entry = Entry(np.arange(10, dtype=np.int32), None, 1, cuts=(4, 7))
    assert entry.usable(list(range(10)) + [99]) == 10  # extends it
    assert entry.usable(list(range(9)) + [99]) == 7
    assert entry.usable(list(range(7)) + [99]) == 7
    assert entry.usable(list(range(6)) + [99]) == 4
    assert entry.usable(list(range(3)) + [99]) == 0
    assert entry.usable(list(range(10))) == 7  # equal: the last token must be evaluated again


def test_budget_drops_the_oldest():
    cache = PromptCache(100)
    assert cache.save([1], "a", 40) and cache.save([2], "b", 40)
    assert cache.save([3], "c", 40)
    assert [entry.state for entry in cache.entries] == ["b", "c"]
    assert cache.n_bytes == 80
    assert not cache.save([4], "d", 101)
    assert [entry.state for entry in cache.entries] == ["b", "c"]


def test_zero_keeps_nothing_and_minus_one_everything():
    off, unlimited = PromptCache(0), PromptCache(-1)
    assert not off.save([1], "a", 1) and len(off) == 0
    for i in range(100):
        assert unlimited.save([i], i, 1 << 40)
    assert len(unlimited) == 100


def test_prefixes_are_replaced_and_contained_prompts_refused():
    cache = PromptCache(-1)
    cache.save([1, 2], "short", 1)
    cache.save([1, 2, 3], "long", 1)
    assert [entry.state for entry in cache.entries] == ["long"]
    assert not cache.save([1, 2], "short", 1)
    assert not cache.save([1, 2, 3], "same", 1)
    # a state that cannot be cut at 3 does not replace one that stands there
    cache.save([1, 2, 3, 4], "longer", 1, cuts=[2])
    assert [entry.state for entry in cache.entries] == ["long", "longer"]
    # ... nor does it make one superfluous that would
    assert not cache.wants([1, 2]) and not cache.wants([1, 2, 3])
    cache.take([1, 2, 3, 0])
    assert cache.wants([1, 2, 3])


def test_take_moves_the_best_entry_out():
    cache = PromptCache(-1)
    cache.save([1, 2, 3, 4], "a", 10)
    cache.save([1, 2, 7, 7, 7], "b", 20)
    entry = cache.take([1, 2, 7, 7, 9])
    assert entry is not None and entry.state == "b"
    assert len(cache) == 1 and cache.n_bytes == 10


def test_take_respects_the_slot_and_the_kept_share():
    cache = PromptCache(-1)
    cache.save(list(range(100)), "a", 1)
    assert cache.take(list(range(24)) + [999, 999]) is None  # 24% of the entry
    assert cache.take(list(range(30)) + [999], slot_keeps=30, slot_len=30) is None  # slot is as good
    assert cache.take(list(range(30)) + [999], slot_keeps=29, slot_len=200).state == "a"


def test_an_empty_cache_is_true():
    cache = PromptCache(10)
    assert (cache or None) is cache


def test_negative_size_is_refused():
    with pytest.raises(ValueError, match="-1 bytes"):
        PromptCache(10).save([1], "a", -1)


@settings(max_examples=200)
@given(st.lists(st.tuples(tokens, st.integers(0, 30), st.booleans()), max_size=30), st.integers(-1, 60))
def test_the_books_always_balance(steps, limit):
    cache = PromptCache(limit)
    for prompt, n_bytes, take in steps:
        if take:
            entry = cache.take(prompt)
            if entry is not None:
                assert entry.usable(prompt) > 0
        elif cache.save(prompt, tuple(prompt), n_bytes):
            assert cache.entries[-1].state == tuple(prompt)
        assert cache.n_bytes == sum(entry.n_bytes for entry in cache.entries)
        assert limit < 0 or cache.n_bytes <= limit
        for entry in cache.entries:
            assert tuple(entry.tokens) == entry.state

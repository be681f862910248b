"""The n-gram drafters against literal transcriptions of their rules, on random texts over few tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufspec.drafters import ngram_cache, ngram_mod
from ggufspec.drafters.ngram_cache import NgramCache
from ggufspec.drafters.ngram_map import NgramMap
from ggufspec.drafters.ngram_mod import NgramMod
from ggufspec.drafters.ngram_simple import NgramSimple, continuation
from ggufspec.errors import ConfigError, FileError
from ggufspec.rows import Rows

texts = st.lists(st.integers(0, 3), max_size=120)


def array(tokens):
    return np.asarray(tokens, dtype=np.int64)


def rows(tokens, slot, n_past, width=None):
    ids = torch.zeros((1, width or len(tokens)), dtype=torch.int64)
    ids[0, : len(tokens)] = torch.tensor(tokens)
    return Rows(ids, torch.tensor([slot]), torch.tensor([n_past]), torch.tensor([len(tokens)]), True)


def propose(drafter, slot, last, n_past, n=None):
    one = [torch.tensor([value]) for value in (slot, last, n_past)]
    draft = drafter.propose(*one, n or drafter.n_max)
    return draft.tokens[0, : int(draft.n_tokens[0])].tolist()


def accept(drafter, slot, n):
    drafter.accept(torch.tensor([slot]), torch.tensor([n]))


def slow_simple(text, last, n, m):
    c = len(text)
    if c <= n + m + 1:
        return []
    key = text[c - n + 1 :] + [last]
    for j in range(c - n - 1, 0, -1):
        if text[j : j + n] == key:
            length = min(m, c - (j + n))
            return text[j + n : j + n + length] if length >= n else []
    return []


@settings(max_examples=200, deadline=None)
@given(texts, st.integers(0, 3), st.integers(1, 5), st.integers(1, 8))
def test_simple_follows_the_rule(text, last, n, m):
    assert continuation(array(text), last, n, m) == slow_simple(text, last, n, m)


def test_simple_never_uses_index_zero():
    text = [9, 8, 7, 6, 1, 2, 3, 4, 5, 9, 8]
    assert continuation(array(text), 7, 3, 3) == []
    assert continuation(array([0, *text]), 7, 3, 3) == [6, 1, 2]


class SlowMap:
    """ngram-map written token by token."""

    def __init__(self, n, m, min_hits, values):
        self.n, self.m, self.min_hits, self.with_values = n, m, min_hits, values
        self.table, self.last, self.begin_size, self.keys, self.current = {}, 0, 0, [], None

    def bucket(self, gram):
        h = 0
        for token in gram:
            h = (h * 2654435761 + token) % 2**32
        return h % 262144

    def draft(self, H, id_last):
        n, m, c = self.n, self.m, len(H)
        self.current = None
        if c < 2 * n + m:
            return []
        key = H[c - n + 1 :] + [id_last]
        first = range(self.begin_size - n - m - 1, self.last, -1)
        second = range(c - n - m - 1, max(self.begin_size, self.last), -1)
        match = 0
        j = self.table.get(self.bucket(key), 0)
        if j != 0 and j < c - n - m - 1 and H[j : j + n] == key:
            match = j
        for scanned in (first, second):
            if match == 0:
                match = next((j for j in scanned if H[j : j + n] == key), 0)
        for scanned in (first, second):
            for j in scanned:
                self.table.setdefault(self.bucket(H[j : j + n]), j)
        self.last = max(self.last, c - n - m - 1)
        if match == 0:
            return []
        record = next((r for r in self.keys if H[r["at"] : r["at"] + n] == key), None)
        if record is None:
            record = {"at": match, "hits": 0, "to": 0, "values": [], "n_accepted": m}
            self.keys.append(record)
        record["hits"] += 1
        if not self.with_values:
            self.current = record
            return H[match + n : match + n + min(m, record["n_accepted"])]
        if record["hits"] < self.min_hits:
            return []
        for i in range(record["to"], match + 1):
            if H[i : i + n] != key:
                continue
            gram = H[i + n : i + n + m]
            value = next((v for v in record["values"] if v["gram"] == gram), None)
            if value is None and len(record["values"]) < 4:
                value = {"gram": gram, "count": 0, "n_accepted": m}
                record["values"].append(value)
            if value is not None:
                value["count"] += 1
        record["to"] = match
        counts = [v["count"] for v in record["values"]]
        best = counts.index(max(counts))
        others = sum(counts) - counts[best]
        if others > 0 and counts[best] < 2 * others:
            return []
        self.current = record["values"][best]
        return H[match + n : match + n + min(m, self.current["n_accepted"])]

    def accept(self, a):
        if self.current is not None:
            self.current["n_accepted"] = a


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=20, max_size=80),
    st.lists(st.integers(0, 2), min_size=30, max_size=60),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 2),
    st.booleans(),
)
def test_map_follows_the_rule(prompt, stream, n, m, min_hits, values):
    """A stream that ignores the drafts: every step accepts what happens to be right."""
    fast, slow = NgramMap(3, 400, n, m, min_hits, values=values), SlowMap(n, m, min_hits, values)
    fast.begin(2, prompt)
    slow.begin_size = len(prompt)
    text, at = list(prompt), 0
    while at + m + 1 < len(stream):
        last = stream[at]
        expected = slow.draft(text, last)
        assert propose(fast, 2, last, len(text)) == expected
        upcoming = stream[at + 1 :]
        n_right = next((i for i, token in enumerate(expected) if token != upcoming[i]), len(expected))
        fast.observe(rows([last, *expected], 2, len(text), width=m + 1), None)
        if expected:
            fast_open = dict(fast.drafted)
            assert fast_open == {2: len(expected)}
            accept(fast, 2, n_right)
            slow.accept(n_right)
        text += stream[at : at + 1 + n_right]
        at += 1 + n_right


def test_map_rejected_draft_disables_its_key():
    prompt = [7, 1, 2, 3, 4, 5, 6, 9, 9, 9, 1, 2, 8, 8, 8, 1]
    drafter = NgramMap(1, 64, 2, 3)
    drafter.begin(0, prompt)
    assert propose(drafter, 0, 2, len(prompt)) == [8, 8, 8]
    accept(drafter, 0, 0)
    assert propose(drafter, 0, 2, len(prompt)) == []


def test_map_forgets_text_that_is_gone():
    drafter = NgramMap(1, 200, 2, 3)
    first = [5, *([1, 2, 3, 4] * 8)]
    drafter.begin(0, first)
    assert propose(drafter, 0, 1, len(first))
    other = [9, 8, 7] * 12
    drafter.begin(0, other)
    assert drafter.indexes[0].keys == [] and not drafter.indexes[0].table.any()
    assert propose(drafter, 0, 1, len(other)) == []


def test_map_shortened_history_keeps_the_index_of_the_common_part():
    drafter = NgramMap(1, 400, 2, 3)
    prompt = [int(x) for x in np.random.default_rng(0).integers(0, 4, 60)]
    drafter.begin(0, prompt)
    longer = prompt + prompt
    drafter.observe(rows(longer[60:], 0, 60), None)
    propose(drafter, 0, longer[0], len(longer))
    drafter.begin(0, longer[:80])
    index = drafter.indexes[0]
    assert index.begin_size == 80 and index.last == 59 and index.table.max() < 60
    assert all(key.position < 60 for key in index.keys)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=20, max_size=100), st.integers(1, 4), st.integers(0, 3))
def test_mod_follows_the_rule(prompt, n, n_min):
    n_max = 6
    drafter = NgramMod(2, 300, n, n_min, n_max)
    drafter.begin(1, prompt)
    table = {}
    for i in range(len(prompt) - n):
        table[ngram_mod.bucket(prompt[i : i + n])] = prompt[i + n]
    window, expected = prompt[len(prompt) - n + 1 :] + [2], []
    while len(expected) < n_max:
        token = table.get(ngram_mod.bucket(window))
        if token is None:
            break
        expected.append(token)
        window = [*window[1:], token]
    if len(expected) < min(n_min, n_max):
        expected = []
    assert propose(drafter, 1, 2, len(prompt)) == expected


def test_mod_clears_the_pool_after_five_poor_drafts():
    drafter = NgramMod(1, 300, 3, 1, 8)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 6
    for i in range(5):
        drafter.begin(0, prompt)
        drafter.n_poor[0] = i  # a prompt does not end the streak
        assert propose(drafter, 0, 1, len(prompt)) == [2, 3, 4, 5, 6, 7, 8, 9]
        accept(drafter, 0, 1)
        assert (drafter.pool.share_used() > 0) == (i < 4)
    assert propose(drafter, 0, 1, len(prompt)) == [2, 3, 4, 5, 6, 7, 8, 9]  # entered again from the text
    accept(drafter, 0, 2)
    assert drafter.n_poor[0] == 0


def test_mod_enters_new_text_in_chunks():
    drafter = NgramMod(1, 300, 2, 1, 4)
    drafter.begin(0, [1, 2, 3])
    drafter.observe(rows([50 + i for i in range(31)], 0, 3), None)
    assert propose(drafter, 0, 51, 3 + 1) == []
    drafter.observe(rows([50, 51], 0, 34), None)
    assert propose(drafter, 0, 51, 35) == [52, 53, 54, 55]


def test_cache_prefers_the_longest_sure_ngram():
    drafter = NgramCache(2, 200)
    text = [1, 2, 3, 4, 5, 1, 2, 3, 9, 7, 2, 3, 9, 6]
    drafter.begin(0, text)
    # 4 was followed by 5 only once: not enough for one token.
    assert propose(drafter, 0, 4, len(text)) == []
    # 2 3 was followed by 4, 9, 9: 66% is enough for two tokens.
    drafter.observe(rows([4, 2, 3], 0, len(text)), None)
    assert propose(drafter, 0, 3, len(text) + 2)[:1] == [9]
    assert propose(drafter, 1, 4, 0) == []


def test_cache_does_not_count_across_calls():
    table = {}
    ngram_cache.add_text(table, [1, 2, 3])
    ngram_cache.add_text(table, [4, 5])
    assert (3,) not in table and table[(1, 2)] == {3: 1} and table[(4,)] == {5: 1}


def test_cache_static_weight_turns_the_choice():
    context = {(1, 2): ngram_cache.Counter({3: 2, 4: 1})}
    assert ngram_cache.best_dynamic(context, ngram_cache.Counter(), [1, 2], (1, 1), (30, 30)) == 3
    assert ngram_cache.best_dynamic(context, ngram_cache.Counter({4: 1}), [1, 2], (1, 1), (30, 30)) == 4


def test_cache_files_are_read_and_checked(tmp_path):
    path = tmp_path / "cache"
    record = array([5, 6, -1, -1, 2, 7, 3, 8, 1]).astype("<i4").tobytes()
    path.write_bytes(record)
    assert ngram_cache.load_table(path) == {(5, 6): {7: 3, 8: 1}}
    assert propose(NgramCache(1, 50, static=path), 0, 6, 0) == []
    drafter = NgramCache(1, 50, static=path)
    drafter.begin(0, [5])
    assert propose(drafter, 0, 6, 1) == [7]
    path.write_bytes(record[:-2])
    with pytest.raises(FileError, match="announces 2 successors"):
        ngram_cache.load_table(path)
    path.write_bytes(record + b"abc")
    with pytest.raises(FileError, match=f"byte {len(record)}"):
        ngram_cache.load_table(path)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: NgramSimple(n, 300, 2, 4),
        lambda n: NgramMap(n, 300, 2, 4),
        lambda n: NgramMap(n, 300, 2, 4, values=True),
        lambda n: NgramCache(n, 300),
    ],
)
def test_slots_are_independent(make):
    """Slot 3 in a batch of four drafts what it drafts alone; rejected rows leave no trace."""
    generator = np.random.default_rng(1)
    prompts = [generator.integers(0, 3, 40).tolist() for _ in range(4)]
    together = make(4)
    for slot, prompt in enumerate(prompts):
        together.begin(slot, prompt)
    n_past = torch.tensor([40] * 4)
    last = torch.tensor([0, 1, 2, 0])
    for slot in range(4):
        together.observe(rows([last[slot].item(), 7, 7, 7], slot, 40), None)  # all rejected
    batch = together.propose(torch.arange(4), last, n_past, 4)
    for slot, prompt in enumerate(prompts):
        alone = make(1)
        alone.begin(0, prompt)
        expected = propose(alone, 0, last[slot].item(), 40, 4)
        assert batch.tokens[slot, : int(batch.n_tokens[slot])].tolist() == expected


def test_sizes_out_of_range_name_the_option():
    for make, option in [
        (lambda: NgramSimple(1, 8, size_n=0), "--spec-ngram-simple-size-n is 0, expected 1 to 1024"),
        (lambda: NgramMap(1, 8, size_m=1025), "--spec-ngram-map-k-size-m is 1025"),
        (lambda: NgramMap(1, 8, min_hits=0, values=True), "-map-k4v-min-hits is 0, expected at least 1"),
        (lambda: NgramMod(1, 8, n_min=-1), "--spec-ngram-mod-n-min is -1"),
    ]:
        with pytest.raises(ConfigError, match=option):
            make()


def test_statistics_as_llama_prints_them():
    drafter = NgramSimple(1, 300, 2, 4)
    assert drafter.stats.line() == (
        "statistics     ngram-simple: #calls(b,g,a) =    0      0      0, #gen drafts =      0, #acc drafts =     0, "
        "#gen tokens =      0, #acc tokens =     0, dur(b,g,a) = 0.000, 0.000, 0.000 ms"
    )
    for call, n in (("begin", 1), ("propose", 3), ("accept", 3)):
        for _ in range(n):
            drafter.stats.add(call, 1.25 / n)
    drafter.stats.record(4, 2)
    drafter.stats.record(3, 0)
    drafter.stats.record(0, 0)
    assert drafter.stats.line() == (
        "statistics     ngram-simple: #calls(b,g,a) =    1      3      2, #gen drafts =      2, "
        "#acc drafts =     1, #gen tokens =      7, #acc tokens =     2, #mean acc len = 2.00, "
        "#acc rate/pos = (0.500, 0.500), "
        "dur(b,g,a) = 1.250, 1.250, 1.250 ms"
    )
    assert drafter.stats.as_dict()["accepted_per_position"] == [0.5, 0.5, 0.0, 0.0]


def test_mod_warns_of_short_ngrams(caplog):
    NgramMod(1, 8, n_match=15)
    assert [record.getMessage() for record in caplog.records] == [
        "--spec-ngram-mod-n-match 15 is below 16: short n-grams draft poorly"
    ]

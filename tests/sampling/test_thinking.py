"""The limit on thinking: counted, forced, and alike with drafts."""

import pytest
import torch
from small_vocabulary import byte_bpe

from ggufspec.grammar import GrammarSpec, GrammarState
from ggufspec.sampling import SamplingParams, sample_rows
from ggufspec.thinking import BudgetState, cuts_character, thinking_budget
from ggufspec.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_metadata({key.name: key.value for key in byte_bpe(320, "qwen2")})
TAGS = ("<think>", "</think>")


def encode(text):
    return TOKENIZER.encode(text, add_special=False, parse_special=True)


THINK, UNTHINK, NEWLINE, X = (encode(text)[0] for text in ("<think>", "</think>", "\n", "x"))


def budget(n, message="", generation_prompt=""):
    return thinking_budget(encode, n, TAGS, message, generation_prompt)


def start(n, kind="none", text="", **more):
    return GrammarState.start(GrammarSpec(kind, text, thinking=budget(n, **more)), TOKENIZER)


def forced_after(state, tokens):
    for token in tokens:
        assert state.advance(token)
    allowed = torch.nonzero(state.allowed(TOKENIZER.n_vocab)).flatten().tolist()
    assert allowed == [t for t in range(TOKENIZER.n_vocab) if state.allows(t)]
    return allowed


def test_budget_of_a_prompt():
    assert budget(5).forced == (NEWLINE, UNTHINK) and not budget(5).opened
    assert budget(5, message="Stop.").forced == (*encode("Stop."), NEWLINE, UNTHINK)
    assert budget(5, generation_prompt="<|im_start|>assistant\n<think>\n").opened
    assert not budget(5, generation_prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n").opened


def test_the_end_mark_is_forced_when_the_budget_is_used_up():
    assert len(forced_after(start(3), [X] * 10)) == TOKENIZER.n_vocab  # no thoughts: no limit
    assert len(forced_after(start(3), [X, THINK, X, X])) == TOKENIZER.n_vocab
    assert forced_after(start(3), [X, THINK, X, X, X]) == [NEWLINE]
    assert forced_after(start(3), [THINK, X, X, X, NEWLINE]) == [UNTHINK]
    assert len(forced_after(start(3), [THINK, X, X, X, NEWLINE, UNTHINK])) == TOKENIZER.n_vocab
    opened = start(2, generation_prompt="<think>\n", message="x")
    assert forced_after(opened, [X, X]) == [X]
    assert not opened.advance(UNTHINK) and opened.advance(X) and opened.advance(NEWLINE) and opened.advance(UNTHINK)


def test_zero_forces_at_once():
    assert forced_after(start(0, generation_prompt="<think>\n"), []) == [NEWLINE]
    assert forced_after(start(0), [THINK]) == [NEWLINE]


def test_an_end_by_itself_ends_the_counting():
    for end in ([UNTHINK], [NEWLINE, UNTHINK]):
        assert len(forced_after(start(4), [THINK, X, *end, *[X] * 9])) == TOKENIZER.n_vocab


def test_a_cut_character_is_completed_first():
    first, second = encode("é")
    state = start(2)
    assert len(forced_after(state, [THINK, X, first])) == TOKENIZER.n_vocab
    assert forced_after(state, [second]) == [NEWLINE]
    assert [cuts_character(b) for b in (b"", b"a", b"\xc3", b"\xc3\xa9", b"a\xf0\x9f\x98", b"\xf0\x9f\x98\x80")] == [
        False, False, True, False, True, False]  # fmt: skip


def test_thoughts_and_a_grammar():
    """The grammar describes the whole answer; forced tokens that it knows move it on."""
    state = start(3, "gbnf", 'root ::= "<think>" [a-z]* "\\n</think>" [0-9]+')
    assert forced_after(state, [THINK, X, X, X]) == [NEWLINE]
    digits = forced_after(state, [NEWLINE, UNTHINK])
    assert digits == [encode(str(d))[0] for d in range(10)]


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_rows_of_a_draft_equal_single_steps(temperature):
    logits = torch.randn(40, TOKENIZER.n_vocab, generator=torch.Generator().manual_seed(1))
    logits[:, X] += 2
    p = SamplingParams(seed=2, temperature=temperature)

    def choose(i, states):
        at = torch.arange(i, i + len(states))
        return sample_rows(logits[i : i + len(states)], p, at, masks=states).tokens.tolist()

    plain, state = [], start(6, generation_prompt="<think>")
    for i in range(40):
        plain += choose(i, [state])
        state.advance(plain[-1])
    assert plain[6:8] == [NEWLINE, UNTHINK]
    for width in (2, 5, 8):
        text, state = [], start(6, generation_prompt="<think>")
        while len(text) + width <= 40:
            draft = plain[len(text) : len(text) + width - 1]
            draft[-1:] = [X]  # the last one is mostly wrong
            chosen = choose(len(text), state.rows(draft))
            n_right = next((i for i, (a, b) in enumerate(zip(chosen, draft)) if a != b), len(draft))
            for token in chosen[: n_right + 1]:
                state.advance(token)
                text.append(token)
        assert text == plain[: len(text)]


def test_states_are_values():
    state = BudgetState.start(budget(3, generation_prompt="<think>"))
    assert state.push(X, b"x") == state.push(X, b"x") and state.left == 3

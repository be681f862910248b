"""`grammar_triggers`: what wakes a lazy grammar, read and refused."""

import pytest
from fake_engine import FakeEngine
from serving import fake_loaded

from ggufspec.grammar import Trigger
from ggufspec.tools.server.errors import ApiError
from ggufspec.tools.server.native import set_grammar
from ggufspec.tools.server.state import ServerState
from ggufspec.tools.settings import Settings

GRAMMAR = 'root ::= "a"'


@pytest.fixture(scope="module")
def state():
    state = ServerState(Settings())
    state.ready(fake_loaded(FakeEngine()))
    return state


def read(state, **body):
    task = state.reader.read(body)
    set_grammar(state, task, body)
    return task


def test_every_kind(state):
    given = [
        {"type": 0, "value": "seven", "token": 7}, {"type": 1, "value": "b"}, {"type": 1, "value": "word"},
        {"type": 2, "value": "x(y)"}, {"type": 3, "value": "z"},
    ]  # fmt: skip
    task = read(state, grammar=GRAMMAR, grammar_lazy=True, grammar_triggers=given, preserved_tokens=["b"])
    assert task.grammar.lazy and task.grammar.triggers == (
        Trigger("token", 7), Trigger("token", 98), Trigger("word", "word"), Trigger("pattern", "x(y)"),
        Trigger("pattern_full", "z"),
    )  # fmt: skip
    assert task.settings()["grammar_triggers"] == [given[0], {"type": 0, "value": "b", "token": 98}, *given[2:]]


def test_triggers_do_nothing_to_a_grammar_that_does_not_wait(state):
    task = read(state, grammar=GRAMMAR, grammar_triggers=[{"type": 2, "value": "x"}])
    assert not task.grammar.lazy and task.grammar.triggers == ()


@pytest.mark.parametrize(
    "triggers, message",
    [
        (5, "must be array"),
        ([5], "expected objects"),
        ([{"type": 4, "value": "a"}], "expected objects"),
        ([{"type": 2}], "expected objects"),
        ([{"type": 0, "value": "a"}], "must be a token's id"),
        ([{"type": 0, "value": "a", "token": 10**6}], "must be a token's id"),
        ([{"type": 1, "value": "a"}], "should be marked as preserved token: a"),
    ],
)
def test_mistakes(state, triggers, message):
    with pytest.raises(ApiError, match=message):
        read(state, grammar=GRAMMAR, grammar_lazy=True, grammar_triggers=triggers)

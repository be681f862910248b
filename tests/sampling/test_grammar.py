"""Grammars: GBNF means what llama.cpp means by it; states follow drafts without running ahead."""

import json

import pytest
import torch

from ggufspec.errors import RequestError
from ggufspec.gbnf import gbnf_to_lark
from ggufspec.grammar import GrammarSpec, GrammarState, Trigger
from ggufspec.sampling import SamplingParams, sample_rows

EXTRA = [b"ab", b"ab", b"end", b"<tool>", '"é"'.encode(), b'{"', b"", b"\0x"]
EOG = (256 + len(EXTRA), 257 + len(EXTRA))


class Bytes:
    """256 bytes, some longer pieces, two end-of-text tokens."""

    pieces = [bytes([i]) for i in range(256)] + EXTRA + [b"<eos>", b"<eot>"]
    n_vocab = len(pieces)
    eog = frozenset(EOG)

    def piece(self, token):
        return self.pieces[token]

    def encode(self, text, add_special=True, parse_special=True):
        return [self.pieces.index(text.encode())] if text.encode() in self.pieces else list(text.encode())


class NoEnd(Bytes):
    eog = frozenset()


VOCABULARY = Bytes()


def start(text, kind="gbnf", **more):
    return GrammarState.start(GrammarSpec(kind, text, **more), VOCABULARY)


def fits(text, state):
    """Whether all of `text` is allowed, byte by byte, and may end there."""
    for byte in text.encode() if isinstance(text, str) else text:
        if not state.advance(byte):
            return False
    return state.accepting


JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# blanks at will, or one line end and an indentation
ws     ::= | " " | "\n" [ \t]{0,20}
"""

CASES = [
    ('root ::= "yes" | "no"', ["yes", "no"], ["", "y", "yess", "nope", "maybe"]),
    ('root ::= [a-z]+ "end"', ["friend", "xend", "endend"], ["end", "xen", "Xend"]),
    ('root ::= "a" "x" | "ab" "y" | [a-c]* "z"', ["ax", "aby", "abz", "z"], ["ay", "abx", "abcx"]),
    ('root ::= ""', [""], ["a"]),
    ('root ::= | "a"', ["", "a"], ["aa"]),
    ('root ::= "a"{2} "b"{1,} "c"{0,2}', ["aab", "aabbbcc"], ["ab", "aa", "aabccc"]),
    ('root ::= ("ab" | "c")+ "d"?', ["ab", "cab", "abccd"], ["", "d", "ad"]),
    ('root ::= expr\nexpr ::= term ([-+*/] term)*\nterm ::= [0-9]+ | "(" expr ")"\n',
     ["1", "12+(3*4)-5", "((7))"], ["", "1+", "(1", "1)"]),
    ('root ::= root "a" | "b"', ["b", "baa"], ["a", "ab"]),
    ("root ::= [^a-z\\]-]", ["A", "é", "日", "\n", "["], ["b", "]", "-", "", "AA"]),
    ("root ::= [a-]+ [\\x41-\\u00e9] [\\U0001F600]", ["-aA😀", "aé😀"], ["bA😀", "a@😀", "aA😁"]),
    ("root ::= . .", ["ab", "\n\n", "é😀"], ["a", "abc"]),
    ('root ::= "\\t\\r\\n\\"\\\\\\[" # comment\n# more\n', ['\t\r\n"\\['], ["t"]),
    ('root ::= ( # a comment\n "a"\n | "b"\n ) "c"\n', ["ac", "bc"], ["c", "abc"]),
    ('root ::=\n  "a" |\n  "b"\n', ["a", "b"], ["ab"]),
    ('under_score ::= "u"\nroot ::= under_score\r\n', ["u"], ["v"]),
    ('root ::= "x" <[258]>', [], ["xend", "x"]),
    ('root ::= "日本" [ぁ-ん]', ["日本ご"], ["日本語", "日"]),
    (JSON, ['{}', '{"a": [1, -2.5e+3, true], "é": "\\u00e9\\n"}', '{"x":{"y":null}} ', '{\n\t"k": ""}'],
     ['[]', '{"a"}', '{"a": 01}', '{"a": "\n"}', '{"a": 1,}', '{  }']),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "good", "bad"), CASES)
def test_gbnf_language(grammar, good, bad):
    for text in good:
        assert fits(text, start(grammar)), text
    for text in bad:
        assert not fits(text, start(grammar)), text


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('start ::= "a"', "no rule named 'root'"),
        ("root ::= foo", r"undefined rule 'foo' at line 1, column 10"),
        ('root ::= "abc', r"without its closing quote at line 1, column 10"),
        ("root ::= [abc", r"without its closing bracket at line 1, column 10"),
        ('root ::= ("a"', r"expected '\)' at line 1, column 14"),
        ("root ::= [z-a]", "runs backwards at line 1, column 10"),
        ("root ::= []", "matches nothing"),
        ('root = "a"', "expected '::=' at line 1, column 6"),
        ('root ::= "a"\nx ::= "\\q"', r"unknown escape \\q at line 2, column 8"),
        ('root ::= "\\u12"', "4 hex digits"),
        ('root ::= "\\UFFFFFFFF"', "not a character"),
        ('root ::= "a"{3,2}', "bounds run backwards"),
        ('root ::= "a"{,2}', "expected a number"),
        ('root ::= "a"{9999}', "more than 2000 repetitions"),
        ("root ::= <nothing-like-it>", "not one token"),
        ('root ::= "a" %', "expected the end of the rule"),
        ("", "no rule named 'root'"),
        ("::=", "expected a name"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply"),
    ],
)
def test_gbnf_mistakes_are_named(grammar, message):
    with pytest.raises(RequestError, match=message):
        gbnf_to_lark(grammar)


@pytest.mark.parametrize("spec", [GrammarSpec("gbnf", "root ::= root"), GrammarSpec("json_schema", '{"$ref": "#"}')])
def test_a_grammar_that_no_text_completes_says_so(spec):
    state = GrammarState.start(spec, VOCABULARY)
    state.allowed(VOCABULARY.n_vocab)
    assert state.error is not None and "no text can complete it" in str(state.error)


def allowed_set(state):
    return set(torch.nonzero(state.allowed(VOCABULARY.n_vocab)).flatten().tolist())


def test_masks_agree_with_single_checks_and_know_every_spelling():
    state = start('root ::= "ab" [cd] "end"?')
    assert allowed_set(state) == {ord("a"), 256, 257}  # both tokens that read "ab"
    for text in (b"", b"a", b"ab", b"abc", b"abcend"):
        state = start('root ::= "ab" [cd] "end"?')
        for byte in text:
            assert state.advance(byte)
        assert allowed_set(state) == {t for t in range(VOCABULARY.n_vocab) if state.allows(t)}
    assert allowed_set(state) == set(EOG)
    assert not state.finished and state.accepting


def test_model_vocabulary_may_be_padded():
    state = start('root ::= "a"')
    wide = state.allowed(VOCABULARY.n_vocab + 50)
    assert wide.shape == (VOCABULARY.n_vocab + 50,) and not wide[VOCABULARY.n_vocab :].any() and wide.sum() == 1
    assert state.allowed(100).sum() == 1


def test_without_end_tokens_the_state_says_finished():
    state = GrammarState.start(GrammarSpec("gbnf", 'root ::= "a" "b"?'), NoEnd())
    assert state.advance(ord("a")) and not state.finished
    assert state.advance(ord("b")) and state.finished
    assert not state.allowed(NoEnd.n_vocab).any()


def test_a_forbidden_token_changes_nothing():
    state = start('root ::= "ab" [cd]')
    assert not state.advance(ord("x")) and state.advance(256) and not state.advance(ord("e"))
    assert state.advance(ord("d")) and state.accepting


def test_control_and_token_references():
    state = start('root ::= "x" <[258]> <tool> !<[97]>')
    for token in (ord("x"), 258, 259):
        assert allowed_set(state) == {token}
        assert state.advance(token)
    assert ord("a") not in allowed_set(state) and ord("b") in allowed_set(state)
    by_text = start('root ::= "<tool>"')
    assert 259 in allowed_set(by_text) and ord("<") in allowed_set(by_text)


def test_rows_of_a_draft_leave_the_state_alone():
    state = start('root ::= [a-z]+ "1" [0-9]*')
    draft = [ord("q"), 256, ord("1"), ord("z"), ord("5")]
    rows = state.rows(draft)
    assert [row is not None for row in rows] == [True, True, True, True, False, False]
    for n in range(4):
        fresh = start('root ::= [a-z]+ "1" [0-9]*')
        assert all(fresh.advance(token) for token in draft[:n])
        assert allowed_set(rows[n]) == allowed_set(fresh)
    assert allowed_set(state) == allowed_set(start('root ::= [a-z]+ "1" [0-9]*'))
    assert state.rows(draft, n_rows=2)[1] is not None and len(state.rows(draft, n_rows=2)) == 2
    ended = start('root ::= "a"').rows([ord("a"), EOG[0], ord("a")])
    assert ended[1] is not None and allowed_set(ended[1]) == set(EOG) and ended[3] is None


def test_lazy_grammar_waits_for_its_word():
    spec = dict(lazy=True, triggers=(Trigger("word", "<tool>"),))
    state = start('root ::= "<tool>" [0-9]+', **spec)
    for byte in b"anything <too":
        assert state.is_waiting and len(allowed_set(state)) == VOCABULARY.n_vocab and state.advance(byte)
    before = state.clone()
    assert state.advance(ord("l")) and state.advance(ord(">"))
    assert not state.is_waiting and allowed_set(state) == set(range(48, 58))
    assert before.is_waiting
    rows = before.rows([ord("l"), ord(">"), ord("7"), ord("x")])
    assert [r.is_waiting for r in rows[:4]] == [True, True, False, False] and rows[4] is None


def test_lazy_grammar_other_triggers():
    by_token = start('root ::= "<tool>" "1"', lazy=True, triggers=(Trigger("token", 259),))
    assert all(by_token.advance(byte) for byte in b"<tool>x") and by_token.is_waiting
    assert by_token.advance(259) and allowed_set(by_token) == {ord("1")}
    group = start('root ::= "{" [0-9] "}"', lazy=True, triggers=(Trigger("pattern", r"call:\s*(\{)"),))
    assert all(group.advance(byte) for byte in b"a {7} call:  {")
    assert allowed_set(group) == set(range(48, 58))
    inside = start('root ::= "b" "c"', lazy=True, triggers=(Trigger("word", "b"),))
    assert inside.advance(256) and allowed_set(inside) == {ord("c")}  # the trigger is a token's second half
    full = start('root ::= "ab" "c"', lazy=True, triggers=(Trigger("pattern_full", "ab"),))
    assert full.clone().advance(ord("x")) and full.advance(ord("a")) and full.advance(ord("b"))
    assert allowed_set(full) == {ord("c")}
    cut = start('root ::= "é" "!"', lazy=True, triggers=(Trigger("word", "é"),))
    assert cut.advance(0xC3) and cut.is_waiting and cut.advance(0xA9) and allowed_set(cut) == {ord("!")}


def test_lazy_mistakes():
    with pytest.raises(RequestError, match="at least one trigger"):
        start('root ::= "a"', lazy=True)
    with pytest.raises(RequestError, match="not a regular expression"):
        start('root ::= "a"', lazy=True, triggers=(Trigger("pattern", "("),))
    state = start('root ::= "b"', lazy=True, triggers=(Trigger("word", "a"),))
    assert state.advance(ord("a")) and "does not fit" in str(state.error) and state.clone().error is state.error
    assert state.allows(ord("z")) and state.advance(ord("z"))  # nothing is constrained any more


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "n": {"type": "integer", "minimum": 0},
        "kind": {"enum": ["x", "yy"]},
        "more": {"type": "array", "items": {"oneOf": [{"type": "boolean"}, {"type": "null"}]}, "maxItems": 2},
    },
    "required": ["name", "n"],
}


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ('{"name": "ab", "n": 3}', True),
        ('{"name":"ab","n":3,"kind":"yy","more":[true,null]}', True),
        ('{\n  "name": "ab",\n  "n": 0\n}', True),
        ('{"name": "abcdef", "n": 3}', False),
        ('{"name": "ab", "n": -3}', False),
        ('{"name": "ab"}', False),
        ('{"name": "ab", "n": 3, "kind": "z"}', False),
        ('{"name": "ab", "n": 3, "extra": 1}', False),
        ('{"name": "ab",          "n": 3}', False),
        ('{"name": "ab", "n": 3, "more": [true, true, true]}', False),
    ],
)
def test_json_schema(text, good):
    assert fits(text, start(json.dumps(SCHEMA), "json_schema")) == good


def test_any_object_regex_and_lark():
    assert fits('{"a": [1, {"b": 2}]}', start('{"type": "object"}', "json_schema"))
    assert fits("[1]", start("", "json_schema"))
    assert fits("2026/11", start(r"\d{4}/\d\d", "regex")) and not fits("26/11", start(r"\d{4}/\d\d", "regex"))
    assert fits("a1", start('start: "a" /[0-9]/', "lark"))
    for kind, text in (("json_schema", "{"), ("json_schema", "[1]"), ("regex", "("), ("lark", "start: foo")):
        with pytest.raises(RequestError) as caught:
            start(text, kind)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_sampling_with_states_equals_sampling_with_masks(temperature):
    """The lazy way (check the free choice, mask only after a refusal) gives the tokens of the full masks."""
    grammar = 'root ::= [a-z]{3,9} ("end" | "-" [0-9]+)'
    n, refused = 40, 0
    logits = torch.randn(n, VOCABULARY.n_vocab, generator=torch.Generator().manual_seed(4)) * 2
    logits[:, 97:123] += 3
    p = SamplingParams(seed=6, temperature=temperature, top_k=0, repeat_penalty=1.2)
    state, tokens = start(grammar), []
    for i in range(n):
        at, history = torch.tensor([i]), [tokens]
        lazy = sample_rows(logits[i : i + 1], p, at, histories=history, masks=[state]).tokens.item()
        full = sample_rows(
            logits[i : i + 1], p, at, histories=history, masks=state.allowed(VOCABULARY.n_vocab)[None]
        ).tokens.item()
        free = sample_rows(logits[i : i + 1], p, at, histories=history).tokens.item()
        assert lazy == full and state.allows(lazy)
        refused += lazy != free
        if lazy in EOG:
            break
        tokens.append(lazy)
        assert state.advance(lazy)
    assert refused > 0

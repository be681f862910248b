"""Request fields without a server: ranges, conversions, biases, drafting limits."""

import json
import logging
import math

import pytest
from fake_engine import ByteTokenizer
from hypothesis import given
from hypothesis import strategies as st

from ggufspec.sampling import SamplingParams
from ggufspec.tools.server.errors import ApiError
from ggufspec.tools.server.fields import SAMPLING_FIELDS, TASK_FIELDS, Reader, Task, float32


@pytest.fixture
def reader():
    return Reader(Task(SamplingParams()), ByteTokenizer(), 2)


# field, value, what llama-server makes of it (None: it refuses)
READINGS = [
    ("temperature", -5, 0.0), ("temperature", 0.5, 0.5), ("temperature", True, 1.0),
    ("dynatemp_range", -5, -5.0), ("top_k", -5, 0), ("top_k", 0.5, 0), ("top_k", 5e9, 0),
    ("top_p", 5, 1.0), ("top_p", -5, 0.0), ("min_p", 5e9, 1.0), ("typical_p", -5, -5.0),
    ("xtc_probability", 3, 1.0), ("repeat_last_n", -5, None), ("repeat_last_n", 5e9, None), ("repeat_last_n", 0.5, 0),
    ("repeat_penalty", -5, None), ("repeat_penalty", 0.5, 0.5), ("presence_penalty", -5, -5.0),
    ("dry_base", 0.5, 1.75), ("dry_base", True, 1.0), ("dry_allowed_length", -5, None), ("mirostat", -5, 0),
    ("mirostat", 5, 2), ("adaptive_target", 5e9, 1.0), ("adaptive_decay", 5, None), ("adaptive_decay", 0.5, 0.5),
    ("min_keep", -5, None), ("n_probs", -5, 0), ("seed", -5, 4294967291), ("seed", 0.5, 0), ("seed", 5e9, 705032704),
    ("ignore_eos", 1, None), ("post_sampling_probs", True, True),
]  # fmt: skip


@pytest.mark.parametrize("name, value, expected", READINGS)
def test_sampling_fields_read_as_llama_server_reads_them(reader, name, value, expected):
    if expected is None:
        with pytest.raises(ApiError):
            reader.read({name: value})
    else:
        assert getattr(reader.read({name: value}).sampling, name) == expected


@given(
    st.dictionaries(
        st.sampled_from([*(f.name for f in (*SAMPLING_FIELDS, *TASK_FIELDS)), "seed", "stop", "logit_bias"]),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
        | st.lists(st.integers() | st.text(max_size=2), max_size=3),
        max_size=4,
    )
)  # fmt: skip
def test_any_value_is_read_or_refused_with_the_field_named(body):
    reader = Reader(Task(SamplingParams()), ByteTokenizer(), 2)
    body = {key: value for key, value in body.items() if value is not None}
    try:
        reader.read(body).settings()
    except ApiError as e:
        assert e.status == 400 and ("Field '" in str(e) or "samplers" in str(e))


def test_the_smallest_limit_wins():
    reader = Reader(Task(SamplingParams(), n_predict=10), ByteTokenizer(), 2)
    bodies = ({}, {"n_predict": 4}, {"max_tokens": 40}, {"n_predict": -1})
    assert [reader.read(body).n_predict for body in bodies] == [10, 4, 10, 10]
    assert reader.read({"max_tokens": 3, "n_predict": 5, "max_completion_tokens": 4}).n_predict == 5


def test_biases(reader):
    def biases(value):
        return reader.read({"logit_bias": value}).sampling.logit_bias

    assert biases([[5, 1], ["ab", -2.5], [6, False]]) == ((5, 1.0), (97, -2.5), (98, -2.5), (6, -math.inf))
    assert biases({"7": 1, "a": False}) == ((7, 1.0), (97, -math.inf))
    assert biases([[1], [1.5, 2], [1, "x"], [9999, 1], 3]) == () and biases(3) == ()
    assert biases([["1", 2]]) == ((49, 2.0),)  # in a list a text is a text, digits or not
    settings = reader.read({"ignore_eos": True, "logit_bias": [[5, False]]}).settings()
    assert settings["logit_bias"] == [{"bias": None, "token": 5}, {"bias": None, "token": 256}]


def test_drafting_limits(reader, caplog):
    assert reader.read({"speculative.n_max": 3}).speculation.n_max == 3
    assert reader.read({"speculative": {"n_max": 0}}).speculation.n_max == 0
    assert reader.read({}).speculation.n_max is None
    with pytest.raises(ApiError, match="speculative.n_max"):
        reader.read({"speculative.n_max": -1})
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            reader.read({"speculative.p_min": 0.5})
    assert len(caplog.records) == 1 and "p_min" in caplog.text


def test_settings_have_the_same_keys_for_every_request(reader):
    whole, short = reader.read({}).settings(), reader.defaults.settings(with_text=False)
    texts = "dry_sequence_breakers stop logit_bias grammar grammar_lazy grammar_triggers preserved_tokens"
    assert set(whole) - set(short) == set(texts.split())
    assert whole["temperature"] == float32(0.8) == 0.800000011920929


def test_settings_are_json_when_a_number_is_too_large_for_float32(reader):
    shown = reader.read({"temperature": 1e300, "dry_base": 1e39, "logit_bias": [[5, 1e200]]}).settings()
    assert shown["temperature"] is shown["dry_base"] is shown["logit_bias"][0]["bias"] is None
    json.dumps(shown, allow_nan=False)

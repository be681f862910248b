"""With drafts, what is delivered is what is counted: tokens, usage and probabilities, wherever the limit falls."""

import json

import pytest
from real import serve_model

HELLO = [{"role": "user", "content": "Write a function that adds two numbers"}]


@pytest.fixture(scope="module")
def client():
    argv = ("-c", "1024", "-np", "1", "--alias", "tiny", "--device", "none", "--cache-ram", "0")
    with serve_model(*argv, "--spec-type", "draft-mtp", "--spec-draft-n-max", "7") as client:
        yield client


def events(answer):
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def entries(event):
    """Tokens with probabilities that came with one event."""
    return [entry for choice in event["choices"] for entry in (choice.get("logprobs") or {}).get("content") or ()]


@pytest.mark.parametrize("limit", range(1, 12))
def test_chat(client, limit):
    body = {"messages": HELLO, "max_tokens": limit, "temperature": 0, "logprobs": True, "top_logprobs": 1}
    whole = client.post("/v1/chat/completions", json=body).json()
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["content"]) == whole["usage"]["completion_tokens"] == limit
    assert whole["timings"]["predicted_n"] == limit
    streamed = client.post("/v1/chat/completions", json=body | {
        "stream": True, "stream_options": {"include_usage": True}})  # fmt: skip
    got = events(streamed)
    tokens = [entry["id"] for event in got for entry in entries(event)]
    assert tokens == [entry["id"] for entry in choice["logprobs"]["content"]]
    assert got[-1]["usage"] == whole["usage"] | {
        "prompt_tokens_details": got[-1]["usage"]["prompt_tokens_details"]}  # fmt: skip


@pytest.mark.parametrize("limit", range(1, 12))
def test_completion(client, limit):
    body = {"prompt": "def add(a, b):\n", "n_predict": limit, "temperature": 0, "ignore_eos": True}
    plain = client.post("/completion", json=body | {"return_tokens": True, "speculative.n_max": 0}).json()
    whole = client.post("/completion", json=body | {"return_tokens": True}).json()
    assert limit < 4 or whole["timings"]["draft_n"] > 0
    assert whole["tokens"] == plain["tokens"] and len(whole["tokens"]) == whole["tokens_predicted"] == limit
    got = events(client.post("/completion", json=body | {"stream": True}))
    assert [token for event in got for token in event.get("tokens", ())] == whole["tokens"]
    assert got[-1]["tokens_predicted"] == got[-1]["timings"]["predicted_n"] == limit

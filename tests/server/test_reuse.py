"""What a follow-up request does not read again: a slot's prefix, checkpoints, the host-memory cache."""

import pytest
from real import serve_model

LONG = " ".join(f"word{i}" for i in range(120))


@pytest.fixture(scope="module", params=["none", "draft-mtp"])
def client(request):
    argv = ("-c", "1536", "-np", "1", "--alias", "tiny", "--cache-ram", "256", "--device", "none")
    with serve_model(*argv, "--spec-type", request.param) as client:
        yield client


def complete(client, prompt, **more):
    body = {"prompt": prompt, "n_predict": 6, "temperature": 0, "return_tokens": True, **more}
    answer = client.post("/completion", json=body).json()
    timings = answer["timings"]
    assert timings["cache_n"] + timings["prompt_n"] == answer["tokens_evaluated"]
    return answer


def test_a_prompt_that_goes_on_reads_only_what_is_new(client):
    first = complete(client, f"a {LONG}", cache_prompt=False)
    longer = f"a {LONG}{first['content']}\nand more\n"
    second = complete(client, longer)
    assert second["timings"]["cache_n"] >= first["tokens_evaluated"] - 1
    cold = complete(client, longer, cache_prompt=False)
    assert cold["timings"]["cache_n"] == 0 and cold["content"] == second["content"]


def test_the_same_prompt_again_reads_little(client):
    first = complete(client, f"b {LONG}", cache_prompt=False)
    again = complete(client, f"b {LONG}")
    assert again["content"] == first["content"] and again["timings"]["prompt_n"] <= 32


def test_a_turn_whose_thoughts_were_stripped_reads_one_turn(client):
    """History comes back without the answer's own words: the cache stands again before that answer."""
    asked = [{"role": "user", "content": LONG}]
    body = {"messages": asked, "max_tokens": 12, "temperature": 0, "chat_template_kwargs": {"enable_thinking": True}}
    first = client.post("/v1/chat/completions", json=body).json()
    told = [*asked, {"role": "assistant", "content": "Short."}, {"role": "user", "content": "Next"}]
    second = client.post("/v1/chat/completions", json=body | {"messages": told}).json()
    new = second["usage"]["prompt_tokens"] - first["usage"]["prompt_tokens"]
    assert second["timings"]["prompt_n"] <= new + 32
    cold = client.post("/v1/chat/completions", json=body | {"messages": told, "cache_prompt": False}).json()
    assert cold["choices"][0]["message"] == second["choices"][0]["message"]


def test_alternating_prompts_live_in_host_memory(client):
    """One slot, four conversations in turn: each comes back from the cache, and says what a cold run says."""
    prompts = [f"{name} {LONG}" for name in ("first", "second", "third", "fourth")]
    cold = [complete(client, prompt, cache_prompt=False) for prompt in prompts]
    for prompt in prompts:
        complete(client, prompt)
    for prompt, alone in zip(prompts, cold):
        warm = complete(client, prompt)
        assert warm["content"] == alone["content"]
        assert warm["timings"]["cache_n"] >= alone["tokens_evaluated"] - 32

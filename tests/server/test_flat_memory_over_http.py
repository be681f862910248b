"""Requests over HTTP leave no objects behind in the server: whole, streamed, refused, and left by their clients."""

import gc
from collections import Counter

from serving import serve_fake

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}


def play_round(client, number):
    for k in range(5):
        prompt = f"{number} {k}"
        assert client.post("/completion", json={"prompt": prompt, "n_predict": 3}).status_code == 200
        assert client.post("/v1/chat/completions", json=CHAT | {"stream": k % 2 == 0}).status_code == 200
        assert client.post("/completion", json={"prompt": []}).status_code == 400
        with client.stream("POST", "/completion", json={"prompt": prompt, "stream": True}) as answer:
            next(answer.iter_lines())


def alive():
    """Objects of the package's own classes; the event loop keeps timers that were called off for a while."""
    gc.collect()
    return Counter(type(o).__name__ for o in gc.get_objects() if str(type(o).__module__).startswith("ggufspec"))


def test_requests_leave_nothing_behind():
    with serve_fake() as client:
        for number in range(3):
            play_round(client, number)
        before = alive()
        for number in range(3, 8):
            play_round(client, number)
        after = alive()
    grown = {name: n - before[name] for name, n in after.items() if n - before[name] >= 5}
    assert before["Job"] > 0 and not grown, grown  # of 100 requests, 25 of each kind

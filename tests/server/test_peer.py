"""The same requests to this server and to llama.cpp's: same status, keys, texts and counts."""

import base64

import httpx
import numpy as np
import pytest
from peer import Peer
from real import serve_model
from table import TABLE, Row, chunks_of, differences, folded

from ggufspec.bundled import target_path
from ggufspec.gguf_file import open_gguf
from ggufspec.quant.policy import Choices, file_type
from ggufspec.quant.requantize import Options, make_plan, run_plan

pytestmark = pytest.mark.peer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The bundled model's weights as F16: llama.cpp rounds activations to int8 for quantized weights, this runtime
    does not, and near ties of the greedy choice would then fall differently.
    """
    path = tmp_path_factory.mktemp("f16") / "tiny.gguf"
    run_plan(make_plan(open_gguf(target_path()), Options(Choices(file_type("F16")), allow_requantize=True)), path)
    return path


@pytest.fixture(scope="module")
def both(tmp_path_factory, model):
    ours = tmp_path_factory.mktemp("ours")
    theirs = tmp_path_factory.mktemp("theirs")
    params = {
        "endpoint_metrics": True,
        "model_alias": ["tiny"],
        "slot_save_path": f"{theirs}/",
    }
    with Peer(model, n_ctx=1024, n_parallel=2, params=params) as peer:
        # llama.cpp's server closes a connection after a hundred requests, whatever the client has just sent
        one_each = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(base_url=peer.address, timeout=120, limits=one_each) as their_client:
            argv = ("-c", "2048", "-np", "2", "--alias", "tiny", "--metrics", "--slot-save-path", str(ours))
            with serve_model(*argv, "--device", "none", model=model) as our_client:
                yield our_client, their_client


def send(client: httpx.Client, row: Row) -> httpx.Response:
    if row.body is None:
        return client.get(row.path)
    if isinstance(row.body, bytes):
        return client.post(row.path, content=row.body)
    return client.post(row.path, json=row.body)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_same_answer(both, row):
    ours, theirs = (send(client, row) for client in both)
    expected = row.status or (theirs.status_code, theirs.status_code)
    assert (theirs.status_code, ours.status_code) == expected, ours.text[:500]
    assert ours.headers["content-type"] == theirs.headers["content-type"]
    if theirs.headers["content-type"] == "text/event-stream":
        assert differences(folded(chunks_of(ours.text)), folded(chunks_of(theirs.text)), row) == []
        return
    if theirs.status_code >= 400:
        compare_errors(ours.json(), theirs.json(), row)
        return
    assert differences(ours.json(), theirs.json(), row) == []


def compare_errors(ours, theirs, row):
    assert ours["error"].keys() == theirs["error"].keys()
    if row.status is None:
        assert ours["error"].get("type") == theirs["error"].get("type")
        for key in ("n_prompt_tokens", "n_ctx"):
            assert ours["error"].get(key) == theirs["error"].get(key)
    # the message begins the same way; llama.cpp's own parser's words follow
    n = min(24, len(theirs["error"]["message"]))
    if row.status is None and row.name != "responses previous":
        assert ours["error"]["message"][:n] == theirs["error"]["message"][:n]


def test_the_table_is_long_enough():
    assert len(TABLE) >= 60 and len({row.name for row in TABLE}) == len(TABLE)


def test_metrics_names(both):
    def names(client):
        return {line.split("{")[0].split(" ")[0] for line in client.get("/metrics").text.splitlines() if line[0] != "#"}

    ours, theirs = map(names, both)
    assert theirs <= ours
    assert all(name.startswith("ggufspec:") for name in ours - theirs)


def test_slots(both):
    """Before its first task a slot shows four keys, afterwards all of them."""
    body = {"prompt": "def add(a, b):\n", "n_predict": 3, "temperature": 0, "top_k": 7, "id_slot": 1}
    shown = []
    for client in both:
        client.post("/completion", json=body)
        shown.append(client.get("/slots").json()[1])
    loose = Row("slots", "", loose=("id_task", "n_prompt_tokens_processed", "n_prompt_tokens_cache", "n_prompt_tokens"))
    assert differences(*shown, loose) == []


def test_embeddings(model):
    """Pooled vectors point the same way; shapes, counts and refusals agree."""
    params = {"embedding": True, "pooling_type": 1, "n_batch": 512, "n_ubatch": 512}
    argv = ("-c", "512", "-np", "1", "--embeddings", "--pooling", "mean", "--device", "none")
    with Peer(model, n_ctx=512, params=params) as peer, serve_model(*argv, model=model) as ours:
        with httpx.Client(base_url=peer.address, timeout=60) as theirs:
            for body in ({"input": "def add(a, b):\n"}, {"input": ["a b c", [1, 2, 3]]}):
                one, two = (client.post("/v1/embeddings", json=body).json() for client in (ours, theirs))
                assert one.keys() == two.keys() and one["usage"] == two["usage"]
                for a, b in zip(one["data"], two["data"], strict=True):
                    assert a.keys() == b.keys()
                    a, b = np.array(a["embedding"]), np.array(b["embedding"])
                    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.9999 and abs(np.linalg.norm(a) - 1) < 1e-5
            for body in ({"input": "a", "encoding_format": "base64"}, {"input": ""}, {"input": []}, {}):
                one, two = (client.post("/v1/embeddings", json=body) for client in (ours, theirs))
                assert one.status_code == two.status_code
                if one.status_code == 200:
                    row = np.frombuffer(base64.b64decode(one.json()["data"][0]["embedding"]), "<f4")
                    assert one.json()["data"][0].keys() == two.json()["data"][0].keys() and len(row) == 512
            one, two = (client.post("/embedding", json={"content": "a b"}).json() for client in (ours, theirs))
            assert len(one) == len(two) == 1 and one[0].keys() == two[0].keys()
            assert len(one[0]["embedding"]) == len(two[0]["embedding"]) == 1

"""HTTP without a model: status codes, headers, keys, limits, disconnects, draining, death."""

import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fake_engine import ByteTokenizer, FakeEngine, stream_of
from serving import fake_loaded, serve, serve_fake, wait_ready

from ggufspec.tools.server import app, native
from ggufspec.tools.server.respond import error_response


def text_of(prompt: str) -> str:
    return ByteTokenizer().decode(stream_of(prompt.encode())[:-1])


@pytest.fixture(scope="module")
def client():
    with serve_fake(metrics=True) as client:
        yield client


def post(client, path, body):
    return client.post(path, content=body if isinstance(body, bytes) else json.dumps(body))


def test_health_headers_and_unknown_paths(client):
    answer = client.get("/health", headers={"origin": "http://a.b"})
    assert answer.json() == {"status": "ok"}
    assert answer.headers["server"] == "llama.cpp"
    assert answer.headers["access-control-allow-origin"] == "http://a.b"
    assert answer.headers["content-type"] == "application/json; charset=utf-8"
    for method, path in (("GET", "/nope"), ("POST", "/health"), ("GET", "/v1/chat/completions"), ("PUT", "/props")):
        answer = client.request(method, path)
        assert answer.status_code == 404
        assert answer.json() == {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}


def test_options_needs_no_key():
    with serve_fake(api_keys=("k",)) as client:
        answer = httpx.options(str(client.base_url) + "/v1/models", headers={"origin": "http://a.b"})
    assert answer.status_code == 200 and answer.content == b""
    assert answer.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
    assert answer.headers["access-control-allow-headers"] == "*"
    assert answer.headers["access-control-allow-credentials"] == "true"


@pytest.mark.parametrize(
    "options, origin, allowed",
    [
        ({"cors_origins": "localhost"}, "http://localhost:3000", "http://localhost:3000"),
        ({"cors_origins": "localhost"}, "https://[::1]", "https://[::1]"),
        ({"cors_origins": "localhost"}, "http://localhost.evil.com", None),
        ({"cors_credentials": False}, "http://a.b", "*"),
        ({"cors_origins": "http://me"}, "http://a.b", "http://me"),
    ],
)
def test_cors(options, origin, allowed):
    with serve_fake(**options) as client:
        answer = client.get("/health", headers={"origin": origin})
    assert answer.headers.get("access-control-allow-origin") == allowed


def test_api_keys():
    with serve_fake(api_keys=("one", "two")) as client:
        base = str(client.base_url)
        bad = httpx.get(base + "/v1/models")
        assert bad.status_code == 401
        error = {"message": "Invalid API Key", "type": "authentication_error", "code": 401}
        assert bad.json() == {"error": error}
        for headers in ({"authorization": "Bearer two"}, {"authorization": "one"}, {"x-api-key": "two"}):
            assert httpx.get(base + "/v1/models", headers=headers).status_code == 200
        for headers in ({"authorization": "Bearer three"}, {"x-api-key": ""}, {"authorization": "Bearer é".encode()}):
            assert httpx.get(base + "/v1/models", headers=headers).status_code == 401
        for path in ("/health", "/v1/health", "/"):
            assert httpx.get(base + path).status_code == 200
        assert httpx.get(base + "/nope").status_code == 401


def test_a_byte_order_mark_is_skipped(client):
    body = b'{"prompt":"a","n_predict":2}'
    assert post(client, "/completion", b"\xef\xbb\xbf" + body).status_code == 200


@pytest.mark.parametrize(
    "body, start",
    [
        (b"{", "[json.exception.parse_error.101] parse error at line 1, column 2"),
        (b"", "[json.exception.parse_error.101] parse error at line 1, column 1: attempting to parse an empty input"),
        (b'{"prompt":"\xff"}', "[json.exception.parse_error.101] parse error at line 1, column 12"),
        (b'{"prompt":"\\ud800"}', "[json.exception.parse_error.101] parse error"),
        (b'{"prompt":NaN}', "[json.exception.parse_error.101] parse error"),
        (b'{"prompt":"a","top_p":-1e999}', "[json.exception.out_of_range.406] number overflow parsing '-1e999'"),
        (b"\xef\xbb\xbf", "[json.exception.parse_error.101] parse error at line 1, column 1: attempting to parse an"),
        (b"[" * 200000, "[json.exception.parse_error.101] parse error"),
        (b'{"prompt":"a","seed":' + b"9" * 5000 + b"}", "[json.exception.parse_error.101] parse error"),
        (b"[]", "[json.exception.type_error.304] cannot use at() with array"),
        (b"3", "[json.exception.type_error.304] cannot use at() with number"),
        (b"{}", "[json.exception.out_of_range.403] key 'prompt' not found"),
        (b'{"prompt":[]}', '"prompt" must not be empty'),
        (b'{"prompt":{}}', '"prompt" elements must be a string'),
        (b'{"prompt":[1,true]}', '"prompt" elements must be a string'),
        (b'{"prompt":[0,99999]}', "Prompt contains invalid tokens"),
        (b'{"prompt":[-1]}', "Prompt contains invalid tokens"),
        (b'{"prompt":"a","top_p":"x"}', "Field 'top_p': [json.exception.type_error.302] type must be number, but"),
        (b'{"prompt":"a","stream":"x"}', "Field 'stream': [json.exception.type_error.302] type must be boolean"),
        (b'{"prompt":"a","n_predict":-5}', "Field 'n_predict': Value must be between -1 <= value <= 2147483647, but"),
        (b'{"prompt":"a","n":5}', "Field 'n': Value must be between 1 <= value <= 2, but got 5"),
        (b'{"prompt":"a","grammar":"x ::= ["}', "Failed to initialize samplers: failed to parse grammar"),
    ],
)
def test_bad_bodies(client, body, start):
    answer = post(client, "/completion", body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"].startswith(start)
    assert error["code"] == 400 and error["type"] == "invalid_request_error"


def test_context_overflow_gives_both_numbers(client):
    error = post(client, "/completion", {"prompt": "a" * 600}).json()["error"]
    assert error == {
        "code": 400,
        "message": "request (600 tokens) exceeds the available context size (512 tokens), try increasing it",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": 600,
        "n_ctx": 512,
    }
    stream = post(client, "/completion", {"prompt": "a" * 600, "stream": True})
    assert stream.status_code == 400


def test_completion_and_stream_say_the_same(client):
    whole = post(client, "/completion", {"prompt": "hello"}).json()
    assert whole["content"] == text_of("hello")
    assert whole["stop_type"] == "eos" and whole["tokens_evaluated"] == 5
    chunks = sse(post(client, "/completion", {"prompt": "hello", "stream": True}))
    assert "".join(c["content"] for c in chunks) == whole["content"]
    assert chunks[-1]["stop"] and not any(c["stop"] for c in chunks[:-1])
    assert chunks[-1]["tokens_predicted"] == whole["tokens_predicted"] == sum(len(c["tokens"]) for c in chunks)


def sse(answer):
    assert answer.headers["content-type"] == "text/event-stream", answer.text
    lines = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_empty_prompt_has_an_empty_answer(client):
    whole = post(client, "/completion", {"prompt": ""}).json()
    assert whole["content"] == "" and whole["tokens_predicted"] == 0
    assert sse(post(client, "/completion", {"prompt": "", "stream": True}))[-1]["stop"]


def test_several_prompts_and_n(client):
    many = post(client, "/completion", {"prompt": ["a", "b", "c"]}).json()
    assert [r["content"] for r in many] == [text_of(p) for p in "abc"]
    assert [r["index"] for r in many] == [0, 1, 2]
    chunks = sse(post(client, "/completion", {"prompt": "a", "n": 2, "stream": True}))
    for index in (0, 1):
        assert "".join(c["content"] for c in chunks if c["index"] == index) == text_of("a")


def test_response_fields(client):
    body = {"prompt": "a", "n_predict": 3, "response_fields": ["content", "generation_settings/n_predict", "zz/a"]}
    assert post(client, "/completion", body).json() == {"content": text_of("a")[:3], "generation_settings/n_predict": 3}


def test_the_vocabulary_is_searched_for_breakers_beside_the_engine(client, monkeypatch):
    threads = []
    monkeypatch.setattr(native, "bind", lambda params, tokenizer: threads.append(threading.current_thread().name))
    body = {"prompt": "a", "n_predict": 1}
    assert client.post("/completion", json=body).status_code == 200 and threads == []
    assert client.post("/completion", json=body | {"dry_multiplier": 0.5}).status_code == 200
    assert len(threads) == 1 and threads[0].startswith("asyncio_")


def test_probabilities_count_equals_usage(client):
    # é is two tokens; the first ends inside a character, yet has an entry of its own
    body = {"prompt": "a", "n_probs": 2, "n_predict": 30}
    whole = post(client, "/completion", body).json()
    assert len(whole["completion_probabilities"]) == whole["tokens_predicted"] == 30
    first = whole["completion_probabilities"][0]
    assert first["logprob"] == -0.5 and len(first["top_logprobs"]) == 2 and first["bytes"] == [ord("w")]
    post_sampling = post(client, "/completion", body | {"post_sampling_probs": True}).json()
    assert post_sampling["completion_probabilities"][0].keys() == {"id", "token", "bytes", "prob", "top_probs"}


def test_time_and_indent_limits(client):
    body = {"prompt": "a", "stop": ["never"], "n_indent": 4}
    assert post(client, "/completion", body).json()["content"] == text_of("a")  # nothing after the line break


def test_progress(client):
    body = {"prompt": "abc", "stream": True, "return_progress": True, "n_predict": 2}
    chunks = sse(post(client, "/completion", body))
    progress = [c["prompt_progress"] for c in chunks if "prompt_progress" in c]
    assert [(p["total"], p["cache"], p["processed"]) for p in progress] == [(3, 0, 0), (3, 0, 3)]


def test_tokenize_family(client):
    assert post(client, "/tokenize", {"content": "hé"}).json() == {"tokens": [104, 195, 169]}
    pieces = post(client, "/tokenize", {"content": "hé", "with_pieces": True}).json()["tokens"]
    assert pieces == [{"id": 104, "piece": "h"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert post(client, "/tokenize", {"content": ["a", 256]}).json() == {"tokens": [97, 256]}
    assert post(client, "/tokenize", {}).json() == {"tokens": []}
    assert post(client, "/tokenize", {"content": 3}).status_code == 400
    assert post(client, "/detokenize", {"tokens": [104, 105]}).json() == {"content": "hi"}
    assert post(client, "/detokenize", {"tokens": "x"}).status_code == 400
    assert post(client, "/detokenize", {"tokens": [999]}).status_code == 400


def test_tokenizing_leaves_the_event_loop_alone(client, monkeypatch):
    threads = []
    for name in ("encode", "decode"):
        real = getattr(ByteTokenizer, name)

        def recorded(self, *args, real=real, **options):
            threads.append(threading.current_thread().name)
            return real(self, *args, **options)

        monkeypatch.setattr(ByteTokenizer, name, recorded)
    assert client.post("/tokenize", json={"content": "ab"}).json() == {"tokens": [97, 98]}
    assert client.post("/detokenize", json={"tokens": [97, 98]}).json() == {"content": "ab"}
    assert len(threads) == 2 and all(name.startswith("asyncio_") for name in threads)


def test_others_are_answered_while_tokens_become_text(client, monkeypatch):
    begun, answered = threading.Event(), threading.Event()
    real = ByteTokenizer.decode

    def slow(self, ids, **options):
        begun.set()
        assert answered.wait(10), "nobody else was answered"
        return real(self, ids, **options)

    monkeypatch.setattr(ByteTokenizer, "decode", slow)
    body = {"tokens": [97, 98] * 200_000}  # a body that is parsed beside the event loop too
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(httpx.post, f"{client.base_url}/detokenize", json=body, timeout=20)
        assert begun.wait(10)
        assert client.get("/health").status_code == 200
        assert client.post("/tokenize", json={"content": "a"}).json() == {"tokens": [97]}
        answered.set()
        assert text.result().json() == {"content": "ab" * 200_000}


def test_disabled_endpoints(client):
    assert post(client, "/infill", {}).status_code == 501
    assert post(client, "/v1/embeddings", {"input": "a"}).status_code == 501
    assert post(client, "/rerank", {}).status_code == 501
    assert post(client, "/props", {}).status_code == 501
    assert post(client, "/slots/0?action=save", {"filename": "a"}).status_code == 501
    assert client.get("/tools").status_code == 403
    assert client.get("/lora-adapters").json() == []


def test_loading_answers_503_and_the_page():
    go = threading.Event()

    def load():
        go.wait(10)
        return fake_loaded(FakeEngine())

    with serve(load) as (address, _):
        with httpx.Client(base_url=address) as client:
            answer = client.get("/health")
            assert answer.status_code == 503
            error = {"message": "Loading model", "type": "unavailable_error", "code": 503}
            assert answer.json() == {"error": error}
            assert client.get("/").status_code == 200
            go.set()
            wait_ready(client)


def test_no_page():
    with serve_fake(ui=False) as client:
        assert client.get("/").status_code == 404


def test_api_prefix():
    with serve_fake_prefixed() as client:
        assert client.get("/x/health").status_code == 200
        assert client.get("/health").status_code == 404


def serve_fake_prefixed():
    import contextlib

    @contextlib.contextmanager
    def run():
        engine = FakeEngine()
        with serve(lambda: fake_loaded(engine), api_prefix="/x") as (address, _):
            with httpx.Client(base_url=address) as client:
                end = time.monotonic() + 5
                while client.get("/x/health").status_code != 200 and time.monotonic() < end:
                    time.sleep(0.02)
                yield client

    return run()


def test_body_limit(client, monkeypatch):
    from ggufspec.tools.server import transport

    monkeypatch.setattr(transport, "MAX_BODY_BYTES", 1000)
    assert post(client, "/completion", {"prompt": "a" * 2000}).status_code == 413

    def chunks():
        for _ in range(5):
            yield b'{"prompt":"' + b"a" * 300

    answer = client.post("/completion", content=chunks())
    assert answer.status_code == 413 and "1000 bytes" in answer.json()["error"]["message"]


def test_a_body_that_never_ends_times_out():
    with serve_fake(timeout_s=1) as client:
        host, port = client.base_url.host, client.base_url.port
        with socket.create_connection((host, port)) as sock:
            sock.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
            sock.settimeout(8)
            start = time.monotonic()
            assert b"408" in sock.recv(200).split(b"\r\n")[0]
            assert time.monotonic() - start < 5


@pytest.mark.parametrize("path", ["/completion", "/slots/0?action=save"])
def test_a_client_that_leaves_before_its_body_is_no_failure(path, caplog, monkeypatch, tmp_path):
    left = threading.Event()
    monkeypatch.setattr(app, "error_response", lambda error: (left.set(), error_response(error))[1])
    with serve_fake(slot_save_path=str(tmp_path)) as client:
        with socket.create_connection((client.base_url.host, client.base_url.port)) as sock:
            sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{{".encode())
            time.sleep(0.1)
        assert left.wait(5)
        assert client.get("/health").status_code == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_disconnect_frees_the_slot():
    engine = FakeEngine(n_slots=1, step_s=0.05)
    with serve_fake(engine) as client:
        for stream in (True, False):
            host, port = client.base_url.host, client.base_url.port
            body = json.dumps({"prompt": "hello", "stream": stream}).encode()
            sock = socket.create_connection((host, port))
            head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            sock.sendall(head + body)
            wait_until(lambda: engine.slots[0].job is not None)
            sock.close()
            start = time.monotonic()
            wait_until(lambda: engine.slots[0].job is None)
            assert time.monotonic() - start < 1.0


def wait_until(condition, timeout_s=5.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def test_pings_while_waiting_for_a_slot():
    engine = FakeEngine(n_slots=1, step_s=0.015)
    with serve_fake(engine) as client:
        blocker = threading.Thread(target=lambda: post(client, "/completion", {"prompt": "one"}))
        blocker.start()
        wait_until(lambda: engine.slots[0].job is not None)
        body = {"prompt": "two", "stream": True, "sse_ping_interval": 1}
        answer = post(client, "/completion", body)
        assert answer.text.startswith(":\n\n")
        assert "".join(c["content"] for c in sse(answer)) == text_of("two")
        blocker.join()


def test_slots_show_what_runs():
    engine = FakeEngine(n_slots=2, step_s=0.02)
    with serve_fake(engine) as client:
        assert client.get("/slots").json()[1].keys() == {"id", "n_ctx", "speculative", "is_processing"}
        assert client.get("/slots?fail_on_no_slot=1").status_code == 200
        thread = threading.Thread(target=lambda: post(client, "/completion", {"prompt": ["a", "b"], "top_k": 3}))
        thread.start()
        wait_until(lambda: all(slot.job is not None and slot.job.generated for slot in engine.slots))
        busy = client.get("/slots?fail_on_no_slot=1")
        slot = client.get("/slots").json()[0]
        thread.join()
        assert busy.status_code == 503 and busy.json()["error"]["message"] == "no slot available"
        assert slot["is_processing"] and slot["params"]["top_k"] == 3 and slot["next_token"][0]["n_decoded"] > 0
        idle = client.get("/slots").json()[0]
        assert not idle["is_processing"] and idle["params"]["top_k"] == 3 and idle["id_task"] == slot["id_task"]
        assert idle["next_token"] == [
            {"has_next_token": False, "has_new_line": False, "n_remain": -1, "n_decoded": 0}
        ]


def test_many_streams_keep_apart(client):
    answers = {}

    def run(prompt):
        answers[prompt] = post(client, "/completion", {"prompt": prompt}).json()["content"]

    threads = [threading.Thread(target=run, args=(f"prompt {i}",)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {f"prompt {i}": text_of(f"prompt {i}") for i in range(12)}


def test_a_dead_engine_answers_every_request_with_500_and_ends():
    engine = FakeEngine(n_slots=2, step_s=0.02, die_after=6)
    with serve_fake(engine) as client:
        got = []
        threads = [
            threading.Thread(target=lambda s=s: got.append(post(client, "/completion", {"prompt": "x", "stream": s})))
            for s in (True, False, False)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(got) == 3
        codes = sorted(answer.status_code for answer in got)
        assert codes in ([200, 500, 500], [500, 500, 500])  # a stream that had begun ends with an error event
        assert all("device lost" in answer.text for answer in got)
        wait_until(lambda: client.server.failures)
        assert "device lost" in str(client.server.failures[0])


def test_draining_lets_streams_end_and_refuses_new_ones(monkeypatch):
    engine = FakeEngine(n_slots=2, step_s=0.01)
    with serve_fake(engine) as client:
        got = []
        thread = threading.Thread(target=lambda: got.append(post(client, "/completion", {"prompt": "last words"})))
        thread.start()
        wait_until(lambda: engine.slots[0].job is not None)
        client.server.http.handle_exit(15, None)
        thread.join(10)
        assert got[0].json()["content"] == text_of("last words")


def test_draining_has_an_end(monkeypatch):
    from ggufspec.tools.server import app

    monkeypatch.setattr(app, "DRAIN_S", 0.3)
    engine = FakeEngine(n_slots=1, step_s=0.2)
    with serve_fake(engine) as client:
        got = []
        thread = threading.Thread(target=lambda: got.append(post(client, "/completion", {"prompt": "long"})))
        thread.start()
        wait_until(lambda: engine.slots[0].job is not None)
        start = time.monotonic()
        client.server.http.handle_exit(15, None)
        thread.join(10)
        assert time.monotonic() - start < 3
        assert got[0].status_code == 503


def test_metrics(client):
    post(client, "/completion", {"prompt": "abcd", "n_predict": 3})
    answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4"
    assert int(answer.headers["process-start-time-unix"]) > 1_600_000_000
    values = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    for name in (
        "prompt_tokens_total", "prompt_tokens_cached_total", "prompt_seconds_total", "tokens_predicted_total",
        "tokens_predicted_seconds_total", "n_decode_total", "n_tokens_max", "prompt_tokens_seconds",
        "predicted_tokens_seconds", "requests_processing", "requests_deferred", "n_busy_slots_per_decode",
        "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total",
    ):  # fmt: skip
        assert float(values[f"llamacpp:{name}"]) >= 0
        assert f"# HELP llamacpp:{name} " in answer.text and f"# TYPE llamacpp:{name} " in answer.text
    # Since the last scrape; a step counts after its answer is on its way.
    rates = [float(values["llamacpp:predicted_tokens_seconds"])]
    while rates[-1] > 0 or max(rates) == 0:
        assert len(rates) < 300
        time.sleep(0.01)
        again = client.get("/metrics").text
        rates.append(float(re.findall(r"^llamacpp:predicted_tokens_seconds (.*)", again, re.M)[0]))


def test_metrics_are_off_by_default():
    with serve_fake() as client:
        assert client.get("/metrics").status_code == 501
        assert client.get("/slots").status_code == 200
    with serve_fake(slots=False) as client:
        assert client.get("/slots").status_code == 501

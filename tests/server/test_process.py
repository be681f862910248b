"""`ggufspec server` as a process: start-up errors, signals, TLS, sockets, slot files across restarts."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time

import httpx
import pytest

from ggufspec.bundled import path, target_path

RUN = [sys.executable, "-c", "from ggufspec.tools.main import main; main()", "server"]
CODE = "def add(a, b):\n"


class Process:
    """A started server; `address` comes from its log."""

    def __init__(self, *argv, model=None, tls=False):
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}  # not the source folder: see conftest
        small = ["--port", "0", "-c", "1024", "-np", "2", "--device", "none"]
        arguments = ["-m", str(model or target_path()), *small, *argv]
        self.process = subprocess.Popen(RUN + arguments, stderr=subprocess.PIPE, text=True, env=environ)
        self.lines = []
        self.address = ""
        self._found = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._found.wait(60) and self.address, self.log
        verify = ssl._create_unverified_context() if tls else True
        self.client = httpx.Client(base_url=self.address, timeout=60, verify=verify)
        end = time.monotonic() + 90
        while self.client.get("/health").status_code != 200:
            assert time.monotonic() < end and self.process.poll() is None, self.log
            time.sleep(0.1)

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            if "listening on http" in line:  # a socket file is announced as well, in either order
                self.address = line.rsplit(" ", 1)[1].strip()
                self._found.set()
        self._found.set()

    @property
    def log(self):
        return "".join(self.lines)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


def run(*argv, timeout=90):
    done = subprocess.run(RUN + list(argv), capture_output=True, text=True, timeout=timeout)
    return done.returncode, done.stderr.strip().splitlines()


@pytest.mark.parametrize(
    "argv, words",
    [
        ((), "--model is required"),
        (("-m", "nothing.gguf"), "nothing.gguf"),
        (("-m", __file__), "test_process.py"),
        (("-m", "x", "--slot-save-path", "/nowhere"), "not a directory: /nowhere"),
        (("-m", "x", "--api-key-file", "/nowhere"), "--api-key-file /nowhere: cannot be read (No such file"),
        (("-m", "x", "--ssl-key-file", __file__), "--ssl-key-file and --ssl-cert-file go together"),
        (("-m", "x", "--spec-type", "draft-mtp", "--spec-draft-p-min", "7"), "invalid value 7: expected 0 to 1"),
        (("-m", "x", "--nonsense"), "invalid argument: --nonsense"),
        (("-m", "x", "--rerank"), "--rerank is not supported"),
    ],
)
def test_a_bad_start_is_one_line_and_status_1(argv, words):
    code, lines = run("--port", "0", *argv)
    assert code == 1
    assert words in lines[-1] and not any("Traceback" in line for line in lines), lines


def test_nothing_listens_without_a_model():
    assert run("--port", "0") == (1, ["error: --model is required: give a GGUF file with -m (router mode is not "
                                      "supported)"])  # fmt: skip


def test_a_command_line_written_for_llama_server():
    """What people already have in their scripts, with the bundled target and its DSpark drafter."""
    line = (
        "-ngl 999 -ub 2048 -b 8192 -c 2048 -fa on -fit off -ctk f16 -ctv f16 --alias local --no-mmap --parallel 2 "
        "--spec-type draft-dspark --spec-draft-n-max 7 --spec-draft-p-min 0.0 -ctkd q8_0 -ctvd q8_0 --host 127.0.0.1 "
        "--jinja --cache-ram 16384 --reasoning-preserve --cont-batching --metrics"
    )
    with Process(*line.split(), "--model-draft", str(path("dspark"))) as server:
        answer = server.client.post("/completion", json={"prompt": CODE, "n_predict": 24, "temperature": 0}).json()
        plain = {"prompt": CODE, "n_predict": 24, "temperature": 0, "speculative.n_max": 0, "cache_prompt": False}
        alone = server.client.post("/completion", json=plain).json()
        assert answer["content"] == alone["content"] and "draft_n" not in alone["timings"]
        assert answer["timings"]["draft_n"] >= answer["timings"]["draft_n_accepted"] > 0
        assert answer["generation_settings"]["speculative.types"] == "none,draft-dspark" and answer["model"] == "local"
        metrics = server.client.get("/metrics").text
        assert f"llamacpp:spec_decode_num_draft_tokens_total {answer['timings']['draft_n']}.0" in metrics
        assert 'ggufspec:draft_accepted_total{drafter="draft-dspark",position="0"}' in metrics
        values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
        for phase in ("draft_ms", "verify_ms", "decode_ms"):  # the last one of the plain answer
            assert float(values[f"ggufspec:{phase}_count"]) > 0 and float(values[f"ggufspec:{phase}_sum"]) > 0
        shown = server.client.get("/speculation").json()
        assert min(shown[key] for key in ("draft_ms", "verify_ms", "sample_ms", "decode_ms")) > 0
        (drafter,) = shown["drafters"]
    assert f"speculation is on: draft-dspark, up to {drafter['n_max']} tokens a step" in server.log
    assert "draft acceptance = " in server.log


def test_a_taken_port_is_one_line():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        code, lines = run("-m", str(target_path()), "--port", str(port))
    assert code == 1 and f"cannot listen on 127.0.0.1:{port}" in lines[-1], lines


def test_sigterm_lets_running_requests_end():
    with Process() as server:
        got = []
        body = {"prompt": CODE, "n_predict": 40, "temperature": 0, "ignore_eos": True}
        thread = threading.Thread(target=lambda: got.append(server.client.post("/completion", json=body)))
        thread.start()
        wait_for(lambda: any(slot["is_processing"] for slot in server.client.get("/slots").json()))
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(15) == 0
        assert time.monotonic() - start < 12
        thread.join(5)
        assert got[0].status_code in (200, 503)
        if got[0].status_code == 200:
            assert got[0].json()["tokens_predicted"] == 40


def test_a_second_signal_ends_at_once():
    with Process() as server:
        body = {"prompt": CODE, "n_predict": 900, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", "/completion", json=body) as answer:
            pieces = answer.iter_raw()  # kept: a dropped iterator closes the connection
            next(pieces)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            assert server.process.poll() is None
            start = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(5) == 1
            assert time.monotonic() - start < 2


def test_a_failed_load_ends_the_process(tmp_path):
    """The socket is open before the model is read; a broken file still ends with one line and status 1."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(target_path().read_bytes()[:200_000])
    code, lines = run("-m", str(broken), "--port", "0")
    assert code == 1 and "broken.gguf" in lines[-1] and not any("Traceback" in line for line in lines), lines


def test_unix_socket(tmp_path):
    path = tmp_path / "s.sock"
    with Process("--host", f"127.0.0.1,{path}"):
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x") as client:
            assert client.get("/health").json() == {"status": "ok"}


def test_tls(tmp_path):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "1"]
    try:
        subprocess.run([*make, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    with Process("--ssl-key-file", str(key), "--ssl-cert-file", str(cert), tls=True) as server:
        assert server.address.startswith("https://")
        assert server.client.post("/tokenize", json={"content": "a"}).status_code == 200


def test_slots_survive_a_restart(tmp_path):
    """Save, restart, restore: the answer goes on as if nothing had happened, and only the new tokens are read."""
    argv = ("--slot-save-path", str(tmp_path), "--spec-type", "draft-mtp")
    story = {"prompt": CODE, "n_predict": 12, "temperature": 0, "id_slot": 0, "return_tokens": True}
    with Process(*argv) as server:
        first = server.client.post("/completion", json=story).json()
        saved = server.client.post("/slots/0?action=save", json={"filename": "a.bin"}).json()
        longer = [*server.client.post("/tokenize", json={"content": CODE}).json()["tokens"], *first["tokens"]]
        go_on = {"prompt": longer, "n_predict": 8, "temperature": 0, "id_slot": 1, "cache_prompt": False}
        expected = server.client.post("/completion", json=go_on).json()
        assert saved["n_saved"] == len(longer) - 1 and saved["n_written"] == (tmp_path / "a.bin").stat().st_size
    with Process(*argv) as server:
        restored = server.client.post("/slots/0?action=restore", json={"filename": "a.bin"}).json()
        assert restored["n_restored"] == saved["n_saved"]
        body = go_on | {"id_slot": 0, "cache_prompt": True}
        answer = server.client.post("/completion", json=body).json()
        assert answer["content"] == expected["content"]
        assert answer["timings"]["cache_n"] == saved["n_saved"] and answer["timings"]["prompt_n"] == 1
        raw = (tmp_path / "a.bin").read_bytes()
        (tmp_path / "cut.bin").write_bytes(raw[: len(raw) // 2])
        bad = server.client.post("/slots/0?action=restore", json={"filename": "cut.bin"})
        assert bad.status_code == 400 and "damaged" in bad.json()["error"]["message"]
        assert server.client.post("/completion", json=body).json()["timings"]["cache_n"] == 0  # left empty
    with Process("--slot-save-path", str(tmp_path)) as server:
        other = server.client.post("/slots/0?action=restore", json={"filename": "a.bin"})
        assert other.status_code == 400 and "drafter" in json.dumps(other.json())


def wait_for(condition, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)

"""Load on loopback: many streams at once with cancels, bad bodies and slow readers; then the books are checked.

    python tests/server/load.py --seconds 300 --streams 24

Every finished answer must equal the same request made alone. At the end no slot is busy, nothing waits, and the
server's memory has not grown since the warm-up.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import threading
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx
import psutil
from test_process import Process

PROMPTS = (
    "def add(a, b):\n", "class Node:\n", "import os\n", '{\n  "name":', "# Sorting\n\n", "for i in range(",
    "try:\n    ",
)  # fmt: skip
BAD = (
    b"{", b"", b"[]", b'{"prompt":[]}', b'{"prompt":"a","n_predict":-9}', b'{"prompt":[-1]}', b"\xff\xfe", b'{"x":3}',
)  # fmt: skip


def requests_of(n_tokens: int) -> list[dict]:
    """Every prompt greedily and sampled."""
    bodies = []
    for i, prompt in enumerate(PROMPTS):
        greedy = {"prompt": prompt, "n_predict": n_tokens + i % 3, "temperature": 0}
        bodies += [greedy, greedy | {"temperature": 1.0, "top_k": 20, "seed": 42 + i}]
    return bodies


@dataclass
class Report:
    finished: int = 0
    cancelled: int = 0
    refused: int = 0
    slow: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str, n: int = 1) -> None:
        with self.lock:
            setattr(self, what, getattr(self, what) + n)

    def complain(self, text: str) -> None:
        with self.lock:
            self.wrong.append(text)


def run(address: str, pid: int, seconds: float, n_streams: int, n_tokens: int = 24, seed: int = 0) -> Report:
    report = Report()
    bodies = requests_of(n_tokens)
    with httpx.Client(base_url=address, timeout=120) as client:
        alone = [client.post("/completion", json=body).json()["content"] for body in bodies]
        end = time.monotonic() + seconds
        threads = [
            threading.Thread(target=_client, args=(address, random.Random(seed + i), end, bodies, alone, report))
            for i in range(n_streams)
        ]
        for thread in threads:
            thread.start()
        process = psutil.Process(pid)
        while time.monotonic() < end:
            report.memory_mib.append(process.memory_info().rss / 2**20)
            time.sleep(min(1.0, seconds / 20))
        for thread in threads:
            thread.join(120)
            if thread.is_alive():
                report.complain("a client did not end")
        _check_idle(client, report)
    _check_memory(report)
    return report


def _client(
    address: str, rng: random.Random, end: float, bodies: list[dict], alone: list[str], report: Report
) -> None:
    with httpx.Client(base_url=address, timeout=120) as client:
        while time.monotonic() < end:
            i = rng.randrange(len(bodies))
            kind = rng.choices(("whole", "stream", "cancel", "bad", "slow", "cut"), (3, 4, 2, 2, 1, 1))[0]
            try:
                _one(kind, client, rng, bodies[i], alone[i], report)
            except Exception as e:
                report.complain(f"{kind}: {type(e).__name__}: {e}")


def _one(kind: str, client: httpx.Client, rng: random.Random, body: dict, alone: str, report: Report) -> None:
    if kind == "bad":
        answer = client.post(rng.choice(("/completion", "/v1/completions")), content=rng.choice(BAD))
        if answer.status_code != 400:
            report.complain(f"a bad body got {answer.status_code}")
        report.count("refused")
    elif kind == "whole":
        answer = client.post("/completion", json=body)
        _compare(answer.json().get("content"), alone, body, report)
    elif kind == "cut":
        _half_a_request(client.base_url, body)
        report.count("cancelled")
    else:
        with client.stream("POST", "/completion", json=body | {"stream": True}) as answer:
            text, n = "", 0
            stop_at = rng.randrange(12) if kind == "cancel" else -1
            for line in answer.iter_lines():
                if not line.startswith("data: "):
                    continue
                if n == stop_at:
                    report.count("cancelled")
                    return
                n += 1
                text += json.loads(line[6:])["content"]
                if kind == "slow":
                    time.sleep(rng.random() / 5)
            if kind == "slow":
                report.count("slow")
            _compare(text, alone, body, report)


def _compare(text: str | None, alone: str, body: dict, report: Report) -> None:
    if text != alone:
        report.complain(f"{body['prompt']!r} at temperature {body['temperature']}: {text!r}, alone {alone!r}")
    report.count("finished")
    report.count("tokens", body["n_predict"])


def _half_a_request(url: httpx.URL, body: dict) -> None:
    """Send a whole request and close at once, or only half of it."""
    raw = json.dumps(body).encode()
    parts = urlsplit(str(url))
    with socket.create_connection((parts.hostname, parts.port)) as sock:
        head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
        sock.sendall(head + raw[: len(raw) // 2 if body["temperature"] else None])
        time.sleep(0.05)


def _check_idle(client: httpx.Client, report: Report) -> None:
    end = time.monotonic() + 10
    while True:
        busy = [slot["id"] for slot in client.get("/slots").json() if slot["is_processing"]]
        if not busy or time.monotonic() > end:
            break
        time.sleep(0.1)
    if busy:
        report.complain(f"slots {busy} are stuck")


def _check_memory(report: Report) -> None:
    """The last quarter against the second: the first warms up."""
    n = len(report.memory_mib) // 4
    if n < 3:
        return
    before = statistics.median(report.memory_mib[n : 2 * n])
    after = statistics.median(report.memory_mib[-n:])
    if after > before * 1.03 + 16:
        report.complain(f"memory grew from {before:.0f} to {after:.0f} MiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--spec-type", default="draft-mtp")
    parser.add_argument("--n-max", default="3")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--cache-ram", type=int, default=16)
    options = parser.parse_args()
    argv = ("-np", str(options.slots), "-c", str(256 * options.slots), "--spec-type", options.spec_type)
    argv += ("--spec-draft-n-max", str(options.n_max))
    with Process(*argv, "--cache-ram", str(options.cache_ram)) as server:
        start = time.monotonic()
        report = run(server.address, server.process.pid, options.seconds, options.streams, options.tokens)
        seconds = time.monotonic() - start
    print(f"{report.finished} answers finished ({report.slow} read slowly), {report.cancelled} cancelled,")
    print(f"{report.refused} bad bodies refused in {seconds:.0f} s; {report.tokens / seconds:.1f} tokens/s")
    n = max(len(report.memory_mib) // 4, 1)
    quarters = [statistics.median(report.memory_mib[i * n : (i + 1) * n] or [0]) for i in range(4)]
    print("memory, median of each quarter:", ", ".join(f"{mib:.0f}" for mib in quarters), "MiB")
    for line in report.wrong[:20]:
        print("WRONG:", line)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""A server process and streams against it: tokens a second of each stream and of all. Needs nothing but Python."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

RUN = [sys.executable, "-P", "-c", "from ggufspec.tools.main import main; main()", "server"]
START_S = 180.0


class Server:
    """`ggufspec server` with these options on a free port; `ready_s`: seconds until it answers."""

    def __init__(self, argv: list[str], log: Path):
        self.log = log
        start = time.monotonic()
        with log.open("wb") as file:
            command = [*RUN, *argv, "--port", "0", "--no-ui"]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            self.address = self._wait("listening on http", start)
            while not self._is_healthy():
                self._check(start)
                time.sleep(0.05)
        except BaseException:
            self.close()
            raise
        self.ready_s = time.monotonic() - start

    def _check(self, start: float) -> None:
        if self.process.poll() is not None or time.monotonic() - start > START_S:
            raise RuntimeError(f"the server did not start: {self.log.read_text(errors='replace')[-2000:]}")

    def _wait(self, words: str, start: float) -> str:
        while True:
            for line in self.log.read_text(errors="replace").splitlines():
                if words in line:
                    return line.rsplit(" ", 1)[1]
            self._check(start)
            time.sleep(0.05)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.address + "/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load(address: str, n_streams: int, n_tokens: int) -> dict[str, Any]:
    """Streams that start together, each of n_tokens: rates from a stream's first token to its last."""
    found: list[dict[str, float]] = []
    failures: list[str] = []

    def one(i: int) -> None:
        try:
            found.append(stream(address, i, n_tokens))
        except Exception as error:
            failures.append(f"stream {i}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=one, args=(i,)) for i in range(n_streams)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - start
    if failures:
        raise RuntimeError("; ".join(failures[:3]))
    return {
        "streams": n_streams, "seconds": seconds, "total": n_streams * n_tokens / seconds,
        "stream_median": statistics.median(s["rate"] for s in found),
        "first_ms_median": 1000 * statistics.median(s["first_s"] for s in found), "each": found,
    }  # fmt: skip


def stream(address: str, i: int, n_tokens: int) -> dict[str, float]:
    """One streamed completion; RuntimeError unless all its tokens came."""
    body = {
        "prompt": [100 + (31 * i + 7 * j) % 400 for j in range(48)], "n_predict": n_tokens, "stream": True,
        "ignore_eos": True, "temperature": 0.0, "seed": i + 1, "cache_prompt": False, "return_tokens": True,
    }  # fmt: skip
    request = urllib.request.Request(
        address + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    start, first, last, n_first, n_all = time.monotonic(), 0.0, 0.0, 0, 0
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"])
            n = len(event.get("tokens", []))
            if n == 0 or event.get("stop"):
                continue
            last = time.monotonic()
            n_all += n
            if not first:
                first, n_first = last, n
    if n_all != n_tokens:
        raise RuntimeError(f"{n_all} tokens came, {n_tokens} were wanted")
    return {"rate": (n_all - n_first) / max(last - first, 1e-9), "first_s": first - start, "tokens": n_all}

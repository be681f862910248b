"""`ggufspec server` on a model that is loaded already, and streams against it from another process.

    python tests/gpu/serving_rate.py http://127.0.0.1:8080 --streams 24 --tokens 128     # any llama-server

The server is the real one: its HTTP loop in a thread, the engine in another. Streams are read in a process of their
own, whose Python lock is none of the server's. As a program this needs nothing but Python.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

START_S = 60.0
LEAST_TOGETHER = 16  # tokens of each stream, for a rate of the time in which all of them decode


class Server:
    """The server of a `Loaded` in a thread of this process, on a free port."""

    def __init__(self, settings: Any, load: Callable[[], Any]):
        from dataclasses import replace

        from ggufspec.tools.server.app import Server as App

        settings = replace(settings, server=replace(settings.server, port=0, ui=False))
        addresses: list[str] = []
        self.failures: list[BaseException] = []
        self.app = App(settings, load, addresses.extend)
        self.thread = threading.Thread(target=self._run, name="server", daemon=True)
        self.thread.start()
        start = time.monotonic()
        while not (addresses and is_healthy(addresses[0])):
            if self.failures or time.monotonic() - start > START_S:
                raise RuntimeError(f"the server did not start: {self.failures or 'it took too long'}")
            time.sleep(0.02)
        self.address = addresses[0]

    def _run(self) -> None:
        try:
            self.app.run()
        except BaseException as error:
            self.failures.append(error)

    def load(self, n_streams: int, n_tokens: int, seed: int = 1, limit_s: float = 120.0) -> dict[str, Any]:
        """`load` below, in a process of its own."""
        command = [sys.executable, str(Path(__file__).resolve()), self.address]
        command += ["--streams", str(n_streams), "--tokens", str(n_tokens), "--seed", str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
        if done.returncode != 0:
            raise RuntimeError(f"streams failed: {done.stderr.strip()[-1000:]}; server: {self.failures}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self.app.state.worker is not None:
            self.app.state.worker.cancel_all()
        self.app.http.should_exit = True
        self.thread.join(20)
        if self.thread.is_alive():
            raise RuntimeError("the server did not stop")


def is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(address + "/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def load(address: str, n_streams: int, n_tokens: int, seed: int = 1) -> dict[str, Any]:
    """Streams that start together, each of n_tokens and with a seed of its own, from `seed` on."""
    found: list[dict[str, Any]] = []
    failures: list[str] = []

    def one(i: int) -> None:
        try:
            found.append(stream(address, i, n_tokens, seed + i))
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
    return figures(found, seconds)


def figures(streams: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Of streams as `stream` returns them; seconds: from the first request to the last token.

    `stream_median`: tokens a second from a stream's first token to its last, prompts of the others in between included;
    `together_median`: while all of them decode, from the last first token to the first last one, None if too short.
    """
    begin = max(s["times"][0] for s in streams)
    end = min(s["times"][-1] for s in streams)
    drafted, accepted = (sum(s["timings"].get(key, 0) for s in streams) for key in ("draft_n", "draft_n_accepted"))
    together = [sum(n for t, n in zip(s["times"], s["counts"]) if begin < t <= end) for s in streams]
    return {
        "streams": len(streams), "seconds": seconds, "total": sum(s["tokens"] for s in streams) / seconds,
        "stream_median": statistics.median(s["rate"] for s in streams),
        "together_median": statistics.median(together) / (end - begin) if min(together) >= LEAST_TOGETHER else None,
        "together_s": max(end - begin, 0.0),
        "first_ms_median": 1000 * statistics.median(s["first_s"] for s in streams),
        "accepted": accepted / drafted if drafted else None, "rates": [s["rate"] for s in streams],
    }  # fmt: skip


def median_of(loads: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the same load several times: medians of every figure; `rates` are those of all streams."""
    out = {}
    for key in loads[0]:
        values = [one[key] for one in loads if one[key] is not None]
        out[key] = [rate for rates in values for rate in rates] if key == "rates" else None
        if key != "rates" and values:
            out[key] = statistics.median(values)
    return out


def stream(address: str, i: int, n_tokens: int, seed: int) -> dict[str, Any]:
    """One streamed completion; RuntimeError unless all its tokens came."""
    body = {
        "prompt": [100 + (31 * i + 7 * j) % 400 for j in range(48)], "n_predict": n_tokens, "stream": True,
        "ignore_eos": True, "temperature": 0.0, "seed": seed, "cache_prompt": False, "return_tokens": True,
    }  # fmt: skip
    request = urllib.request.Request(
        address + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    start, times, counts = time.monotonic(), [], []
    timings: dict[str, Any] = {}
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"])
            n, timings = len(event.get("tokens", [])), event.get("timings", timings)
            if n == 0 or event.get("stop"):
                continue
            times.append(time.monotonic())
            counts.append(n)
    if sum(counts) != n_tokens:
        raise RuntimeError(f"{sum(counts)} tokens came, {n_tokens} were wanted")
    return {
        "rate": (n_tokens - counts[0]) / max(times[-1] - times[0], 1e-9), "first_s": times[0] - start,
        "tokens": n_tokens, "times": times, "counts": counts, "timings": timings,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(load(options.address, options.streams, options.tokens, options.seed)))


if __name__ == "__main__":
    main()

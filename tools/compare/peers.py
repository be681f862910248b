"""llama.cpp as the other side of a comparison: in process (xllamacpp), a llama-server binary, or a running server."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ggufspec.errors import ConfigError, GgufspecError

IN_PROCESS = "xllamacpp"
START_S = 600.0


class PeerError(GgufspecError):
    """llama.cpp did not start, or refused a request; the end of its log says why."""


@dataclass(frozen=True)
class PeerSettings:
    """What both sides run with."""

    model: str
    n_ctx: int
    n_threads: int
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: str = "auto"
    draft: str | None = None
    kind: str | None = None
    n_max: int = 3
    n_min: int = 0
    p_min: float = 0.0
    draft_type_k: str = "f16"
    draft_type_v: str = "f16"
    gpu_layers: int = 0


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    n_drafted: int
    n_accepted: int
    tokens_per_second: float
    top: list[list[tuple[int, float]]]  # per token: (id, log-probability) of the likeliest, where asked for


class Server:
    """A llama-server somewhere; `close` ends it if it was started here."""

    def __init__(self, address: str, process: subprocess.Popen[Any] | None = None,
                 folder: tempfile.TemporaryDirectory[str] | None = None):  # fmt: skip
        self.address, self._process, self._folder = address.rstrip("/"), process, folder

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            end(process)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 600.0) -> dict[str, Any]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                out: dict[str, Any] = json.load(response)
                return out
        except urllib.error.HTTPError as error:
            raise PeerError(f"llama.cpp, {path}: {error.code} {error.read().decode(errors='replace')}") from None
        except (urllib.error.URLError, OSError) as error:
            raise PeerError(f"llama.cpp at {self.address} does not answer: {error}") from None

    def tokenize(self, text: str) -> list[int]:
        tokens: list[int] = self.post("/tokenize", {"content": text, "add_special": True, "parse_special": True})[
            "tokens"
        ]
        return tokens

    def complete(self, prompt: Sequence[int], n_tokens: int, top: int = 0) -> Answer:
        """The greedy continuation, past tokens that end a text."""
        body = {
            "prompt": list(prompt), "n_predict": n_tokens, "temperature": 0.0, "cache_prompt": False,
            "return_tokens": True, "ignore_eos": True, "n_probs": top,
        }  # fmt: skip
        raw = self.post("/completion", body)
        timings = raw["timings"]
        rows = raw.get("completion_probabilities", [])
        return Answer(
            raw["tokens"], timings.get("draft_n", 0), timings.get("draft_n_accepted", 0),
            timings["predicted_per_second"],
            [[(t["id"], t["logprob"]) for t in row["top_logprobs"]] for row in rows],
        )  # fmt: skip


def end(process: subprocess.Popen[Any]) -> None:
    if process.stdin is not None:
        try:
            process.stdin.close()
        except OSError:
            pass
    else:
        process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def is_url(peer: str) -> bool:
    return peer.startswith(("http://", "https://"))


def check_peer(peer: str) -> str:
    """The peer with a binary's path resolved. ConfigError when there is no such thing, or no server answers."""
    if is_url(peer):
        try:
            with urllib.request.urlopen(peer.rstrip("/") + "/health", timeout=10):
                return peer
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = getattr(error, "reason", error)
            why = getattr(why, "strerror", None) or why
            raise ConfigError(
                f"--peer {peer}: no llama-server answers there ({why}); start one, or give the path of its program"
            ) from None
    if peer == IN_PROCESS:
        from importlib.util import find_spec

        if find_spec("xllamacpp") is None:
            raise ConfigError("--peer xllamacpp: the package is not installed; pip install 'ggufspec[peer]', or give "
                              "the path of a llama-server or a server's URL")  # fmt: skip
        return peer
    found = shutil.which(peer)
    if found is None:
        raise ConfigError(f"--peer {peer}: no such program; expected xllamacpp, a llama-server, or a server's URL")
    return found


def open_peer(peer: str, settings: PeerSettings) -> Server:
    if is_url(peer):
        return Server(peer)
    return _in_process(settings) if peer == IN_PROCESS else _binary(peer, settings)


def _in_process(settings: PeerSettings) -> Server:
    values: dict[str, Any] = {
        "model.path": settings.model, "n_ctx": settings.n_ctx, "n_parallel": 1,
        "cpuparams.n_threads": settings.n_threads, "cpuparams_batch.n_threads": settings.n_threads,
        "cache_type_k": settings.type_k, "cache_type_v": settings.type_v, "flash_attn_type": settings.flash_attn,
        "warmup": False, "fit_params": False, "n_gpu_layers": settings.gpu_layers, "cache_ram_mib": 0, "verbosity": 2,
    }  # fmt: skip
    if settings.kind is not None:
        values |= {
            "speculative.types": [settings.kind], "load_mtp": settings.kind == "draft-mtp",
            "speculative.draft.n_max": settings.n_max, "speculative.draft.n_min": settings.n_min,
            "speculative.draft.p_min": settings.p_min, "speculative.draft.cache_type_k": settings.draft_type_k,
            "speculative.draft.cache_type_v": settings.draft_type_v,
        }  # fmt: skip
        if settings.draft is not None:
            values["speculative.draft.mparams.path"] = settings.draft
    folder = tempfile.TemporaryDirectory(prefix="ggufspec-peer-")
    log = Path(folder.name, "log")
    with open(log, "wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, os.path.join(os.path.dirname(__file__), "inprocess.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
        )  # fmt: skip
    assert process.stdin and process.stdout
    with suppress(BrokenPipeError):  # it has ended already: its log says why
        process.stdin.write(json.dumps(values) + "\n")
        process.stdin.flush()
    for line in process.stdout:
        if line.startswith("listening "):
            return Server(line.split()[1], process, folder)
    end(process)
    tail = log.read_text(errors="replace")[-1500:].strip()
    folder.cleanup()
    raise PeerError(f"llama.cpp did not load {settings.model}: {tail}")


def _binary(path: str, settings: PeerSettings) -> Server:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [
        path, "-m", settings.model, "-c", str(settings.n_ctx), "-np", "1", "-t", str(settings.n_threads),
        "-ctk", settings.type_k, "-ctv", settings.type_v, "-fa", settings.flash_attn, "--no-warmup",
        "--cache-ram", "0", "-ngl", str(settings.gpu_layers), "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    if settings.kind is not None:
        argv += ["--spec-type", settings.kind, "--spec-draft-n-max", str(settings.n_max),
                 "--spec-draft-n-min", str(settings.n_min), "--spec-draft-p-min", str(settings.p_min),
                 "-ctkd", settings.draft_type_k, "-ctvd", settings.draft_type_v]  # fmt: skip
        if settings.draft is not None:
            argv += ["-md", settings.draft]
    folder = tempfile.TemporaryDirectory(prefix="ggufspec-peer-")
    log = Path(folder.name, "log")
    with open(log, "wb") as out:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(address + "/health", timeout=5):
                return Server(address, process, folder)
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    end(process)
    tail = log.read_text(errors="replace")[-1500:].strip()
    folder.cleanup()
    raise PeerError(f"{path} did not start: {tail}")

"""Run llama.cpp in process (xllamacpp) on a file and collect what it says: the reference of `peer` tests.

    with Peer("model.gguf", n_ctx=512) as peer:
        answer = peer.complete("Hello", n_predict=32, top=5)
        peer.tokenize("text"), peer.post("/v1/chat/completions", {...})

    # a process per prompt
    complete("model.gguf", ["a", "b"], draft="d.gguf", kinds=["draft-dspark"], n_max=7)

llama.cpp runs in a child process, so that its crash or its log can't disturb a test. It keeps the hidden row
of the last request between requests, so the draft counts of draft-mtp depend on what ran before: **use a
fresh process for each prompt** (as the function `complete` does) wherever MTP counts are compared.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Answer:
    """A greedy (or sampled) continuation. `top[i]` maps the most likely token ids of step i to their
    log-probability (natural, over the whole vocabulary, before any sampler); `raw` is the server's response.

    llama.cpp gives no `top` for a token that ends inside a character (the rows are then fewer than the tokens),
    and with a drafter none after the first token: compare `tokens` there.
    """

    tokens: list[int]
    text: str
    logprobs: list[float]
    top: list[dict[int, float]]
    n_prompt: int
    n_drafted: int
    n_accepted: int
    raw: dict[str, Any]


class Peer:
    """A running llama.cpp server. `params` are attributes of `CommonParams` by dotted path, set as they are
    (`{"speculative.ngram_mod.n_match": 3}`); the named arguments cover the usual ones.

    One thread by default: small models gain nothing from two, and llama.cpp's threads wait by spinning, which
    is slow on a busy machine. `kinds` are names of `--spec-type`. The log up to `verbosity` (3 info, 4 trace:
    per-step accept counts, 5 debug: draft candidates) is in `log()`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        n_ctx: int = 1024,
        n_parallel: int = 1,
        n_threads: int = 1,
        type_k: str = "f16",
        type_v: str = "f16",
        flash_attention: str = "auto",
        draft: str | os.PathLike[str] | None = None,
        kinds: Sequence[str] = (),
        n_max: int = 3,
        n_min: int = 0,
        p_min: float = 0.0,
        draft_type_k: str = "f16",
        draft_type_v: str = "f16",
        verbosity: int = 3,
        params: dict[str, Any] | None = None,
        timeout_s: float = 60.0,
    ):
        settings = {
            "model.path": os.fspath(model), "n_ctx": n_ctx * n_parallel, "n_parallel": n_parallel,
            "cpuparams.n_threads": n_threads, "cpuparams_batch.n_threads": n_threads,
            "cache_type_k": f"ggml_type.{type_k}", "cache_type_v": f"ggml_type.{type_v}",
            "flash_attn_type": f"llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_{_FLASH[flash_attention]}",
            "warmup": False, "fit_params": False, "n_gpu_layers": 0, "cache_ram_mib": 0,
            "verbosity": verbosity, "speculative.draft.n_max": n_max, "speculative.draft.n_min": n_min,
            "speculative.draft.p_min": p_min,
            "speculative.draft.cache_type_k": f"ggml_type.{draft_type_k}",
            "speculative.draft.cache_type_v": f"ggml_type.{draft_type_v}",
            **(params or {}),
        }  # fmt: skip
        if draft is not None:
            settings["speculative.draft.mparams.path"] = os.fspath(draft)
        if kinds:
            settings["speculative.types"] = list(kinds)
            settings["load_mtp"] = "draft-mtp" in kinds
        self._folder = tempfile.TemporaryDirectory(prefix="peer-")
        self._log = Path(self._folder.name, "log")
        self._timeout_s = timeout_s
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, os.path.abspath(__file__)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, "LLAMA_TRACE": "1" if verbosity > 3 else "0"},
            )  # fmt: skip
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(settings) + "\n")
        self._process.stdin.flush()
        self.address = ""
        for line in self._process.stdout:
            if line.startswith("listening "):
                self.address = line.split()[1]
                break
        if not self.address:
            message = f"llama.cpp did not load {model}:\n{self.log()[-3000:]}"
            self.close()
            raise RuntimeError(message)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """One request to the server; an HTTP error is raised with the server's message."""
        request = urllib.request.Request(
            self.address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.code} {error.read().decode(errors='replace')}") from None

    def tokenize(self, text: str, *, special: bool = False, parse_special: bool = True) -> list[int]:
        body = {"content": text, "add_special": special, "parse_special": parse_special}
        return self.post("/tokenize", body)["tokens"]

    def complete(
        self, prompt: Prompt, n_predict: int = 32, *, top: int = 1, ignore_eos: bool = False, **request: Any
    ) -> Answer:
        """Continue `prompt` (text or token ids), greedily unless `request` sets a temperature; other fields
        of llama.cpp's `/completion` go through `request`.
        """
        body = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt), "n_predict": n_predict,
            "n_probs": max(1, top), "temperature": 0.0, "cache_prompt": False, "return_tokens": True,
            "ignore_eos": ignore_eos, **request,
        }  # fmt: skip
        raw = self.post("/completion", body)
        rows = raw.get("completion_probabilities", [])
        timings = raw["timings"]
        return Answer(
            tokens=raw["tokens"],
            text=raw["content"],
            logprobs=[row["logprob"] for row in rows],
            top=[{t["id"]: t["logprob"] for t in row["top_logprobs"]} for row in rows],
            n_prompt=timings["prompt_n"],
            n_drafted=timings.get("draft_n", 0),
            n_accepted=timings.get("draft_n_accepted", 0),
            raw=raw,
        )

    def complete_together(self, prompts: Sequence[Prompt], n_predict: int = 32, **options: Any) -> list[Answer]:
        """All prompts at once, each in its own slot (the server needs `n_parallel` of them)."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, n_predict, **options), prompts))


def complete(
    model: str | os.PathLike[str],
    prompts: Sequence[Prompt],
    n_predict: int = 32,
    *,
    top: int = 1,
    ignore_eos: bool = False,
    request: dict[str, Any] | None = None,
    **options: Any,
) -> list[Answer]:
    """Continue each prompt in a llama.cpp process of its own; `options` are those of `Peer`."""
    answers = []
    for prompt in prompts:
        with Peer(model, **options) as peer:
            answers.append(peer.complete(prompt, n_predict, top=top, ignore_eos=ignore_eos, **(request or {})))
    return answers


_FLASH = {"auto": "AUTO", "on": "ENABLED", "off": "DISABLED"}


def _serve() -> None:
    """The child: settings in on the first line, then serve until the parent closes the pipe."""
    from xllamacpp import xllamacpp as llama

    params = llama.CommonParams()
    for path, value in json.loads(sys.stdin.readline()).items():
        *folders, name = path.split(".")
        target: Any = params
        for folder in folders:
            target = getattr(target, folder)
        if name == "types":
            prefix = "COMMON_SPECULATIVE_TYPE_"
            value = [getattr(llama.common_speculative_type, prefix + _constant(kind)) for kind in value]
        elif isinstance(value, str) and value.startswith("ggml_type."):
            value = getattr(llama.ggml_type, "GGML_TYPE_" + value.split(".")[1].upper())
        elif isinstance(value, str) and value.startswith("llama_flash_attn_type."):
            value = getattr(llama.llama_flash_attn_type, value.split(".")[1])
        if not hasattr(target, name):
            raise AttributeError(f"llama.cpp's parameters have no {path}")
        setattr(target, name, value)
    server = llama.Server(params)
    print("listening", server.listening_address, flush=True)
    sys.stdin.read()


def _constant(kind: str) -> str:
    return kind.upper().replace("-", "_")


if __name__ == "__main__":
    _serve()

"""llama.cpp's server in this process, spoken to over HTTP."""

import json
import urllib.request
from pathlib import Path
from typing import Any


class Peer:
    """A running llama-server on one model file. Freed with the object."""

    def __init__(self, path: Path, **options: Any) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 4096, 1, False, -1
        params.cpuparams.n_threads = 2
        params.use_jinja = True
        for name, value in options.items():
            setattr(params, name, value)
        self._server = xllamacpp.Server(params)
        self.url = self._server.listening_address

    def post(self, path: str, body: dict[str, Any]) -> Any:
        with self._open(path, body) as answer:
            return json.loads(answer.read())

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All `data:` events of a streamed answer."""
        with self._open(path, {**body, "stream": True}) as answer:
            lines = [line[6:] for line in answer.read().decode().split("\n") if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path) as answer:
            return json.loads(answer.read())

    def tokenize(self, text: str, add_special: bool = False, parse_special: bool = True) -> list[int]:
        body = {"content": text, "add_special": add_special, "parse_special": parse_special}
        return self.post("/tokenize", body)["tokens"]

    def _open(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request)

"""A server for tests: the real HTTP stack on loopback, in a thread of this process."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace

import httpx
from fake_engine import FakeEngine

from ggufspec.chat import load_templates
from ggufspec.sampling import SamplingParams
from ggufspec.tools.server.app import Server
from ggufspec.tools.server.fields import Task
from ggufspec.tools.server.state import Loaded, ModelInfo
from ggufspec.tools.settings import Settings


def fake_loaded(engine):
    task = Task(sampling=SamplingParams())
    info = ModelInfo("fake.gguf", "F32", 512, engine.tokenizer.n_vocab, 8, 100, 400)
    return Loaded(engine, engine.tokenizer, load_templates({}), info, task)


@contextlib.contextmanager
def serve(load, settings=None, **options):
    """`load()` gives a Loaded; `options` are fields of ServerSettings. Yields (address, server)."""
    settings = settings or Settings()
    settings = replace(settings, server=replace(settings.server, port=0, **options))
    ready = threading.Event()
    found: list[str] = []

    def on_listen(addresses):
        found.extend(addresses)
        ready.set()

    server = Server(settings, load, on_listen)
    failures: list[BaseException] = []

    def run():
        try:
            server.run()
        except BaseException as e:
            failures.append(e)
        ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    server.failures = failures
    try:
        yield found[0] if found else "", server
    finally:
        server.http.should_exit = True
        server.state.worker.cancel_all()
        thread.join(10)
        assert not thread.is_alive(), "the server did not stop"


@contextlib.contextmanager
def serve_fake(engine=None, **options):
    engine = engine or FakeEngine()
    with serve(lambda: fake_loaded(engine), **options) as (address, server):
        headers = {"authorization": f"Bearer {options['api_keys'][0]}"} if options.get("api_keys") else {}
        with httpx.Client(base_url=address, timeout=20, headers=headers) as client:
            wait_ready(client)
            client.server, client.engine = server, engine
            yield client


def wait_ready(client, timeout_s=60.0):
    end = time.monotonic() + timeout_s
    while client.get("/health").status_code != 200:
        assert time.monotonic() < end, "the server is not ready"
        time.sleep(0.02)

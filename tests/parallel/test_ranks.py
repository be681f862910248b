"""What ranks of a tensor split have to do alike, and how they end: prompt caches, erased slots, reasons, torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import families
import httpx
import pytest

from ggufspec import bundled
from ggufspec.engine import Engine
from ggufspec.errors import PlacementError, RequestError
from ggufspec.gguf_file import open_gguf
from ggufspec.job import Request
from ggufspec.job_queue import Inbox
from ggufspec.models import Model, load_model
from ggufspec.placement import Placement
from ggufspec.prompt_cache import PromptCache
from ggufspec.ranks import Ranks
from ggufspec.sampling import SamplingParams
from ggufspec.tokenizer import Tokenizer

SPLIT = ["--device", "CPU0,CPU1,CPU2", "-sm", "tensor"]
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
BEGIN = "from ggufspec.tools.main import main; main()"


class Link:
    """`job_queue.Link` of a first rank that has nobody to tell; the others' states have `others` bytes each."""

    def __init__(self, others: int = 0):
        self.others, self.shared, self.errors = others, [], []

    def share(self, inbox: Inbox) -> Inbox:
        self.shared.append(inbox)
        return inbox

    def total(self, n: int) -> int:
        return n + self.others

    def lost(self, error: RuntimeError) -> Exception:
        self.errors.append(error)
        return PlacementError("lost")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Tokenizer]:
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    families.make_qwen35(path, seed=11)
    file = open_gguf(path)
    n = int(file.metadata[f"{file.architecture}.block_count"])
    return load_model(file, Placement.single("cpu", n)), Tokenizer.from_metadata(file.metadata)


def read(engine: Engine, prompt: list[int]) -> int:
    """How much of the prompt was reused."""
    for event in engine.generate(Request(prompt, GREEDY, n_predict=2)):
        job = event.job
    return job.n_prompt_cached


@pytest.mark.parametrize(("others", "kept"), [(0, True), (1 << 30, False)])
def test_a_state_counts_with_what_all_ranks_hold_of_it(
    model: tuple[Model, Tokenizer], others: int, kept: bool
) -> None:
    """Ranks that counted their own part would keep and forget different prompts, and wait for each other for ever."""
    engine = Engine(*model, n_ctx=512, prompt_cache=PromptCache(1 << 29), link=Link(others))
    first, second = list(range(40, 100)), list(range(100, 160))
    read(engine, first), read(engine, second)
    assert (read(engine, first) > 0) is kept


def test_a_slot_is_erased_by_all_ranks_at_one_step(model: tuple[Model, Tokenizer]) -> None:
    link = Link()
    engine = Engine(*model, n_ctx=512, link=link)
    prompt = list(range(40, 100))
    read(engine, prompt)
    n = engine.slots[0].n_past
    assert n > 0 and engine.erase_slot(0) == n
    assert engine.slots[0].n_past == n and not engine.idle  # the others do not know yet
    engine.step()
    assert link.shared[-1].erased == [0] and engine.slots[0].n_past == 0 and engine.idle
    assert read(engine, prompt) == 0


def test_a_part_of_a_slot_is_neither_saved_nor_restored(model: tuple[Model, Tokenizer]) -> None:
    engine = Engine(*model, n_ctx=512, link=Link())
    for act in (lambda: engine.save_slot(0), lambda: engine.restore_slot(0, {})):
        with pytest.raises(RequestError, match="tensor split") as error:
            act()
        assert error.value.status == 501


def test_an_error_in_a_step_is_explained_by_the_link(model: tuple[Model, Tokenizer],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    link, broken = Link(), RuntimeError("Connection reset by peer")
    engine = Engine(*model, n_ctx=512, link=link)
    engine.submit(Request([40, 41], GREEDY))
    monkeypatch.setattr(Model, "forward", lambda *a, **k: (_ for _ in ()).throw(broken))
    with pytest.raises(PlacementError, match="lost"):
        engine.step()
    assert link.errors == [broken]


def test_after_an_interrupted_step_there_is_no_other(model: tuple[Model, Tokenizer],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks are amid the step that was interrupted: they would take the next one's messages for its rest."""
    link = Link()
    engine = Engine(*model, n_ctx=512, link=link)

    def interrupted(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Model, "forward", interrupted)
        read(engine, [40, 41])
    assert len(link.shared) == 1


def test_what_counts_as_the_loss_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ggufspec.ranks.PATIENCE_WITH_WATCHER", 0.0)
    ranks = Ranks(1, (1.0, 1.0), None, None, None)  # type: ignore[arg-type]
    found = ranks.lost(RuntimeError("[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer\nmore"))
    assert isinstance(found, PlacementError) and "rank 1 lost the other ranks" in str(found) and "\n" not in str(found)
    own = RuntimeError("shapes do not match")
    assert ranks.lost(own) is own


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", BEGIN, *arguments, "-m", str(bundled.target_path())]


def followers(pid: int) -> list[tuple[int, str]]:
    found = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    lines = [line.split(maxsplit=1) for line in found.splitlines()]
    return [(int(pid), args) for pid, args in lines if "ggufspec.tools.rank" in args]


@contextmanager
def serving(tmp_path: Path, *more: str) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client, Path]]:
    """A server over three ranks: its process, a client, and the file of its errors."""
    log = tmp_path / "log"
    line = command("server", "--port", "0", "--host", str(tmp_path / "s.sock"), "-c", "512", "-np", "2", *SPLIT, *more)
    with log.open("wb") as out:
        process = subprocess.Popen(line, stdout=out, stderr=out)
    transport = httpx.HTTPTransport(uds=str(tmp_path / "s.sock"))
    with httpx.Client(transport=transport, base_url="http://s", timeout=120) as client:
        try:
            for _ in range(600):
                assert process.poll() is None, log.read_text()
                try:
                    if client.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.1)
            yield process, client, log
        finally:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_the_last_ranks_death_is_the_reason_that_is_given(tmp_path: Path) -> None:
    """Whichever connection breaks first, in the middle of a step too; no traceback."""
    with serving(tmp_path) as (process, client, log):
        body = {"prompt": "import os", "n_predict": -1, "ignore_eos": True}

        def ask() -> None:
            with pytest.raises(httpx.HTTPError):
                client.post("/completion", json=body).raise_for_status()

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(2.0)
        began = time.monotonic()
        os.kill(followers(process.pid)[1][0], signal.SIGKILL)
        assert process.wait(30) == 1 and time.monotonic() - began < 10
        asking.join()
    text = log.read_text()
    assert "error: rank 2 ended with status -9; all ranks end" in text and "Traceback" not in text


@pytest.mark.slow
def test_a_second_interrupt_ends_the_program() -> None:
    line = command("cli", "-p", "import os", "-n", "-1", "--ignore-eos", "--temp", "0", "-c", "2048", *SPLIT)
    for seconds in (0.03, 0.1):
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        assert process.stdout is not None
        process.stdout.read(30)
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(10) in (130, -signal.SIGINT)  # the second, as a shell has it, when the answer had ended


@pytest.mark.slow
def test_a_service_manager_ends_all_processes_at_once(tmp_path: Path) -> None:
    """What runs may end: followers leave the signal to the first rank."""
    with serving(tmp_path) as (process, client, log):
        body = {"prompt": "import os", "n_predict": 40, "ignore_eos": True}
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(client.post("/completion", json=body).status_code))
        asking.start()
        time.sleep(1.0)
        for pid in (*(pid for pid, _ in followers(process.pid)), process.pid):
            os.kill(pid, signal.SIGTERM)
        assert process.wait(15) == 0
        asking.join()
    assert answers == [200] and "ended with status" not in log.read_text()


@pytest.mark.slow
def test_settings_do_not_travel_as_an_argument(tmp_path: Path) -> None:
    """A prompt may be longer than an argument, and keys are nothing for the list of processes."""
    text = tmp_path / "prompt.txt"
    text.write_text("import os\n" * 16000)
    long = subprocess.run(command("cli", "-f", str(text), "-c", "256", *SPLIT), capture_output=True, timeout=120)
    assert long.returncode == 1 and b"prompt is too long" in long.stderr  # read, and measured with the vocabulary
    with serving(tmp_path) as (process, _, _):
        assert len(followers(process.pid)) == 2
        assert all(len(args) < 200 for _, args in followers(process.pid))


@pytest.mark.slow
def test_torchrun_starts_one_program_and_its_followers(tmp_path: Path) -> None:
    """The others follow the first, and all end well; processes without a part are refused."""
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
        line += command("cli", "-p", "import os", "--temp", "0", "-n", "12", "--no-display-prompt", *arguments)
        return subprocess.run(line, capture_output=True, text=True, timeout=180)

    alone = subprocess.run(
        command("cli", "-p", "import os", "--temp", "0", "-n", "12", "--no-display-prompt"),
        capture_output=True, text=True, check=True,
    )
    for devices in ("CPU0,CPU1", "CPU0"):  # the second as on two hosts, with one device each
        done = run("--device", devices, "-sm", "tensor", "-ts", "1,2")
        assert done.returncode == 0 and done.stdout == alone.stdout, done.stderr
        assert "error" not in done.stderr
    for wrong in (["-sm", "layer"], ["-sm", "tensor", "--device", "CPU0,CPU1", "-ts", "0,1"]):
        refused = run(*wrong)
        assert refused.returncode == 1 and "torchrun started 2 processes: expected" in refused.stderr


@pytest.mark.slow
def test_prompts_of_a_skewed_split_outlive_a_small_cache(tmp_path: Path) -> None:
    """Ranks whose parts differ in size: the limit lies where only some of them would keep a prompt."""
    texts = ["alpha beta " * 100, "x = y + z\n" * 100, "import os\n" * 100]
    more = ["-c", "1024", "--device", "CPU0,CPU1", "-ts", "1,3", "-np", "1", "-cram", "9"]
    with serving(tmp_path, *more, "-md", str(bundled.path("dspark")), "--device-draft", "CPU1") as (_, client, _):
        def answer(text: str) -> str:
            body = {"prompt": text, "n_predict": 8, "temperature": 0}
            return json.loads(client.post("/completion", json=body, timeout=60).text)["content"]

        first = [answer(text) for text in texts]
        assert [answer(text) for text in texts] == first

"""Steps over several devices, captured as far as a CPU can: the tokens of one device, and nothing outside graphs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from two_cards import FIRST, SECOND, THIRD, Cards, Tapes
from two_engines import GREEDY, KINDS, SAMPLED, Family, drain, n_ahead, watch

from ggufspec import bundled, handover
from ggufspec.capture import Lane
from ggufspec.drafters import DraftOptions
from ggufspec.drafters.load import SpecOptions, load_drafter
from ggufspec.engine import Engine
from ggufspec.gguf_file import open_gguf
from ggufspec.handover import hand_over, on, recorder, wait_for_copies
from ggufspec.job import Job, Request
from ggufspec.models import Model, load_model
from ggufspec.placement import Placement
from ggufspec.relay import Recording, devices_of_step
from ggufspec.weights import Weights

N_CTX = 256
HOST = torch.device("cpu")
TYPES: dict[str, tuple[str | None, tuple[str, ...]]] = {  # file and types
    "mtp": (None, ("draft-mtp",)), "dspark": ("dspark", ()), "dflash2": ("dflash2", ()),
    "small": ("target", ("draft-simple",)), "ngram": (None, ("ngram-mod",)),
}  # fmt: skip
CUTS = {2: (3,), 3: (2, 5)}  # layers at which the device changes
# Work of a steady step that is no graph's: its inputs on their way in, its results on their way out.
BETWEEN = {"copy_", "__getitem__", "tolist", "detach"}


@pytest.fixture(scope="module")
def family() -> Family:
    return Family()


@pytest.fixture(scope="module")
def cards() -> Iterator[Cards]:
    with Cards() as cards:
        yield cards


@pytest.fixture(scope="module")
def splits(family: Family, cards: Cards) -> dict[int, tuple[Model, Weights]]:
    """The bundled target over two devices and over three."""
    found = {}
    n = int(family.file.metadata["qwen35.block_count"])
    for n_devices, cuts in CUTS.items():
        layers = tuple(torch.device("cpu", sum(i >= cut for cut in cuts)) for i in range(n))
        weights = Weights(family.file)
        found[n_devices] = load_model(family.file, Placement(FIRST, layers, layers[-1]), weights=weights), weights
    return found


def drafter_of(family: Family, split: tuple[Model, Weights], kind: str, n_slots: int, device: torch.device | None
               ) -> Any:
    if kind == "plain":
        return None
    name, types, n_max = *TYPES.get(kind, (None, ())), KINDS.get(kind, (None, 2))[1]
    drafter: Any = load_drafter(
        SpecOptions(types, DraftOptions(n_max=n_max)), family.file, split[0],
        None if name is None else open_gguf(bundled.path(name) if name != "target" else bundled.target_path()),
        n_slots=n_slots, n_ctx=N_CTX, device=device, target_weights=split[1],
    )  # fmt: skip
    if device != HOST and kind != "ngram":
        drafter.capturable = True  # as on GPUs
    return drafter


def relayed(family: Family, split: tuple[Model, Weights], kind: str, n_slots: int, place: torch.device | None = None
            ) -> tuple[Engine, Tapes]:
    """An engine whose steps are captured over the model's devices and the drafter's."""
    model, drafter = split[0], drafter_of(family, split, kind, n_slots, place)
    engine = Engine(model, family.tokenizer, drafter=drafter, n_slots=n_slots, n_ctx=N_CTX, ahead=True)
    tapes = engine.decoder.graphs = Tapes(devices_of_step(model, drafter), engine._mutable)
    return engine, tapes


def play(family: Family, engine: Engine) -> list[Job]:
    """Two streams, one of which samples and ends later."""
    jobs = [engine.submit(Request(family.prompts[0][:9], GREEDY, n_predict=7)),
            engine.submit(Request(family.prompts[1][:9], SAMPLED, n_predict=13))]  # fmt: skip
    drain(engine)
    return jobs


PLACES = [("plain", None), *((kind, place) for kind in ("mtp", "dspark", "dflash2") for place in (None, FIRST)),
          ("dspark", THIRD)]  # fmt: skip


@pytest.mark.parametrize("kind, place", PLACES, ids=str)
def test_the_tokens_of_one_device(family: Family, cards: Cards, splits: dict[int, Any], kind: str, place: Any) -> None:
    """Wherever the drafter lies; steps run ahead. Streams that end and sizes that change go through other tapes."""
    want = play(family, family.engine(kind, False, n_slots=2, n_ctx=N_CTX))
    engine, tapes = relayed(family, splits[2], kind, 2, place)
    launches = watch(engine)
    got = play(family, engine)
    assert [job.generated for job in got] == [job.generated for job in want]
    assert [job.stats.draft_n_accepted for job in got] == [job.stats.draft_n_accepted for job in want]
    assert n_ahead(launches) > 0
    assert tapes.captured and all(shape.stage == "step" for shape in tapes.tapes())


@pytest.mark.parametrize("place", [None, FIRST], ids=str)
def test_a_small_model_that_drafts(family: Family, cards: Cards, splits: dict[int, Any], place: Any) -> None:
    """The target itself, on one device; all that it drafts is right."""
    want = family.engine("plain", False, n_ctx=N_CTX)
    engine, tapes = relayed(family, splits[2], "small", 1, place)
    jobs = [one.submit(Request(family.prompts[0][:9], GREEDY, n_predict=10)) for one in (want, engine)]
    drain(want), drain(engine)
    assert jobs[0].generated == jobs[1].generated
    assert jobs[1].stats.draft_n_accepted == jobs[1].stats.draft_n > 0
    assert all(shape.stage == "step" for shape in tapes.tapes())


@pytest.mark.parametrize("kind, place", [("ngram", None), ("dspark", HOST), ("mtp", HOST)], ids=str)
def test_drafters_on_the_host(family: Family, cards: Cards, splits: dict[int, Any], kind: str, place: Any) -> None:
    """The verification alone is captured, over both devices."""
    want = play(family, family.engine("plain", False, n_slots=2, n_ctx=N_CTX))
    engine, tapes = relayed(family, splits[2], kind, 2, place)
    assert engine.decoder.is_on_host
    assert [job.generated for job in play(family, engine)] == [job.generated for job in want]
    assert {shape.stage for shape in tapes.tapes()} == {"verify"}


@pytest.mark.parametrize("place", [None, FIRST, THIRD], ids=str)
def test_launched_one_by_one(family: Family, cards: Cards, splits: dict[int, Any], place: Any) -> None:
    """`--no-graph`: nothing works on two devices at once there either."""
    want = play(family, family.engine("plain", False, n_slots=2, n_ctx=N_CTX))
    engine, _ = relayed(family, splits[2], "mtp", 2, place)
    engine.decoder.graphs, engine.decoder.ahead = None, False
    assert [job.generated for job in play(family, engine)] == [job.generated for job in want]


@pytest.mark.parametrize("kind, place", [("dspark", None), ("dspark", SECOND), ("mtp", FIRST), ("dflash2", SECOND),
                                         ("mtp", HOST)], ids=str)  # fmt: skip
def test_three_devices(family: Family, cards: Cards, splits: dict[int, Any], kind: str, place: Any) -> None:
    want = play(family, family.engine(kind, False, n_slots=2, n_ctx=N_CTX))
    engine, _ = relayed(family, splits[3], kind, 2, place)
    assert [job.generated for job in play(family, engine)] == [job.generated for job in want]


@pytest.mark.parametrize("kind", ["ngram", "dspark"])
def test_an_output_apart(family: Family, cards: Cards, kind: str) -> None:
    """No layer lies where tokens are chosen: the rows' positions, by which streams sample, are made there too."""
    n = int(family.file.metadata["qwen35.block_count"])
    layers, weights = tuple(SECOND if i >= CUTS[2][0] else FIRST for i in range(n)), Weights(family.file)
    split = load_model(family.file, Placement(FIRST, layers, THIRD), weights=weights), weights
    want = play(family, family.engine("plain", False, n_slots=2, n_ctx=N_CTX))
    engine, tapes = relayed(family, split, kind, 2)
    assert engine.device == THIRD
    assert [job.generated for job in play(family, engine)] == [job.generated for job in want]
    assert tapes.tapes()


def test_a_server_captures_between_requests(family: Family, cards: Cards, splits: dict[int, Any]) -> None:
    """Tapes of padding alone, captured while idle, serve what comes: it leaves no trace in slots that are in use."""
    want = play(family, family.engine("mtp", False, n_slots=2, n_ctx=N_CTX))
    engine, tapes = relayed(family, splits[2], "mtp", 2)
    engine.serve([SAMPLED])
    while engine.capture_one():
        pass
    n_captured = len(tapes.captured)
    got = play(family, engine)
    assert [job.generated for job in got] == [job.generated for job in want]
    assert len(tapes.captured) == n_captured > 4


def test_what_a_tape_holds(family: Family, cards: Cards, splits: dict[int, Any]) -> None:
    """Drafter beside the output: rows go to the first device, the stream comes back, acceptance goes there. The draft's
    embedding rows are looked up where they lie."""
    engine, tapes = relayed(family, splits[2], "dspark", 1)
    job = engine.submit(Request(family.prompts[0], GREEDY, n_predict=8))
    drain(engine)
    assert job.generated
    a, b = str(FIRST), str(SECOND)
    to_first, back = (b, a), (a, b)
    (seen,) = [seen for shape, seen in tapes.tapes().items() if shape.n == KINDS["dspark"][1]]
    assert seen == [b, to_first, a, back, b, to_first, a, back, b, to_first, a, b]


@pytest.mark.parametrize("kind, place", PLACES, ids=str)
def test_a_steady_step_launches_graphs_alone(family: Family, cards: Cards, splits: dict[int, Any], kind: str,
                                             place: Any) -> None:
    engine, tapes = relayed(family, splits[2], kind, 1, place)
    engine.submit(Request(family.prompts[0][:9], GREEDY, n_predict=60))
    for _ in range(4):
        engine.step()
    n_captured = len(tapes.captured)
    cards.outside.clear()
    for _ in range(3):
        engine.step()
    assert len(tapes.captured) == n_captured
    assert cards.outside and set(cards.outside) <= BETWEEN, set(cards.outside) - BETWEEN
    while not engine.idle:
        engine.step()


def test_work_on_another_device_is_noticed(cards: Cards) -> None:
    """The test's own eyes: mixed devices, and work that no graph holds."""
    x, y = torch.zeros(3, device=FIRST), torch.zeros(3, device=SECOND)
    assert (x.device, y.device, (x + 1).device, x.to(SECOND).device) == (FIRST, SECOND, FIRST, SECOND)
    with pytest.raises(AssertionError, match="add of tensors on"):
        torch.add(x, y)
    tapes = Tapes([FIRST, SECOND], lambda: [])
    with pytest.raises(AssertionError, match="mul on cpu:1 while cpu:0 is captured"):
        tapes.run("stray", lambda a: (a + 1, y.mul(2)), (x,))


def test_fixed_memory_is_not_written_while_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's stream waits for copies from it alone, not for what comes to it or goes between others."""
    waited: list[str] = []
    stream = SimpleNamespace(wait_stream=waited.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    keys = [(FIRST, FIRST, SECOND), (SECOND, FIRST, SECOND), (FIRST, FIRST, THIRD), (FIRST, SECOND, FIRST),
            (SECOND, SECOND, FIRST)]  # fmt: skip
    monkeypatch.setattr(handover, "_streams", {key: " ".join(map(str, key)) for key in keys})
    wait_for_copies(FIRST)
    assert waited == ["cpu:0 cpu:0 cpu:1", "cpu:0 cpu:0 cpu:2"]


def test_graphs_begin_and_end_in_turn(monkeypatch: pytest.MonkeyPatch, cards: Cards) -> None:
    """The recording of a GPU on one that is not there: graphs without work are not replayed, but kept; an error ends
    the capture that it came in."""
    said: list[str] = []
    current: list[Any] = []

    class Graph:
        def __init__(self) -> None:
            self.n_done = 0

        def capture_begin(self, pool: str, capture_error_mode: str) -> None:
            assert not current and capture_error_mode == "thread_local"
            current.append(self)
            said.append(f"begin {pool}")

        def capture_end(self) -> None:
            assert current.pop() is self
            said.append("end")
            if self.n_done == 0:
                warnings.warn("The CUDA Graph is empty. This usually means that ..", stacklevel=2)

        def replay(self) -> None:
            said.append(f"replay {self.n_done}")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    lanes = [Lane(SECOND), Lane(FIRST)]
    for lane in lanes:
        lane.__dict__.update(pool=str(lane.device), stream=None)

    def work(n: int) -> None:
        current[-1].n_done += n

    with Recording(lanes).running() as tape:
        work(1)
        with on(FIRST):
            work(2)
            (there,) = hand_over([torch.arange(3, device=FIRST)], SECOND)
            with on(FIRST):
                pass
        assert there.device == SECOND and there.shape == (3,)
        work(3)
    assert recorder.get() is None and not current
    assert said == ["begin cpu:1", "end", "begin cpu:0", "end", "begin cpu:0", "end", "begin cpu:1", "end"]
    assert len(tape.items) == 4 and len(tape.empty) == 1
    said.clear()
    tape.replay()
    assert said == ["replay 1", "replay 2", "replay 3"]
    with pytest.raises(ValueError, match="broken"), Recording(lanes).running(), on(FIRST):
        raise ValueError("broken")
    assert recorder.get() is None and not current
    with pytest.raises(RuntimeError, match="a step is captured on cpu:1, cpu:0; it went on to cpu:2"):
        with Recording(lanes).running(), on(THIRD):
            pass
    assert recorder.get() is None and not current

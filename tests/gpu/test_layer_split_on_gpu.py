"""A layer split over two GPUs: the streams of one GPU, and steps that are graphs and copies alone."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from two_engines import GREEDY, KINDS, SAMPLED, Family, drain, n_ahead, watch  # noqa: E402

from ggufspec import bundled  # noqa: E402
from ggufspec.drafters import DraftOptions  # noqa: E402
from ggufspec.drafters.load import SpecOptions, load_drafter  # noqa: E402
from ggufspec.drafters.synth import SyntheticAcceptance, rates_of_length  # noqa: E402
from ggufspec.engine import Engine  # noqa: E402
from ggufspec.gguf_file import open_gguf  # noqa: E402
from ggufspec.job import Request  # noqa: E402
from ggufspec.models import load_model  # noqa: E402
from ggufspec.placement import Placement  # noqa: E402
from ggufspec.relay import RelayGraphs  # noqa: E402
from ggufspec.sampling import SamplingParams  # noqa: E402
from ggufspec.weights import Weights  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
N_CTX, CUT = 1024, 3
# What a launch is called: PyTorch's kernels, Triton's.
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")


def card(k):
    return torch.device("cuda", k)


@pytest.fixture(scope="module")
def family():
    return Family("cuda:1")


@pytest.fixture(scope="module")
def split(family):
    """The bundled target on both GPUs, its output on the second."""
    n = int(family.file.metadata["qwen35.block_count"])
    layers = tuple(card(int(i >= CUT)) for i in range(n))
    weights = Weights(family.file)
    return load_model(family.file, Placement(card(0), layers, card(1)), weights=weights), weights


def engine_of(family, model, weights, kind, place=None, n_slots=2, **options):
    name, n_max = KINDS[kind]
    drafter = None if kind == "plain" else load_drafter(
        SpecOptions(("draft-mtp",) if name is None else (), DraftOptions(n_max=n_max)), family.file, model,
        None if name is None else open_gguf(bundled.path(name)), n_slots=n_slots, n_ctx=N_CTX,
        device=None if place is None else card(place), target_weights=weights,
    )  # fmt: skip
    return Engine(model, family.tokenizer, drafter=drafter, n_slots=n_slots, n_ctx=N_CTX, **options)


def play(engine, prompts):
    """Two streams that end at other times, a second turn, and one that is cancelled and replaced in flight."""
    jobs = [engine.submit(Request(p, s, n_predict=n)) for p, s, n in zip(prompts, (GREEDY, SAMPLED), (60, 90))]
    drain(engine)
    jobs.append(engine.submit(Request([*prompts[0], *jobs[0].generated, 40, 41], SAMPLED, n_predict=20)))
    drain(engine)
    going = [engine.submit(Request(p, GREEDY, n_predict=40)) for p in prompts[:2]]
    for _ in range(9):
        engine.step()
    engine.cancel(going[1])
    jobs += [going[0], engine.submit(Request(prompts[2][::-1], SAMPLED, n_predict=12))]
    drain(engine)
    return [(job.generated, job.stats.draft_n_accepted) for job in jobs]


PLACES = [("plain", None), *((kind, place) for kind in ("mtp", "dspark", "dflash2") for place in (None, 0))]


@pytest.mark.parametrize("kind, place", PLACES)
def test_the_streams_of_one_device(family, split, kind, place):
    want = play(family.engine(kind, True, n_slots=2, n_ctx=N_CTX), family.prompts)
    engine = engine_of(family, *split, kind, place)
    assert isinstance(engine.decoder.graphs, RelayGraphs)
    launches = watch(engine)
    assert play(engine, family.prompts) == want
    assert n_ahead(launches) > 0.3 * engine.stats.n_decode


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
def test_a_drafter_on_a_gpu_of_its_own(family, kind):
    want = play(family.engine(kind, True, n_slots=2, n_ctx=N_CTX), family.prompts)
    engine = engine_of(family, family.model, family.weights, kind, 0)
    assert isinstance(engine.decoder.graphs, RelayGraphs)
    assert play(engine, family.prompts) == want


@pytest.mark.parametrize("kind", ["plain", "dspark"])
def test_a_server_captures_between_requests(family, split, kind):
    """Tapes of padding alone, captured while idle, serve what comes."""
    want = play(family.engine(kind, True, n_slots=2, n_ctx=N_CTX), family.prompts)
    engine = engine_of(family, *split, kind)
    play(engine, family.prompts)
    for slot in engine.slots:
        engine.erase_slot(slot.id)
    engine.serve([SAMPLED])
    while engine.capture_one():
        pass
    n_captured = len(engine.decoder.graphs.captured)
    got = play(engine, family.prompts)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]
    assert len(engine.decoder.graphs.captured) == n_captured


@pytest.mark.parametrize("kind, place", PLACES)
def test_a_steady_step_launches_graphs_alone(family, split, kind, place):
    synthetic = None
    if kind != "plain":
        synthetic = SyntheticAcceptance(rates_of_length(2.2, KINDS[kind][1]), 1, split[0].device)
    engine = engine_of(family, *split, kind, place, n_slots=1, synthetic=synthetic)
    engine.submit(Request(family.prompts[0], SamplingParams(temperature=0.0, seed=3, ignore_eos=True), n_predict=400))
    for _ in range(12):
        engine.step()
    n_captured = len(engine.decoder.graphs.captured)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(5):
            engine.step()
    assert len(engine.decoder.graphs.captured) == n_captured
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts.get("cudaGraphLaunch", 0) >= 5 * 3
    assert not {key: n for key, n in counts.items() if key.startswith(LAUNCHES)}
    while not engine.idle:
        engine.step()

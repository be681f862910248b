"""The planner's sums against what loading really allocates, and the answers it gives for models in real sizes."""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from headers import write_header

from ggufspec import bundled
from ggufspec.best_split import best_split
from ggufspec.capture import entry_counts
from ggufspec.drafters import DraftOptions
from ggufspec.drafters.dflash_config import read_dflash_config
from ggufspec.drafters.load import SpecOptions, load_drafter
from ggufspec.errors import ConfigError
from ggufspec.gguf_file import GGUFFile, open_gguf
from ggufspec.kernels.matmul import PackedWeight, cuda, repack
from ggufspec.kernels.matmul.sizes import launch_bytes, packed_bytes
from ggufspec.measured import own_bytes
from ggufspec.models import load_model, read_config
from ggufspec.placement import Placement
from ggufspec.planner import Plan, Planner
from ggufspec.quant.layouts import BY_NAME
from ggufspec.question import Question, check
from ggufspec.weights import Weights

CPU = torch.device("cpu")
GIB = 1 << 30


def cuda_devices(n: int) -> tuple[torch.device, ...]:
    return tuple(torch.device("cuda", i) for i in range(n))


def question(path: Path, devices: tuple[torch.device, ...] = (CPU,), gib: float | None = None, **more: Any) -> Question:
    file = open_gguf(path)
    memory = (None if gib is None else int(gib * GIB),) * len(devices)
    return Question(file, read_config(file), devices, memory, **more)


def held(value: Any, seen: dict[tuple[int, int], int] | None = None) -> int:
    """Bytes of all tensors reachable from a loaded model, each once."""
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        seen[value.data_ptr(), value.numel()] = value.numel() * value.element_size()
    elif isinstance(value, list | tuple):
        for item in value:
            held(item, seen)
    elif is_dataclass(value) and not isinstance(value, type):
        for name in value.__dataclass_fields__:
            held(getattr(value, name), seen)
    return sum(seen.values())


MAKERS = {
    "qwen35": families.make_qwen35, "qwen3": families.make_qwen3, "llama": families.make_llama,
    "qwen2": families.make_qwen2, "gemma3": families.make_gemma3,
}  # fmt: skip


@pytest.mark.parametrize("kind", list(MAKERS))
def test_weights_are_those_that_loading_holds(kind: str, tmp_path: Path) -> None:
    path = MAKERS[kind](tmp_path / "m.gguf", seed=3, type="Q4_K")
    q = question(path)
    plan = Planner(q).plan(256)
    model = load_model(q.file, Placement.single("cpu", q.config.n_layers))
    assert plan.parts[CPU]["weights"] == held(model)


@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "q4_0"), ("f32", "q5_1")], ids=str)
@pytest.mark.parametrize("n_slots, n_ctx", [(1, 256), (3, 1000)])
def test_caches_are_those_that_are_allocated(types: tuple[str, str], n_slots: int, n_ctx: int) -> None:
    q = question(bundled.target_path(), n_slots=n_slots, type_k=types[0], type_v=types[1])
    parts = Planner(q).plan(n_ctx).parts[CPU]
    model = load_model(q.file, Placement.single("cpu", q.config.n_layers))
    cache = model.new_cache(n_slots, n_ctx, *types)
    assert parts["KV"] + parts["recurrent"] == cache.n_bytes
    states = cache.save_recurrent(0)
    assert parts["checkpoints"] == 2 * n_slots * sum(t.numel() * t.element_size() for t in states if t is not None)


@pytest.mark.parametrize("n_ctx", [256, 4096])
@pytest.mark.parametrize("name, draft", [("draft-mtp", None), ("draft-dspark", "dspark"), ("draft-dflash", "dflash2")])
def test_drafters_are_what_loading_makes(name: str, draft: str | None, n_ctx: int) -> None:
    """Rings included: their size does not follow the context once that is longer than the window."""
    draft_file = None if draft is None else open_gguf(bundled.path(draft))
    options = DraftOptions(n_max=4)
    q = question(bundled.target_path(), draft_file=draft_file, types=(name,), draft=options, n_slots=2,
                 draft_type_k="q8_0")
    check(q)
    parts = Planner(q).plan(n_ctx).parts[CPU]
    weights = Weights(q.file)
    model = load_model(q.file, Placement.single("cpu", q.config.n_layers), weights=weights)
    before: dict[tuple[int, int], int] = {}
    held(model, before)
    spec = SpecOptions(types=(name,), draft=options, type_k="q8_0")
    drafter: Any = load_drafter(spec, q.file, model, draft_file, n_slots=2, n_ctx=n_ctx, target_weights=weights)
    assert parts["draft KV"] == own_bytes(drafter) >= drafter.n_bytes > 0
    roots = {n: v for n, v in vars(drafter).items() if n not in ("kv", "kvs", "pending", "verified", "verified_rows")}
    seen = dict(before)
    held([*roots.values()], seen)
    assert parts["draft weights"] == sum(seen.values()) - sum(before.values())


def test_a_small_model_that_drafts(tmp_path: Path) -> None:
    draft = families.make_qwen3(tmp_path / "d.gguf", seed=4)
    target = families.make_qwen3(tmp_path / "m.gguf", seed=3)
    q = question(target, draft_file=open_gguf(draft), types=("draft-simple",), draft=DraftOptions(n_max=4))
    parts = Planner(q).plan(512).parts[CPU]
    model = load_model(q.file, Placement.single("cpu", q.config.n_layers))
    drafter: Any = load_drafter(SpecOptions(types=q.types, draft=q.draft), q.file, model, q.draft_file, n_slots=1,
                                n_ctx=512)
    assert parts["draft KV"] == drafter.n_bytes and parts["draft weights"] == held(drafter.model)


@pytest.mark.parametrize("type_name", sorted({*repack.FORMS, "F16", "Q3_K"}))
@pytest.mark.parametrize("rows", [(128,), (100, 60), (256, 32, 7)], ids=str)
def test_the_kernels_arrays(type_name: str, rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed here on the CPU, by the functions that pack on a GPU."""
    monkeypatch.setattr(cuda, "capability", lambda index: (9, 0))
    columns = 512
    layout = BY_NAME[type_name]
    weights = []
    for n in rows:
        raw = torch.zeros((n, layout.row_bytes(columns)), dtype=torch.uint8)
        parts = repack.repack(raw, type_name, 0) if type_name in repack.FORMS else {"file": raw}
        weights.append(PackedWeight(type_name, (n, columns), CPU, parts=parts))
        assert packed_bytes(type_name, (n, columns), is_cuda=True) == weights[-1].n_bytes
    for launch in cuda.fuse(tuple(weights)).launches:
        tables = (launch.row_start, launch.row_width, *launch.parts.values())
        assert launch_bytes(type_name, rows, columns) == sum(t.numel() * t.element_size() for t in tables)


# -- models in real sizes --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """27B shapes with a vocabulary that is quick to compare."""
    folder = tmp_path_factory.mktemp("big")
    kinds = ("target", "dspark", "dflash2")
    return {kind: write_header(folder / f"{kind}.gguf", kind, n_vocab=32000) for kind in kinds}


def in_all(plan: Plan, part: str) -> int:
    return sum(parts[part] for parts in plan.parts.values())


def test_a_split_moves_bytes_and_loses_none(big: dict[str, Path]) -> None:
    one = Planner(question(big["target"], cuda_devices(1))).plan(8192)
    three = Planner(question(big["target"], cuda_devices(3), shares=(4.0, 6.0, 6.0))).plan(8192)
    for part in ("weights", "KV", "recurrent", "checkpoints"):
        assert in_all(one, part) == in_all(three, part) > 0
    first, second, third = three.parts.values()
    assert first["weights"] < second["weights"] and third["weights"] > 0
    per_layer = 4 * 256 * 2 * 2 * 8192  # heads, head size, K and V, two bytes
    assert in_all(one, "KV") == 16 * per_layer


@pytest.mark.parametrize("split", ["layer", "tensor", "none"])
def test_shares_change_nothing_on_one_device(big: dict[str, Path], split: str) -> None:
    asked = question(big["target"], cuda_devices(1), split=split)
    want = Planner(asked).plan(8192)
    for shares in ((3.0,), (1.0, 2.0), (0.0, 1.0)):
        assert Planner(replace(asked, shares=shares)).plan(8192).parts == want.parts


def test_packed_weights_are_about_as_large_as_the_file(big: dict[str, Path]) -> None:
    q = question(big["target"], cuda_devices(1), types=("draft-mtp",), draft=DraftOptions(n_max=3))
    parts = Planner(q).plan(256).parts[torch.device("cuda", 0)]
    assert 1.0 <= (parts["weights"] + parts["draft weights"]) / q.file.n_bytes < 1.02


def test_a_tensor_split_repeats_only_what_cannot_be_cut(big: dict[str, Path]) -> None:
    one = Planner(question(big["target"], cuda_devices(1))).plan(8192)
    two = Planner(question(big["target"], cuda_devices(2), split="tensor", shares=(1.0, 1.0))).plan(8192)
    assert in_all(two, "KV") == in_all(one, "KV")
    repeated = in_all(two, "weights") - in_all(one, "weights")
    embedding = 32000 * 5120 * 144 // 256
    assert embedding <= repeated < 1.35 * embedding
    skewed = Planner(question(big["target"], cuda_devices(3), split="tensor", shares=(4.0, 6.0, 6.0))).plan(8192)
    kv = [parts["KV"] for parts in skewed.parts.values()]  # four heads: 1, 1 and 2
    assert kv[0] == kv[1] == kv[2] // 2


def test_the_largest_context_is_the_largest(big: dict[str, Path]) -> None:
    for split in ("layer", "tensor"):
        planner = Planner(question(big["target"], cuda_devices(2), 14, n_slots=4, split=split, shares=(1.0, 1.0)))
        n = planner.largest()
        assert 0 < n < 262144 and planner.plan(n).fits and not planner.plan(n + 256).fits
        assert n == min(planner.largest(device) for device in cuda_devices(2))
    assert Planner(question(big["target"], cuda_devices(1), 9)).largest() == 0


def test_the_drafter_is_counted_where_it_lies(big: dict[str, Path]) -> None:
    draft = open_gguf(big["dspark"])
    asked = question(big["target"], cuda_devices(3), 32, draft_file=draft, draft=DraftOptions(n_max=7))
    check(asked)
    last = Planner(asked).plan(4096)
    first = Planner(replace(asked, draft_device=torch.device("cuda", 0))).plan(4096)
    for part in ("draft weights", "draft KV"):
        assert [p[part] > 0 for p in last.parts.values()] == [False, False, True]
        assert [p[part] > 0 for p in first.parts.values()] == [True, False, False]
        assert in_all(last, part) == in_all(first, part)


def test_captured_steps_are_counted_on_all_their_devices(big: dict[str, Path]) -> None:
    """The head's logits and the drafter's on their devices; what crosses between devices on both sides of it."""
    one, two, three = cuda_devices(3)
    draft, n_rows = open_gguf(big["dspark"]), 4 * 8
    asked = question(big["target"], (one, two), 32, draft_file=draft, draft=DraftOptions(n_max=7), n_slots=4,
                     shares=(1.0, 1.0))
    graphs = {name: {device: parts["graphs"] for device, parts in Planner(q).plan(4096).parts.items()}
              for name, q in {"last": asked, "first": replace(asked, draft_device=one), "beside": replace(
                  asked, draft_device=three), "none": replace(asked, graphs=False)}.items()}  # fmt: skip
    logits = 3 * 4 * n_rows * 32000
    assert set(graphs["none"].values()) == {0}
    assert graphs["last"][two] == graphs["first"][two] == graphs["beside"][two]
    assert graphs["last"][one] == graphs["beside"][one] <= graphs["first"][one]
    crossing = 2 * 4 * n_rows * 5120 * (1 + len(read_taps(draft)))
    assert graphs["beside"][three] == logits + crossing + (8 << 20) * 2 * len(entry_counts(1, 4))
    alone = Planner(replace(asked, devices=(one,), memory=(None,), shares=())).plan(4096).parts[one]["graphs"]
    assert crossing > 0 and graphs["last"][one] + graphs["last"][two] > alone


def read_taps(file: GGUFFile) -> tuple[int, ...]:
    return read_dflash_config(file).target_layers


def test_a_sliding_drafters_memory_does_not_follow_the_context(big: dict[str, Path]) -> None:
    q = question(big["target"], cuda_devices(1), draft_file=open_gguf(big["dflash2"]), draft=DraftOptions(n_max=7))
    planner = Planner(q)
    assert in_all(planner.plan(8192), "draft KV") == in_all(planner.plan(131072), "draft KV") > 0


# DSpark drafters of one target and one name.
SHAPES = [
    dict(n_head=40, n_head_kv=8, n_ff=10240, taps=(5, 17, 29, 41, 53)),
    dict(n_head=32, n_head_kv=8, n_ff=17408, taps=(6, 20, 34, 48, 62)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=["40 heads", "32 heads"])
def test_a_drafter_is_of_the_shape_that_its_own_file_says(big: dict[str, Path], tmp_path: Path, shape: dict[str, Any]
                                                          ) -> None:
    """Two shapes circulate under one name: neither is taken for granted."""
    draft = open_gguf(write_header(tmp_path / "dspark.gguf", "dspark", n_vocab=32000, **shape))
    q = question(big["target"], cuda_devices(1), draft_file=draft, draft=DraftOptions(n_max=7))
    check(q)
    config = read_dflash_config(draft)
    common = config.common
    assert config.kind == "dspark" and config.target_layers == shape["taps"]
    assert (set(common.head_count), set(common.head_count_kv), set(common.feed_forward_length)) == (
        {shape["n_head"]}, {shape["n_head_kv"]}, {shape["n_ff"]}
    )  # fmt: skip
    assert draft.tensors["blk.4.attn_q.weight"].shape == (shape["n_head"] * 128, 5120)
    parts = Planner(q).plan(256).parts[torch.device("cuda", 0)]
    assert 1.0 <= parts["draft weights"] / draft.n_bytes < 1.05  # keys and values also as matrices of their own


@pytest.mark.parametrize("n_slots, draft", [(4, "dspark"), (8, None)])
def test_automatic_layer_split_beats_every_ratio(big: dict[str, Path], n_slots: int, draft: str | None) -> None:
    draft_file = None if draft is None else open_gguf(big[draft])
    options = DraftOptions(n_max=7)
    q = question(big["target"], cuda_devices(3), 24, draft_file=draft_file, draft=options, n_slots=n_slots)
    best = Planner(replace(q, shares=best_split(q))).largest()
    others = [(4, 6, 6), (6, 6, 4), (1, 1, 1), (5, 6, 5), (7, 6, 3), (6, 7, 3), (8, 6, 2)]
    results = [Planner(replace(q, shares=tuple(map(float, ratio)))).largest() for ratio in others]
    assert best >= max(results) > 0
    assert best > Planner(q).largest()  # shares that follow the memory alone


def test_automatic_split_of_unequal_cards(big: dict[str, Path]) -> None:
    q = replace(question(big["target"], cuda_devices(2), n_slots=2), memory=(24 * GIB, 10 * GIB))
    for split in ("layer", "tensor"):
        asked = replace(q, split=split)
        shares = best_split(asked)
        assert shares[0] > shares[1]
        assert Planner(replace(asked, shares=shares)).largest() >= Planner(replace(asked, shares=(1.0, 1.0))).largest()


def test_automatic_split_without_room_or_limits(big: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="no split over 2 devices has room"):
        best_split(question(big["target"], cuda_devices(2), 4))
    with pytest.raises(ConfigError, match="weighs the memory of GPUs"):
        best_split(question(big["target"], cuda_devices(2)))
    assert best_split(question(big["target"], cuda_devices(1), 24)) == ()

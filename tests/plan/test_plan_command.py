"""`ggufspec plan` and `--fit` as commands see them; the GPUs are made up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from headers import write_header

from ggufspec import bundled
from ggufspec.errors import PlacementError
from ggufspec.gguf_file import open_gguf
from ggufspec.models import read_config
from ggufspec.tools import fit, runtime
from ggufspec.tools.main import run
from ggufspec.tools.options import parse
from ggufspec.tools.settings import Settings

GIB = 1 << 30


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_header(tmp_path_factory.mktemp("big") / "target.gguf", "target", n_vocab=32000)


def shown(capsys: pytest.CaptureFixture[str], line: str, status: int = 0) -> str:
    """The table, or the one line of an error."""
    assert run(["plan", *line.split()]) == status
    out = capsys.readouterr()
    return out.err or out.out


def test_a_table_with_a_row_a_device(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, f"-m {target} --spec-type draft-mtp --gpu-mem 32,32,32 -ts 6,6,4 -np 1 -c 65536")
    lines = text.splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.startswith(("GiB", "CUDA"))}
    assert list(rows) == ["GiB", "CUDA0", "CUDA1", "CUDA2"] and len({len(rows[f"CUDA{i}"]) for i in range(3)}) == 1
    for i in range(3):
        *parts, total, of, free, _ = map(float, rows[f"CUDA{i}"][1:])
        assert of == 31.5 and total + free == pytest.approx(of, abs=0.02)
        assert sum(parts) == pytest.approx(total, abs=0.05)
    assert "1 slot(s) of 65536 tokens fit" in text and "the longest context that fits: 262144" in text


def test_what_does_not_fit_is_named(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, f"-m {target} --gpu-mem 16 -np 1 -c 262144", 1)
    assert "1 slot(s) of 262144 tokens do not fit" in text and "GiB are missing" in text
    assert "no context fits" in shown(capsys, f"-m {target} --gpu-mem 8 -np 1", 1)
    of, free = text.splitlines()[4].split()[-3:-1]
    assert float(of) == 15.5 and float(free) == 0.0  # what is missing is said in a line of its own


def test_a_gpu_smaller_than_its_driver_is_refused(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for size in ("0.1", "0.5"):
        line = shown(capsys, f"-m {target} --gpu-mem 16,{size}", 1)
        assert line == f"error: --gpu-mem {size}: expected GiB of a GPU, more than the 0.5 that its driver keeps\n"


def test_automatic_shares(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mode in ("layer", "tensor"):
        assert "--tensor-split auto: " in shown(capsys, f"-m {target} --gpu-mem 16,12 -sm {mode} -ts auto")


def test_without_layers_on_gpus_there_is_nothing_to_choose(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing to split" in shown(capsys, f"-m {target} --gpu-mem 16,12 -ngl 0 -ts auto")


def test_devices_have_to_be_among_the_planned(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "CUDA0 to CUDA1" in shown(capsys, f"-m {target} --gpu-mem 16,16 -dev CUDA2", 1)
    assert "CUDA0 to CUDA0" in shown(capsys, f"-m {target} --gpu-mem 16 --spec-type draft-mtp -devd CUDA3", 1)
    assert "positive numbers" in shown(capsys, f"-m {target} --gpu-mem 16,-1", 1)
    assert "--model is required" in shown(capsys, "--gpu-mem 16", 1)


def test_the_processors_row_has_no_limit(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, f"-m {bundled.target_path()} -dev none -c 1024 -np 1")
    assert "CPU0" in text and "1 slot(s) of 1024 tokens fit" in text


def fitted(monkeypatch: pytest.MonkeyPatch, target: Path, line: str, gib: list[float],
           devices: list[torch.device] | None = None, draft_device: torch.device | None = None
           ) -> tuple[Settings, int, int]:
    """Settings after `--fit` on GPUs with so much free, and what they come to. devices: those named, if not all."""
    free = [int(g * GIB) for g in gib]
    every = [torch.device("cuda", i) for i in range(len(free))]
    monkeypatch.setattr(fit, "devices_of", lambda names: devices or every)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device.index], 2 * free[device.index]))
    settings = parse("server", ["-m", str(target), *line.split()], {})
    file = open_gguf(target)
    config = read_config(file)
    n_slots, n_ctx = runtime.size_context(settings.context, config)
    settings = fit.fitted(settings, file, config, None, n_slots, n_ctx, draft_device)
    return settings, *runtime.size_context(settings.context, config)


def test_an_unset_context_is_lowered_to_what_fits(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    _, n_slots, n_ctx = fitted(monkeypatch, target, "", [32])
    assert n_slots == 4 and 30000 < n_ctx < 100000 and n_ctx % 256 == 0
    _, _, wider = fitted(monkeypatch, target, "-fitt 0", [32])
    assert wider > n_ctx
    assert fitted(monkeypatch, target, "-np 1", [64])[2] == 262144


def test_a_set_context_is_kept_or_refused(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    assert fitted(monkeypatch, target, "-c 32768 -np 1", [32])[1:] == (1, 32768)
    with pytest.raises(PlacementError, match=r"CUDA0 needs .* and has 20.00: .* GiB are missing .* would fit") as error:
        fitted(monkeypatch, target, "-c 262144 -np 1", [20])
    assert "\n" not in str(error.value)
    assert fitted(monkeypatch, target, "-c 262144 -np 1 -fit off", [20])[2] == 262144


def test_a_set_context_may_use_what_is_left_free_beside_a_processor(
    monkeypatch: pytest.MonkeyPatch, target: Path
) -> None:
    """Some layers on the CPU, which has no limit: what does not fit with the margin may still fit without it."""
    whole = next(g for g in range(8, 40) if fits(monkeypatch, target, "-c 8192 -np 1 -ngl 40 -fitt 0", [g]))
    assert fitted(monkeypatch, target, "-c 8192 -np 1 -ngl 40 -fitt 4096", [whole])[2] == 8192


def fits(monkeypatch: pytest.MonkeyPatch, target: Path, line: str, gib: list[float]) -> bool:
    try:
        return bool(fitted(monkeypatch, target, line, gib))
    except PlacementError:
        return False


def test_a_processor_among_the_devices_keeps_its_place(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    """Shares and --main-gpu count it, and it has no limit."""
    cpu, first, second = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
    assert fitted(monkeypatch, target, "-c 8192 -np 1 -ts 1,1,1", [24, 24], [first, cpu, second])[2] == 8192
    assert fitted(monkeypatch, target, "-c 8192 -np 1 -sm none -mg 1", [32], [cpu, first])[2] == 8192
    assert fitted(monkeypatch, target, "-c 8192 -np 1 -ts 7,1", [8], [cpu, first])[2] == 8192  # an eighth fits
    with pytest.raises(PlacementError, match="CUDA0 needs"):
        fitted(monkeypatch, target, "-c 8192 -np 1 -ts 1,7", [8], [cpu, first])


@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_shares_that_say_nothing(target: Path, capsys: pytest.CaptureFixture[str], mode: str) -> None:
    """Zeros alone, and any for one GPU."""
    line = f"-m {target} -sm {mode} -c 8192 -np 1 --gpu-mem"
    assert shown(capsys, f"{line} 64,64 -ts 0,0") == shown(capsys, f"{line} 64,64")
    assert shown(capsys, f"{line} 64 -ts 1,3") == shown(capsys, f"{line} 64")


def test_a_drafter_beside_the_devices_is_weighed(monkeypatch: pytest.MonkeyPatch, target: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """On a GPU of its own, which --device does not name."""
    line = f"-m {target} -np 1 -c 8192 --spec-type draft-mtp -dev CUDA0 -devd CUDA1 --gpu-mem 40,"
    assert "1 slot(s) of 8192 tokens fit" in shown(capsys, f"{line}8")
    assert "CUDA1: " in shown(capsys, f"{line}0.6", 1)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    beside = {"devices": [first], "draft_device": second}
    assert fitted(monkeypatch, target, "-c 8192 -np 1 --spec-type draft-mtp", [40, 8], **beside)[2] == 8192
    with pytest.raises(PlacementError, match="CUDA1 needs"):
        fitted(monkeypatch, target, "-c 8192 -np 1 --spec-type draft-mtp", [40, 0.2], **beside)


def test_a_tensor_split_is_planned_as_it_runs(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"-m {target} -sm tensor -c 8192 -np 1 --gpu-mem 64,64 -ngl"
    assert "has all 66 layers" in shown(capsys, f"{line} 10", 1)
    assert "CPU0" in shown(capsys, f"{line} 0")


def test_a_model_too_large_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    with pytest.raises(PlacementError, match="no context fits"):
        fitted(monkeypatch, target, "", [12])


def test_automatic_shares_become_numbers(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    settings, _, n_ctx = fitted(monkeypatch, target, "-ts auto", [24, 12])
    first, second = settings.model.tensor_split
    assert isinstance(first, float) and first > second and n_ctx >= 4096

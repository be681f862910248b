"""multi_gpu.py on the GPUs of this machine (two or more), and on logical CPU devices."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("multi_gpu.py")


def run(tmp_path: Path, *arguments: str) -> dict:
    out = tmp_path / "out.json"
    done = subprocess.run([sys.executable, SCRIPT, *arguments, "--json", out], capture_output=True, text=True,
                          timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    assert out.with_suffix(".md").read_text().strip()
    return json.loads(out.read_text())


@pytest.mark.gpu
@pytest.mark.slow
def test_sums_and_tokens_on_all_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    results = run(tmp_path, "--only", "sums,tokens")
    assert all(done["streams"] > 0 and not done["differ"] for done in results["tokens"]["runs"].values())


@pytest.mark.slow
def test_sums_and_tokens_on_logical_devices(tmp_path: Path) -> None:
    results = run(tmp_path, "--cpu", "2", "--only", "sums,tokens")
    assert all(done["streams"] > 0 and not done["differ"] for done in results["tokens"]["runs"].values())


def test_unknown_parts_are_named(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--cpu", "2", "--only", "sum"], capture_output=True, text=True)
    assert done.returncode == 2 and "--only sum: expected some of sums,tokens,speed,prefill,plan" in done.stderr

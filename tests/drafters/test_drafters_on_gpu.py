"""The trained drafters on a CUDA device: parity with plain decoding, and the CPU's drafts."""

import pytest
from golden.check_parity import Pair, check, stream

from ggufspec import bundled
from ggufspec.drafters.recognize import infer_types
from ggufspec.gguf_file import open_gguf
from ggufspec.sampling import SamplingParams

pytestmark = pytest.mark.gpu

FILES = {"mtp": None, "dspark": "dspark", "dflash2": "dflash2"}
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
TEXT = "import os\nimport json\n\n\ndef read_config(path):\n    "


@pytest.fixture(scope="module")
def pair():
    return Pair(bundled.target_path(), "cuda:0")


def draft_file(kind):
    return None if FILES[kind] is None else open_gguf(bundled.path(FILES[kind]))


@pytest.mark.parametrize("kv", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("kind", FILES)
def test_streams_are_the_plain_ones(pair, kind, kv):
    cases = list(check(pair, pair.tokenizer.encode(TEXT), [draft_file(kind)], range(1, 9), 48, [kv]))
    assert [wrong for _, wrong, _ in cases if wrong] == []
    assert sum(n_accepted for _, _, n_accepted in cases) > 100


@pytest.mark.parametrize("kind", FILES)
def test_the_gpu_accepts_what_the_cpu_accepts(pair, kind):
    """Other kernels, other rounding: a near-tie may turn a draft, so the accepted counts agree within a few tokens."""
    draft = draft_file(kind)
    types = ("draft-mtp",) if draft is None else infer_types(draft)
    prompt = pair.tokenizer.encode(TEXT)
    accepted = []
    for p in (pair, Pair(bundled.target_path())):
        tokens, n_accepted = stream(p.engine(draft, types, 5, "f16", 256), prompt, GREEDY, 64)
        accepted.append(n_accepted)
    assert accepted[0] == pytest.approx(accepted[1], abs=4)

"""Host values on their way to a device."""

import pytest
import torch

from ggufspec.pinned import sent


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_values_arrive_as_they_are(device: str) -> None:
    given = (([[1, 2], [3, 4]], None), ([2**63 - 1], torch.int64), ([0.1, 1e300], torch.float64), ([], None))
    for values, dtype in given:
        got, expected = sent(values, device, dtype), torch.tensor(values, dtype=dtype)
        assert got.device.type == device and got.dtype == expected.dtype and torch.equal(got.cpu(), expected)


@pytest.mark.gpu
def test_nobody_waits_for_what_the_device_has_to_do() -> None:
    sent([0], "cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)
    got = sent([1, 2, 3], "cuda")
    assert not torch.cuda.current_stream().query()
    assert got.tolist() == [1, 2, 3]

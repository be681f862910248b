"""The short form of the load run; `load.py` has the long one."""

import pytest
from load import run
from test_process import Process


@pytest.mark.slow
def test_streams_under_load_equal_the_same_requests_alone():
    with Process("-np", "4", "-c", "1024", "--spec-type", "draft-mtp", "--spec-draft-n-max", "3") as server:
        report = run(server.address, server.process.pid, seconds=12, n_streams=8, n_tokens=8)
    assert report.wrong == []
    assert report.finished > 0 and report.refused > 0

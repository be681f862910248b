"""Lists and ranges of benchmark options."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufspec.errors import ConfigError
from ggufspec.tools.bench.lists import integers, numbers


@pytest.mark.parametrize(
    "text, values",
    [
        ("512", [512]),
        ("1,2,4", [1, 2, 4]),
        ("1-4", [1, 2, 3, 4]),
        ("1..4", [1, 2, 3, 4]),
        ("0-10+5", [0, 5, 10]),
        ("1-16*2", [1, 2, 4, 8, 16]),
        ("64,1-3", [64, 1, 2, 3]),
        ("-1", [-1]),
        ("-1-1", [-1, 0, 1]),
    ],
)
def test_lists_and_ranges(text, values):
    assert integers(text, "-p") == values


@pytest.mark.parametrize("text", ["", "x", "1,", "4-1", "1-4*1", "0-4*2", "1-4+0", "1.5", "1-"])
def test_bad_values_name_the_option(text):
    with pytest.raises(ConfigError, match="error: invalid parameter for argument: -p"):
        integers(text, "-p")


@pytest.mark.parametrize("text", ["1-1000000000", "1..1000000000", "0-100000+2"])
def test_a_range_without_measure_is_refused_at_once(text):
    with pytest.raises(ConfigError, match="--n-max: .* is more than 10000 values"):
        integers(text, "--n-max")


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 50))
def test_a_range_holds_what_python_counts(first, length, step):
    last = first + length
    assert integers(f"{first}-{last}+{step}", "-p") == list(range(first, last + 1, step))


def test_numbers():
    assert numbers("0,0.5,1", "--temp") == [0, 0.5, 1]
    with pytest.raises(ConfigError, match="--temp"):
        numbers("warm", "--temp")

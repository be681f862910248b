"""What an engine does with the statistics of a drafter that lies on one rank."""

from types import SimpleNamespace

import pytest

from ggufspec.drafters.owned import Facts, Owned, Ownership
from ggufspec.drafters.statistics import Statistics
from ggufspec.rehearsal import forget_statistics


@pytest.mark.parametrize("is_here", [True, False])
def test_statistics_begin_anew_on_every_rank(is_here: bool) -> None:
    """After a warm-up; what is recorded then is what the engine reports."""
    inner = SimpleNamespace(name="draft-mtp", n_max=3, taps=(), capturable=True, stats=Statistics("draft-mtp", 3))
    inner.record = lambda slot, n_drafted, n_accepted: inner.stats.record(n_drafted, n_accepted)
    drafter = Owned(Ownership(0, 0 if is_here else 1, None, None), Facts.of(inner), inner if is_here else None)
    engine = SimpleNamespace(drafter=drafter, stats=SimpleNamespace())
    drafter.record(0, 3, 1)
    assert drafter.stats.draft_n == 3
    forget_statistics(engine)
    assert drafter.stats.draft_n == 0
    drafter.record(0, 2, 2)
    assert (drafter.stats.draft_n, drafter.stats.draft_n_accepted) == (2, 2)

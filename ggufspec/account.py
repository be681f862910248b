"""What drafting may lose against plain decoding, in units of plain steps, so that it is never much slower."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

EARN, EARN_MOST = 0.0185, 0.0305  # of plain decoding's time may be spent on looks: ordinarily, and where they are dear
DEAR = 0.45  # looks that cost more are paid at the ordinary rate: no rate lets them be frequent
LOOK_EVERY = 12  # plain steps between two looks, if that costs EARN_MOST at most
EARN_NEW = 0.15  # a stream that begins may be looked at sooner
MOST_AT_START, MOST_CREDIT = 1.6, 6.0  # what may be lost at first, and at any time after gains
MOST_SAVED = 3.0  # what looks may have to spend, and may lack
RESERVE = 1.5  # looks' worth that stays behind a look: what to go on with if it was right


@dataclass
class Account:
    """`saved` pays for looks at a drafter that is not in use, `credit` for drafts that look worth it; those may use up
    what is saved as well, so that drafts come back at full length soon after a look that was right."""

    credit: float = 0.0
    saved: float = 0.0
    owed: float = 0.0  # credit that was lost and not won back: until then saving goes on at the ordinary rate
    is_open: bool = False

    @property
    def total(self) -> float:
        return self.credit + self.saved

    def open(self, cost: float, is_tried: bool = False) -> None:
        """The first credit, as soon as it is known what drafts cost (in plain steps). is_tried: a step of this cost was
        taken before anything was known."""
        if not self.is_open and 0.0 < cost < inf:
            self.credit, self.is_open = min(1.0 + 1.5 * (cost - 1.0), MOST_AT_START), True
            self.owed = cost - 1.0 if is_tried else 0.0

    def new_streams(self, share: float) -> None:
        """Some of the streams are new: this share of all."""
        if self.is_open:
            self.saved = min(self.saved + EARN_NEW * share, MOST_SAVED)
            self.owed += EARN_NEW * share

    def affords_look(self, loss: float, staked: float) -> bool:
        """Whether a look that loses this much can be paid, beside one under way."""
        whole = min((1.0 + RESERVE) * loss, max(loss, MOST_SAVED))
        return loss <= self.saved - staked and whole <= self.total - staked

    def plain(self, look: float) -> None:
        """A plain step was taken; look: what the next look would lose."""
        earned = min(max(EARN, look / LOOK_EVERY), EARN_MOST) if look <= DEAR else EARN
        if self.owed > 0.0:
            self.owed -= earned - EARN
            earned = EARN
        self.saved = min(self.saved + earned, MOST_SAVED)

    def look(self, loss: float, won: float) -> None:
        """A look cost this much and won this many tokens a stream."""
        self.saved = max(self.saved - loss, -MOST_SAVED)
        self.credit = min(self.credit + won, MOST_CREDIT)

    def draft(self, gain: float) -> None:
        """A step with drafts came to this many plain steps more or less."""
        lost = min(max(-gain, 0.0), max(self.credit, 0.0))
        self.owed = min(max(self.owed + lost - max(gain, 0.0), 0.0), MOST_CREDIT)
        self.credit = min(self.credit + gain, MOST_CREDIT)
        if self.credit < 0.0:
            self.saved, self.credit = max(self.saved + self.credit, -MOST_SAVED), 0.0

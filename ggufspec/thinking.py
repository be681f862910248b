"""A limit on thinking: count tokens between the marks around thoughts, then force the end mark.

    idle -> (start mark) -> counting -> (budget used up, no character cut) -> forcing -> done
                                \\-> (end mark by itself) -> done

Source of the rule: llama.cpp's reasoning budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Tokens = tuple[int, ...]
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class ThinkingBudget:
    """What one request allows. Marks are token sequences; `forced` ends the thoughts (message, then end
    mark).
    """

    n_tokens: int
    start: Tokens
    ends: tuple[Tokens, ...]
    forced: Tokens
    opened: bool = False  # the prompt has already written the start mark


def thinking_budget(
    encode: Encode, n_tokens: int, tags: tuple[str, str], message: str = "", generation_prompt: str = ""
) -> ThinkingBudget:
    """The budget of a template with `tags` around thoughts. `generation_prompt`: the prompt's end that
    opens the answer.

    `encode` gives the tokens of a text, special tokens parsed, nothing added.
    """
    start, end = tags
    at = generation_prompt.rfind(start)
    return ThinkingBudget(
        n_tokens=n_tokens,
        start=tuple(encode(start)),
        ends=tuple(tuple(encode(text)) for text in (f"\n{end}", end, "<tool_call>")),
        forced=(*encode(message), *encode(f"\n{end}")),
        opened=at >= 0 and end not in generation_prompt[at:],
    )


@dataclass(frozen=True)
class BudgetState:
    """One stream's place; immutable, so that rows of a draft each have their own."""

    budget: ThinkingBudget
    phase: Literal["idle", "counting", "forcing", "done"]
    left: int = 0  # tokens that may still be thought
    n_forced: int = 0
    recent: Tokens = ()  # enough tokens to see a mark
    tail: bytes = b""  # the text's last bytes, to see a cut character

    @classmethod
    def start(cls, budget: ThinkingBudget) -> BudgetState:
        return cls(budget, "idle")._counting() if budget.opened else cls(budget, "idle")

    @property
    def forced(self) -> int | None:
        """The only token allowed next, None while nothing is forced."""
        return self.budget.forced[self.n_forced] if self.phase == "forcing" else None

    def push(self, token: int, piece: bytes) -> BudgetState:
        """The state after a token that stands."""
        if self.phase == "done":
            return self
        if self.phase == "forcing":
            n = self.n_forced + 1
            phase: Literal["forcing", "done"] = "done" if n == len(self.budget.forced) else "forcing"
            return BudgetState(self.budget, phase, 0, n)
        longest = max(map(len, (self.budget.start, *self.budget.ends)))
        recent, tail = (*self.recent, token)[-longest:], (self.tail + piece)[-4:]
        moved = BudgetState(self.budget, self.phase, self.left, 0, recent, tail)
        if self.phase == "idle":
            return moved._counting() if _ends_with(recent, self.budget.start) else moved
        if any(_ends_with(recent, end) for end in self.budget.ends):
            return BudgetState(self.budget, "done")
        left = self.left - 1
        if left <= 0 and not cuts_character(tail):
            return BudgetState(self.budget, "forcing")
        return BudgetState(self.budget, "counting", left, 0, recent, tail)

    def _counting(self) -> BudgetState:
        n = self.budget.n_tokens
        return BudgetState(self.budget, "counting", n) if n > 0 else BudgetState(self.budget, "forcing")


def _ends_with(tokens: Tokens, mark: Tokens) -> bool:
    return bool(mark) and tokens[-len(mark) :] == mark


def cuts_character(tail: bytes) -> bool:
    """Whether text that ends in these bytes (its last four, or all) ends inside a UTF-8 character."""
    for back in range(1, min(4, len(tail)) + 1):
        byte = tail[-back]
        if byte >= 0xC0:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False

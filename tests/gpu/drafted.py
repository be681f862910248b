"""The parts of `measure.py` that draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from crowd import Crowd, Window, expected_length
from session import Data, Said, Session, Table

from ggufspec.adaptive import adaptive_for
from ggufspec.tools.bench import spec_table
from ggufspec.tools.bench.attach import free
from ggufspec.tools.bench.spec import Results, measure

PUBLISHED = ("dflash2,n=7,synth-len=3.955", "dspark,n=7,synth-len=3.762", "mtp,n=1,synth-len=1.792",
             "mtp,n=3,synth-len=2.6")  # fmt: skip
SWEEP = {"mtp": 8, "dspark": 8, "dflash2": 8}  # draft lengths from 1 on, as far as the drafter goes
ACCEPTANCE = {"dflash2": "synth-len=3.955", "dspark": "synth-len=3.762", "mtp": "synth-p=0.792"}
KINDS = {"code": 0.9, "json": 0.6, "prose": 0.15}  # chance of each drafted token if all before it are right
SHORT = ("drafter", "n", "temp", "workload", "len", "acc %", "draft ms", "verify ms", "host ms", "plain ms/t",
         "ms/token", "decode x", "wall x", "t/s", "parity")  # fmt: skip


def spec(session: Session, data: Data) -> Iterator[Said]:
    """`bench spec` at the published lengths, each drafter in turn with plain decoding."""
    yield from compared(session, data, PUBLISHED)


def split(session: Session, data: Data) -> Iterator[Said]:
    """Where a step of each drafter goes: draft and verification in parts."""
    yield from compared(session, data, PUBLISHED[:3], split=True, n_tokens=session.size(32, 12), n_repetitions=1)


def tiny(session: Session, data: Data) -> Iterator[Said]:
    """The trained family: real acceptance, greedy and sampled streams equal to plain ones."""
    own = Session(session.options, is_bundled=True)
    fixed = ("dflash2", "dspark", "mtp,n=1", "mtp")
    drafters = fixed if session.is_smoke else (*fixed, "dflash2,n=auto", "dspark,n=auto", "mtp,n=auto")
    yield from compared(
        own, data, drafters, workloads=["code", "json", "prose"], n_prompts=session.size(2, 1),
        n_tokens=session.size(128, 12), temperatures=[0.0] if session.is_smoke else [0.0, 1.0], n_repetitions=1,
    )  # fmt: skip


def compared(session: Session, data: Data, drafters: Sequence[str], split: bool = False, **how: Any) -> Iterator[Said]:
    """One drafter after another; the table grows."""
    results = Results()
    bench = session.bench(1, 768)
    plain = bench.engine(None, ignore_eos=True)
    for text in drafters:
        plan = session.plan(bench, [text], **how)
        found = measure(bench, plan, split=split, show_progress=False, plain=plain)
        for all_of, new in ((results.cells, found.cells), (results.parity, found.parity), (results.split, found.split)):
            all_of.extend(new)
        data.update(origin=session.facts(), n_tokens=plan.n_tokens, repetitions=plan.n_repetitions, seed=1)
        data.update(results.as_dict())
        yield spec_table.text(found)
        if not split:
            rows = [dict(zip(spec_table.HEADS, spec_table.row(cell))) for cell in results.cells]
            yield Table("Drafters in turn with plain decoding", SHORT, [[row[h] for h in SHORT] for row in rows])
    if split:
        parts = [
            [s["drafter"], str(s["n_max"]), phase, f"{sum(s[phase].values()):.3f}",
             ", ".join(f"{k} {v:.3f}" for k, v in sorted(s[phase].items(), key=lambda i: -i[1]) if v >= 0.0005)]
            for s in results.split for phase in ("draft", "verify")
        ]  # fmt: skip
        yield Table("One step in parts, ms of kernels", ("drafter", "n", "phase", "ms", "of which"), parts)
    differing = [c for c in results.cells if spec_table.is_difference(c.parity)]
    differing += [p for p in results.parity if p["result"] != "equal"]
    if differing:
        raise AssertionError(f"{len(differing)} drafted streams differ from plain ones")


def repeat(session: Session, data: Data) -> Iterator[Said]:
    """The same short measurement twice: medians must agree within 3 %."""
    bench = session.bench(1, 768)
    plain = bench.engine(None, ignore_eos=True)
    runs = data["runs"] = []
    rows: list[list[str]] = []
    for text in ("dspark,n=7,synth-len=3.762", "mtp,n=1,synth-len=1.792"):
        plan = session.plan(bench, [text], n_repetitions=session.size(3, 1), n_tokens=session.size(128, 12))
        a, b = (measure(bench, plan, show_progress=False, plain=plain).cells[0] for _ in range(2))
        runs.append([a.as_dict(), b.as_dict()])
        for key in ("plain_ms_per_token", "ms_per_token", "draft_ms", "verify_ms", "decode_speedup"):
            x, y = getattr(a, key).median, getattr(b, key).median
            rows.append([a.drafter, key, f"{x:.3f}", f"{y:.3f}", f"{100 * (y / x - 1):+.2f} %"])
        yield Table("The same twice", ("drafter", "median", "first", "second", "difference"), rows)


# -- live streams ----------------------------------------------------------------------------------------------------


def sweep(session: Session, data: Data) -> Iterator[Said]:
    """Draft lengths 1 to 8 at the published acceptance, every length in turn with plain decoding."""
    n_steps, n_plain = session.size(128, 3), session.size(32, 2)
    bench = session.bench(1, session.size(2048, 512))
    plain = Crowd(bench.engine(None, ignore_eos=True))
    plain.grow(1)
    rows: list[list[str]] = []
    data["rows"] = found = []
    for name, longest in SWEEP.items():
        choice = session.drafter(f"{name},{ACCEPTANCE[name]}")
        drafter = bench.load_drafter(choice, longest)
        crowd = Crowd(bench.engine(drafter, ignore_eos=True))
        rates = choice.rates(crowd.most)
        crowd.grow(1)
        for n in range(1, min(longest, crowd.most) + 1):
            crowd.use(n, rates)
            plain.rewind()
            without, window = plain.run(n_plain), crowd.run(n_steps)
            found.append(window_row(name, n, rates, without, window))
            rows.append(sweep_row(found[-1]))
            yield Table(SWEEP_TITLE, SWEEP_HEADS, rows)
        crowd.end()
        del crowd, drafter
        free()


SWEEP_TITLE = "Draft lengths at the published acceptance; rates are of the lengths asked for, drawn ones beside them"
SWEEP_HEADS = ("drafter", "n", "length", "drawn", "draft ms", "verify ms", "sample ms", "step ms", "plain ms",
               "ms/token", "decode x", "tok/s", "drawn tok/s")  # fmt: skip


def window_row(name: str, n: int, rates: Sequence[float], plain: Window, window: Window) -> dict[str, Any]:
    return {
        "drafter": name, "n": n, "length": expected_length(rates, n), "drawn": window.drawn_length,
        "draft_ms": window.draft_ms, "verify_ms": window.verify_ms, "sample_ms": window.sample_ms,
        "step_ms": window.step_ms, "plain_ms": plain.step_ms, "ms_per_token": window.step_ms / window.length(rates),
        "decode_x": window.rate(rates) / plain.drawn_rate, "rate": window.rate(rates), "drawn_rate": window.drawn_rate,
        "n_steps": window.n_steps,
    }  # fmt: skip


def sweep_row(row: dict[str, Any]) -> list[str]:
    digits = {"length": 3, "drawn": 3, "draft_ms": 2, "verify_ms": 2, "sample_ms": 2, "step_ms": 2, "plain_ms": 2,
              "ms_per_token": 2, "decode_x": 2, "rate": 1, "drawn_rate": 1}  # fmt: skip
    return [row["drafter"], str(row["n"]), *(f"{row[key]:.{d}f}" for key, d in digits.items())]


def adaptive(session: Session, data: Data) -> Iterator[Said]:
    """`auto` against every fixed length: code-like, JSON-like, prose-like acceptance, 1, 12 and 24 streams.

    Everything twice, the second time in the opposite order, from equally full caches. "at first": the steps right after
    the change to this kind of text, whose acceptance nobody has told the policy.
    """
    crowds = {1: (2, 1, 3), 3: (2, 1, 2)} if session.is_smoke else {1: (32, 32, 64), 12: (16, 16, 96), 24: (12, 12, 64)}
    kinds = {"code": 0.9, "prose": 0.15} if session.is_smoke else KINDS
    bench = session.bench(max(crowds), 1024)
    rows: list[list[str]] = []
    data["rows"] = found = []
    for name in session.options.drafters.split(","):
        drafter = bench.load_drafter(session.drafter(name), 7)
        plain, crowd = (Crowd(bench.engine(d, ignore_eos=True)) for d in (None, drafter))
        policy = adaptive_for(drafter)
        lengths = list(range(crowd.most + 1))
        lengths = lengths[:: crowd.most] if session.is_smoke else lengths
        for n_streams, (n_fixed, n_first, n_auto) in crowds.items():
            plain.grow(n_streams)
            crowd.grow(n_streams)
            crowd.use(None, [0.5 ** (i + 1) for i in range(crowd.most)], policy)
            crowd.take_times()
            for kind, chance in kinds.items():
                rates = [chance ** (i + 1) for i in range(crowd.most)]
                cells: dict[str, Window] = {}
                for order in (lengths, lengths[::-1]):
                    plain.rewind()
                    add(cells, "plain", plain.run(n_fixed))
                    for n in order:
                        crowd.use(n, rates)
                        add(cells, f"n={n}", crowd.run(n_fixed))
                    policy.forget_texts()
                    crowd.use(None, rates, policy)
                    add(cells, "at first", crowd.run(n_first, 0))
                    add(cells, "auto", crowd.run(n_auto, 0))
                found.append(adaptive_cell(name, kind, rates, cells))
                rows.append(adaptive_row(found[-1]))
                yield Table(ADAPTIVE_TITLE, (*ADAPTIVE_HEADS, *(f"n={n}" for n in lengths), *ADAPTIVE_LAST), rows)
        plain.end()
        crowd.end()
        del plain, crowd, drafter
        free()


ADAPTIVE_TITLE = "Tokens a second of all streams together, at the acceptance asked for"
ADAPTIVE_HEADS = ("drafter", "streams", "acceptance", "plain")
ADAPTIVE_LAST = ("auto", "drafted", "at first", "auto / plain", "auto / best fixed", "best")


def add(cells: dict[str, Window], name: str, window: Window) -> None:
    cells[name] = cells[name].joined(window) if name in cells else window


def adaptive_cell(name: str, kind: str, rates: Sequence[float], cells: dict[str, Window]) -> dict[str, Any]:
    """The figures of one number of streams and one kind of text. Fixed lengths are the cells `n=..` and `plain`."""
    speeds = {cell: window.rate(rates) for cell, window in cells.items()}
    best = max((cell for cell in cells if cell not in ("auto", "at first")), key=lambda cell: speeds[cell])
    return {
        "drafter": name, "streams": cells["auto"].n_streams, "acceptance": kind, "rates": list(rates), "rate": speeds,
        "drawn_rate": {cell: window.drawn_rate for cell, window in cells.items()},
        "step_ms": {cell: window.step_ms for cell, window in cells.items()},
        "widths": {cell: window.widths for cell, window in cells.items()},
        "drafted": cells["auto"].drafted, "of_plain": speeds["auto"] / speeds["plain"],
        "of_best": speeds["auto"] / speeds[best], "best": best,
    }  # fmt: skip


def adaptive_row(found: dict[str, Any]) -> list[str]:
    speeds = found["rate"]
    fixed = [f"{speed:.0f}" for cell, speed in sorted(speeds.items()) if cell.startswith("n=")]
    return [
        found["drafter"], str(found["streams"]), f"{found['acceptance']} {found['rates'][0]:g}",
        f"{speeds['plain']:.0f}", *fixed, f"{speeds['auto']:.0f}", f"{found['drafted']:.1f}",
        f"{speeds['at first']:.0f}", f"{found['of_plain']:.3f}", f"{found['of_best']:.3f}", found["best"],
    ]  # fmt: skip

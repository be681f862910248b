"""Deterministic text with everything a tokenizer can trip over: code, JSON, prose, emoji, CJK, odd Unicode."""

import json
import random
from collections.abc import Callable

_WORDS = (
    "the of and a to in is you that it he was for on are as with his they I at be this have from or one had by word "
    "but not what all were we when your can said there use an each which she do how their if will up other about out "
    "many then them these so some her would make like him into time has look two more write go see number no way "
    "could people my than first water been call who oil its now find long down day did get come made may part "
    "don't it's I'm we've they'll he'd CAN'T İstanbul straße naïve façade coöperate Zürich œuvre Ångström"
).split()
_IDENTIFIERS = "self index value count result buffer node parse_header toString HTTPServer __init__ x1 i18n".split()
_SCRIPTS = [  # ranges of assigned letters, marks, digits and signs
    (0x00A0, 0x024F), (0x0300, 0x036F), (0x0370, 0x03FF), (0x0400, 0x04FF), (0x0530, 0x058F), (0x0590, 0x05FF),
    (0x0600, 0x06FF), (0x0900, 0x097F), (0x0980, 0x09FF), (0x0B80, 0x0BFF), (0x0E00, 0x0E7F), (0x0F00, 0x0FFF),
    (0x1000, 0x109F), (0x10A0, 0x10FF), (0x1100, 0x11FF), (0x1780, 0x17FF), (0x1E00, 0x1FFF), (0x2000, 0x206F),
    (0x2070, 0x209F), (0x20A0, 0x20CF), (0x2100, 0x218F), (0x2190, 0x22FF), (0x2460, 0x24FF), (0x2500, 0x27BF),
    (0x3000, 0x30FF), (0x3400, 0x3500), (0x4E00, 0x9FA5), (0xA000, 0xA4CF), (0xAC00, 0xD7A3), (0xE000, 0xE0FF),
    (0xFB00, 0xFDFF), (0xFE00, 0xFEFF), (0xFF00, 0xFFFF), (0x10330, 0x1034F), (0x1D400, 0x1D7FF),
    (0x1F300, 0x1FAFF), (0x20000, 0x20100), (0xE0100, 0xE01EF),
]  # fmt: skip
_EMOJI = ["😀", "👩🏽‍💻", "👨‍👩‍👧‍👦", "🇩🇪", "❤️", "🏳️‍🌈", "1️⃣", "🫠", "☕", "🤷🏿‍♀️"]
_BLANKS = [" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", " \n", "\n ", "\u00a0", "\u2003", "\u3000", "\u0085",
           "\u2028", "\x0b", "\x0c", " " * 17, "\t\t\t", "\n" * 5, " \t \n \t"]  # fmt: skip


def _prose(rng: random.Random) -> str:
    words = [rng.choice(_WORDS) for _ in range(rng.randint(5, 25))]
    return " ".join(words).capitalize() + rng.choice([".", "!", "?!", "...", " -- ", ";\n", '."\n\n', ",'"]) + " "


def _code(rng: random.Random) -> str:
    lines = []
    for _ in range(rng.randint(2, 8)):
        name, other = rng.choice(_IDENTIFIERS), rng.choice(_IDENTIFIERS)
        lines.append(rng.choice(["    ", "\t", "", "        "]) + rng.choice([
            f"def {name}({other}: int = {rng.randint(0, 99999)}) -> None:",
            f"if ({name} != {other}) {{ return {name}[{rng.random():.6f}]; }} // don't",
            f"{name} += {other}->field & 0x{rng.getrandbits(32):08x};",
            f'printf("%s\\n", {name}); /* {rng.choice(_WORDS)} */',
            f"# {rng.choice(_WORDS)}'s {rng.choice(_WORDS)}",
            f"<div class='{name}'>{other}&nbsp;</div>",
        ]))  # fmt: skip
    return rng.choice(["\n", "\r\n"]).join(lines) + "\n"


def _json(rng: random.Random) -> str:
    value = {rng.choice(_IDENTIFIERS): rng.choice([rng.randint(-(10**12), 10**12), rng.random(), None, True,
             [rng.choice(_WORDS)] * 3, {"é": "\u2028"}, rng.choice(_EMOJI)]) for _ in range(5)}  # fmt: skip
    return json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 2, 4])) + "\n"


def _script(rng: random.Random) -> str:
    low, high = rng.choice(_SCRIPTS)
    blanks = rng.choice(["", " "])
    return blanks.join(chr(rng.randint(low, high)) for _ in range(rng.randint(3, 20))) + rng.choice(["", " ", "。"])


def _anything(rng: random.Random) -> str:
    points = (rng.choice([rng.randrange(0x110000), rng.randrange(0x3000), rng.randrange(0x20000)]) for _ in range(12))
    return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)


def _control(rng: random.Random) -> str:
    return "".join(chr(rng.choice([*range(32), 127, *range(128, 160)])) for _ in range(rng.randint(1, 6)))


def _marks(rng: random.Random) -> str:
    return "".join(rng.choice("aeounAEOं") + "".join(chr(rng.randint(0x300, 0x36F)) for _ in range(rng.randint(0, 3)))
                   for _ in range(6))  # fmt: skip


def _numbers(rng: random.Random) -> str:
    return rng.choice(["{:d}", "{:,d}", "{:x}", "{:b}"]).format(rng.getrandbits(48)) + rng.choice(["½", "Ⅻ", "٣४", " "])


def _edges(rng: random.Random) -> str:
    pool = ["'S", "'ſ", "'LL", "'re", "’s", "a'", "``", "$^", "~|", "+=", "___", "\ufeff", "\u200b", "\u200d", "▁", "Ġ",
            "<s>", "<0x0A>", "<think>", "</think>", "<|im_end|>", "<|im_start", "<|endoftext|>", "<unk>"]  # fmt: skip
    return "".join(rng.choice(pool) + rng.choice(_BLANKS) * rng.randint(0, 1) for _ in range(8))


_MAKERS: list[Callable[[random.Random], str]] = [
    _prose, _prose, _code, _json, _script, _anything, _control, _marks, _numbers, _edges,
    lambda rng: "".join(rng.choice(_EMOJI) for _ in range(4)),
    lambda rng: "".join(rng.choice(_BLANKS) for _ in range(4)),
]  # fmt: skip


def mixed_text(n_bytes: int, seed: int = 1) -> str:
    """At least `n_bytes` bytes of UTF-8; the same text for the same arguments on every machine."""
    rng = random.Random(seed)
    parts, size = [], 0
    while size < n_bytes:
        parts.append(rng.choice(_MAKERS)(rng))
        size += len(parts[-1].encode())
    return "".join(parts)


def every_character() -> str:
    """Each assigned code point, after a letter, a blank and a digit, which it may join or not."""
    points = (chr(point) for point in [*range(0xD800), *range(0xE000, 0x32400), *range(0xE0000, 0xE0200)])
    return "".join(f"a{point} {point}1{point}\n" for point in points)

"""DRY's parts: breakers as tokens, how far a repetition reaches, match lengths, penalties."""

import random

import pytest

from ggufspec.sampling.dry import Breakers, dry_penalties, find_breakers, match_lengths, repetition_limit

NONE = Breakers({})


def tokenize(text):
    return [ord(c) for c in text]


def test_breakers_as_heads_and_tails():
    pieces = [b"x", b"a:b", b"end", b"e", b"n", b"xe", b"nden", b"en"]
    assert find_breakers([":"], pieces, tokenize).tails == {1: ((),)}
    found = find_breakers(["end"], pieces, tokenize).tails
    assert found == {
        2: ((),),
        3: (tuple(b"nd"),),  # "e", then "nd" must follow
        5: (tuple(b"nd"),),
        6: (tuple(b"d"),),  # "nden" ends with "en"
        7: (tuple(b"d"),),
    }
    assert find_breakers(["end" * 30], [b"e"], tokenize).tails[0][0] == tuple(b"ndendendendendendend")
    assert find_breakers(["aab"], [b"aa"], tokenize).tails == {0: (tuple(b"b"), tuple(b"ab"))}
    assert find_breakers([], pieces, tokenize).tails == {}


def test_breakers_are_found_in_every_text():
    draw = random.Random(3)
    pieces = [bytes(draw.choices(b"ab\n", k=draw.randrange(6))) for _ in range(300)]
    found = find_breakers(["ab", "b\nb", "c"], pieces, tokenize).tails
    for token, piece in enumerate(pieces):
        expected = set()
        for text in (b"ab", b"b\nb"):
            if text in piece:
                expected.add(())
            else:
                expected |= {tuple(text[n:]) for n in range(1, len(text)) if piece.endswith(text[:n])}
        assert set(found.get(token, ())) == expected


def test_limit_is_the_distance_to_the_latest_breaker():
    breakers = Breakers({9: ((),), 8: ((7,),)})
    assert repetition_limit([1, 2, 3], breakers) == 3
    assert repetition_limit([1, 2, 9, 3], breakers) == 2
    assert repetition_limit([9, 2], breakers) == 0
    assert repetition_limit([1, 7, 8, 9], breakers) == 1  # 8 then 7, oldest first: a two-token breaker
    assert repetition_limit([8, 7, 1, 9], breakers) == 3  # 8 without 7 after it is none


def test_match_lengths_against_brute_force():
    rng = random.Random(0)
    for _ in range(300):
        s = [rng.randrange(3) for _ in range(rng.randint(1, 40))]
        for k, got in enumerate(match_lengths(s)):
            length = 0
            while k and k + length < len(s) and s[length] == s[k + length]:
                length += 1
            assert got == length


def test_penalty_grows_with_the_repetition():
    #         a b c d | a b c  -> d continues a repetition of 3
    assert dry_penalties([1, 2, 3, 4, 1, 2, 3], 0.5, 2.0, 2, NONE) == {4: 0.5 * 2.0**1}
    assert dry_penalties([1, 2, 3, 4, 1, 2, 3], 0.5, 2.0, 3, NONE) == {4: 0.5}
    assert dry_penalties([1, 2, 3, 4, 1, 2, 3], 0.5, 2.0, 4, NONE) == {}
    assert dry_penalties([1, 2, 3, 4, 1, 2, 3], 0.5, 2.0, 2, Breakers({4: ((),)})) == {}
    assert dry_penalties([1, 2, 3, 4, 1, 2, 3], 0.5, 2.0, 2, Breakers({2: ((),)})) == {}
    assert dry_penalties([5, 5], 0.5, 2.0, 2, NONE) == {}


def test_huge_exponents_stay_finite():
    penalty = dry_penalties([5] * 4000, 1.0, 1.75, 2, NONE)[5]
    assert penalty == pytest.approx(1.75**158) and penalty < 3.4e38

"""What several processes say of one thing, compared: the first that differs, and in what."""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping

Facts = Mapping[str, str]


def differing(said: Mapping[int, Facts]) -> tuple[int, int, str] | None:
    """The lowest rank that differs from most (from rank 0 where no side has more), a rank that it differs from, and the
    first fact that they differ in; None when all say the same."""
    whole = {rank: json.dumps(facts, sort_keys=True) for rank, facts in said.items()}
    votes = collections.Counter(whole.values())
    lowest = min(said)
    usual = max(votes, key=lambda text: (votes[text], text == whole[lowest]))
    rank = next((rank for rank in sorted(said) if whole[rank] != usual), None)
    if rank is None:
        return None
    other = next(each for each in sorted(said) if whole[each] == usual)
    mine, theirs = said[rank], said[other]
    fact = next(name for name in [*theirs, *mine] if mine.get(name) != theirs.get(name))
    return rank, other, fact


def in_words(topic: str, said: Mapping[int, Facts]) -> str | None:
    """`rank 2 has another configuration than rank 0: jshard.train.batch is 32, and 64 at rank 0`, or None."""
    found = differing(said)
    if found is None:
        return None
    rank, other, fact = found
    mine, theirs = said[rank].get(fact), said[other].get(fact)
    has = "is not there" if mine is None else f"is {mine}"
    had = "not there" if theirs is None else theirs
    return f"rank {rank} has another {topic} than rank {other}: {fact} {has}, and {had} at rank {other}"

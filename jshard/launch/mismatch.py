"""What several processes say of one thing, compared: the first that differs, and in what."""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping

Facts = Mapping[str, str]


def in_words(topic: str, by_rank: Mapping[int, Facts]) -> str | None:
    """Name the lowest rank that differs from most (from rank 0 where no side has more), and the first fact: `rank 2 has another
    configuration than rank 0: jshard.train.batch is 32, and 64 at rank 0`. Return None when all say the same."""
    texts = {rank: json.dumps(facts, sort_keys=True) for rank, facts in by_rank.items()}
    votes = collections.Counter(texts.values())
    lowest = min(by_rank)
    usual = max(votes, key=lambda text: (votes[text], text == texts[lowest]))
    rank = next((rank for rank in sorted(by_rank) if texts[rank] != usual), None)
    if rank is None:
        return None
    other = next(each for each in sorted(by_rank) if texts[each] == usual)
    mine, theirs = by_rank[rank], by_rank[other]
    fact = next(name for name in [*theirs, *mine] if mine.get(name) != theirs.get(name))
    has = f"is {mine[fact]}" if mine.get(fact) is not None else "is not there"
    had = theirs[fact] if theirs.get(fact) is not None else "not there"
    return f"rank {rank} has another {topic} than rank {other}: {fact} {has}, and {had} at rank {other}"

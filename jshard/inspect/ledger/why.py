"""Why a parameter lies as it does, and why an equation is split as it is: what claims and plans say, in words."""

from __future__ import annotations

import collections
import difflib
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from jshard.errors import JShardError, quoted
from jshard.inspect.ledger.claimed import Claimed
from jshard.layers.partition import Program
from jshard.layers.partition.plan import Step, steps
from jshard.layouts.redistribution import Axes
from jshard.programs.provenance import source_of

LINE = re.compile(r"[^:]+:\d+")


def why(claims: Sequence[Claimed], programs: Sequence[Program], word: str) -> str:
    """Say why the parameters of a path or glob lie as they do, or how each equation of a source line runs."""
    rows = _of_line(programs, word) if LINE.fullmatch(word) else _of_parameters(claims, word)
    if not rows:
        lines = {source_of(eqn) for program in programs for eqn, _ in steps(program.jaxpr, program.plan)}
        known = sorted(lines - {""}) if LINE.fullmatch(word) else [row.parameter for row in claims]
        near = difflib.get_close_matches(word, known, 3, 0) or known[:3]
        what = "a source line of an equation" if LINE.fullmatch(word) else "a claimed parameter"
        raise JShardError(
            f"{quoted(word)} is not {what} of this program",
            hint=f"write one of {', '.join(near)}" if near else "name a model that signals claim",
        )
    return "\n".join(rows)


def _of_parameters(claims: Sequence[Claimed], word: str) -> list[str]:
    fits = lambda row: any(
        fnmatchcase(*pair) for pair in ((row, word), (row, f"*/{word}"), (word, row), (word, f"*/{row}"))
    )
    return [line for row in claims if fits(row.parameter) for line in _of_parameter(row)]


def _of_parameter(row: Claimed) -> Iterator[str]:
    times = f" x {row.count}" if row.count >= 2 else ""
    yield f"{row.parameter}{times}, {row.array}, claimed by {row.signal} ({row.place or '-'}: {row.says})"
    told = f"; told by its first use, {row.told_by}" if row.told_by else ""
    if any(row.in_use):
        yield f"  split over {_axes(row.in_use)}{told}"
    else:
        yield f"  replicated in use{told}"
    if row.at_rest != row.in_use:
        yield f"  at rest split over {_axes(row.at_rest)}, and gathered for its use"
    if row.differs:
        yield f"  {row.differs}"


def _axes(words: Sequence[str]) -> str:
    return ", ".join(f"{names} (axis {axis})" for axis, names in enumerate(words) if names)


def _of_line(programs: Sequence[Program], word: str) -> list[str]:
    rows: collections.Counter[str] = collections.Counter()
    for program in programs:
        for eqn, step in steps(program.jaxpr, program.plan):
            if f"/{source_of(eqn)}".endswith(f"/{word}"):
                rows[_of_equation(eqn.primitive.name, step)] += 1
    return [f"{row}  x {count}" if count >= 2 else row for row, count in rows.items()]


def _of_equation(name: str, step: Step) -> str:
    left = {name for axes in step.results for names in axes for name in names}
    summed = [name for names in step.choice.values() for name in names if name not in left]
    said = [step.reason, *(f"moves {_lies(source)} to {_lies(target)}" for source, target in step.moves)]
    said += [f"summed over {', '.join(summed)}"] * bool(summed)
    said += [f"its sum scattered over {', '.join(step.scattered)}"] * bool(step.scattered)
    return f"{name} {', '.join(map(_lies, step.operands))} -> {', '.join(map(_lies, step.results))}: {'; '.join(said)}"


def _lies(axes: Axes) -> str:
    return f"[{', '.join('+'.join(names) or '-' for names in axes)}]"

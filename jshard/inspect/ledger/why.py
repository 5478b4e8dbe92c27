"""Reasons, in words: the layout of a parameter and the split of an equation, from claims and plans."""

from __future__ import annotations

import collections
import difflib
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from jshard.errors import JShardError, quoted
from jshard.inspect.ledger.claimed import Claimed
from jshard.layers.partition import Program
from jshard.layers.partition.plan import AT_REST, CALL, PUT_OFF, WHOLE, Step, steps
from jshard.layouts.redistribution import Axes
from jshard.programs.provenance import source_of

LINE = re.compile(r"[^:]+:\d+")
REASONS = {
    CALL: "a call", PUT_OFF: "created where it is used, split as that use needs", AT_REST: "a parameter, kept as it is at rest",
    WHOLE: "no rule for it: runs on whole arrays",
}  # fmt: skip


def why(claims: Sequence[Claimed], programs: Sequence[Program], word: str) -> str:
    """Return the reasons for the layout of parameters (a path or glob) or for the split of a source line."""
    if LINE.fullmatch(word):
        what, planned = "a source line of an equation", list(_planned(programs, word))
        rows, known = _of_line(planned, word), sorted({line for line, *_ in planned if line})
    else:
        what, known, rows = "a claimed parameter", [row.parameter for row in claims], _of_parameters(claims, word)
    if not rows:
        near = difflib.get_close_matches(word, known, 3, 0) or known[:3]
        raise JShardError(
            f"{quoted(word)} is not {what} of this program",
            hint=f"write one of {', '.join(near)}" if near else "name a model that signals claim",
        )
    return "\n".join(rows)


def _planned(programs: Sequence[Program], word: str) -> Iterator[tuple[str, str, Step]]:
    """Yield the source line, the name and the step of each equation."""
    for program in programs:
        if not program.plan:
            raise JShardError(
                f"axis_types: auto leaves the equations of {quoted(word)} to XLA, so jshard does not know how they are split",
                hint="write axis_types: explicit under jshard, or name a parameter",
            )
        yield from ((source_of(eqn), eqn.primitive.name, step) for eqn, step in steps(program.jaxpr, program.plan))


def _of_parameters(claims: Sequence[Claimed], word: str) -> list[str]:
    fits = lambda row: any(
        fnmatchcase(*pair) for pair in ((row, word), (row, f"*/{word}"), (word, row), (word, f"*/{row}"))
    )
    return [line for row in claims if fits(row.parameter) for line in _of_parameter(row)]


def _of_parameter(row: Claimed) -> Iterator[str]:
    times = f" x {row.count}" if row.count >= 2 else ""
    yield f"{row.parameter}{times}, {row.array}, claimed by {row.signal} ({row.place or '-'}: {row.says})"
    in_use = f"split over {_axes(row.in_use)}" if any(row.in_use) else "replicated in use"
    yield f"  {in_use}" + (f"; first used by {row.told_by}" if row.told_by else "")
    if row.at_rest != row.in_use:
        yield f"  at rest split over {_axes(row.at_rest)}, and gathered for use"
    if row.differs:
        yield f"  {row.differs}"


def _axes(words: Sequence[str]) -> str:
    return ", ".join(f"{names} (axis {axis})" for axis, names in enumerate(words) if names)


def _of_line(planned: Sequence[tuple[str, str, Step]], word: str) -> list[str]:
    fits = [_of_equation(name, step) for line, name, step in planned if f"/{line}".endswith(f"/{word}")]
    return [f"{row}  x {count}" if count >= 2 else row for row, count in collections.Counter(fits).items()]


def _of_equation(name: str, step: Step) -> str:
    left = {name for axes in step.results for names in axes for name in names}
    summed = [name for names in step.choice.values() for name in names if name not in left]
    said = [_reason(step), *(f"moves {_lies(source)} to {_lies(target)}" for source, target in step.moves)]
    said += [f"summed over {', '.join(summed)}"] * bool(summed)
    said += [f"its sum scattered over {', '.join(step.scattered)}"] * bool(step.scattered)
    return f"{name} {', '.join(map(_lies, step.operands))} -> {', '.join(map(_lies, step.results))}: {'; '.join(said)}"


def _reason(step: Step) -> str:
    """Return why an equation is split: by a claimed parameter, as an operand is split, or as its result is used."""
    if step.how in REASONS or step.inside:
        return REASONS.get(step.how, "as the program in it is split")
    said: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for names in step.choice.values() for name in names):
        having = [at for at, axes in enumerate(step.operands) if any(name in names for names in axes)]
        claimed = next((claim for at in having if (claim := step.claims[at]) is not None), None)
        why = f"as operand {having[0]} is split" if having else "as its result is used"
        said.setdefault(why if claimed is None else f"as {claimed} splits its parameter", []).append(name)
    return "; ".join(f"{', '.join(names)} {why}" for why, names in said.items()) or "nothing splits its operands"


def _lies(axes: Axes) -> str:
    return f"[{', '.join('+'.join(names) or '-' for names in axes)}]"

"""`jshard schedule`: pipeline schedules drawn and priced, those with a name or your own tables, side by side."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from jshard.cli.terminal import show, width
from jshard.errors import JShardError, did_you_mean, quoted
from jshard.printing.table import table
from jshard.schedules import KINDS, Cost, Table, Times, generate, load

SUFFIXES = (".svg", ".txt")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jshard schedule [-h] SCHEDULE [SCHEDULE ...] [--stages N] [--microbatches N] [--chunks N] [-o FILE]"
    parser.epilog = "SCHEDULE is the file of a table, or " + "; ".join(
        f"{kind}: {says}" for kind, (says, _) in KINDS.items()
    )
    named = parser.add_argument("schedules", nargs="+", metavar="SCHEDULE", help="a name, or a file")
    named.completes = KINDS  # type: ignore[attr-defined]  # what Tab offers beside files
    parser.add_argument("--stages", type=int, metavar="N", help="stages of the pipeline")
    parser.add_argument("--microbatches", type=int, metavar="N", help="parts of a batch")
    parser.add_argument(
        "--chunks",
        type=int,
        metavar="N",
        help="chunks of layers that each stage has; 1, or 2 of interleaved, unless said",
    )
    parser.add_argument(
        "--times", metavar="F=1,B=1,W=1", help="how long each takes; a B that makes weight gradients too takes B + W"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", action="append", default=[],
        help="also write a picture (.svg), or the table to edit (.txt)",
    )  # fmt: skip


def run(chosen: argparse.Namespace) -> int:
    for name in chosen.output:
        if Path(name).suffix not in SUFFIXES:
            raise JShardError(f"-o {name} has no ending that is known", hint=f"name a file in {', '.join(SUFFIXES)}")
    times = _times(chosen.times or "")
    costs = [Cost(_table(name, chosen), times) for name in chosen.schedules]
    from jshard.schedules.drawing import grid, picture

    for cost in costs:
        print("\n".join([str(cost.table), *grid(cost.table, width()), ""]))
    from jshard.schedules.cost import compared

    show("\n".join(table(compared(costs))))
    for name in chosen.output:
        from jshard.printing.pages.shell import write

        is_picture = Path(name).suffix == ".svg"
        content = picture(costs) if is_picture else "\n".join(cost.table.text() for cost in costs)
        show(f"wrote {write(Path(name), content.encode(), 'the schedule', '-o')}")
    return 0


def _table(name: str, chosen: argparse.Namespace) -> Table:
    """A table by its name or from its file; the numbers that are given hold for it."""
    if name not in KINDS:
        if not Path(name).exists():
            hint = did_you_mean(name, KINDS, f"name a file, or one of {', '.join(KINDS)}")
            raise JShardError(f"{quoted(name)} is no schedule and no file", hint=hint)
        found = load(name)
        has = {
            "stages": found.stages,
            "microbatches": found.microbatches,
            "chunks": found.virtual_stages // found.stages,
        }
        for word, count in has.items():
            said = getattr(chosen, word)
            if said is not None and said != count:
                raise JShardError(
                    f"{name} has {count} {word}, and not {said}", hint=f"leave --{word} away, or write {count}"
                )
        return found
    for word in ("stages", "microbatches", "chunks"):
        said = getattr(chosen, word)
        if said is None and word != "chunks":
            raise JShardError(
                f"jshard schedule {name} needs --{word}",
                hint=f"type: jshard schedule {name} --stages {chosen.stages or 4} --microbatches {chosen.microbatches or 16}",
            )
        if said is not None and said < 1:
            raise JShardError(f"--{word} is {said}", hint="write 1 or more")
    return generate(name, chosen.stages, chosen.microbatches, chosen.chunks)


def _times(text: str) -> Times:
    words = dict(re.findall(r"([FBW])=([0-9]+(?:\.[0-9]+)?)", text))
    times = {slot: float(time) for slot, time in words.items()}
    if ",".join(f"{slot}={time}" for slot, time in words.items()) != text or not all(times.values()):
        raise JShardError(f"--times {quoted(text)} is no list of times above 0", hint="write --times F=1,B=1.2,W=0.8")
    return Times(**times)

"""`jshard schedule`: pipeline schedules, by name or from your tables, drawn and priced side by side."""

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
    named.completes = KINDS  # type: ignore[attr-defined]  # completions beside files
    parser.add_argument("--stages", type=int, metavar="N", help="stages of the pipeline")
    parser.add_argument("--microbatches", type=int, metavar="N", help="parts of a batch")
    parser.add_argument(
        "--chunks",
        type=int,
        metavar="N",
        help="chunks of layers in each stage; default: 1, or 2 for interleaved",
    )
    parser.add_argument(
        "--times", metavar="F=1,B=1,W=1", help="the time of each slot; a B with weight gradients takes B + W"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", action="append", default=[],
        help="also write a picture (.svg), or the table to edit (.txt)",
    )  # fmt: skip


def run(chosen: argparse.Namespace) -> int:
    for name in chosen.output:
        if Path(name).suffix not in SUFFIXES:
            raise JShardError(f"-o {name} has an unknown ending", hint=f"name a file with {' or '.join(SUFFIXES)}")
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
    """Return a table by its name or from its file; the file must agree with the options."""
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
                    f"{name} has {count} {word}, and not {said}", hint=f"remove --{word}, or write {count}"
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

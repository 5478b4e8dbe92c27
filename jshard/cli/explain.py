"""`jshard explain`: the collectives of a training step and the memory between steps, from shapes alone."""

from __future__ import annotations

import argparse

from jshard.cli.target import Target, function_arguments
from jshard.cli.terminal import show

PHASES = ("forward", "backward", "update")
BY = ("signal", "axis", "line")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document, its schema named in it")
    parser.add_argument("--phase", choices=PHASES, help="only the collectives of this phase")
    parser.add_argument("--by", choices=BY, help="sums by signal, mesh axis or YAML line instead of single collectives")
    parser.add_argument(
        "--why",
        metavar="WHAT",
        help="explain the layout of a parameter (path or glob), or the split of a line (model.py:31)",
    )
    parser.add_argument(
        "--program",
        action="store_true",
        help="print the compiled program (on pretend devices if needed), without names",
    )
    function_arguments(parser)


def run(chosen: argparse.Namespace) -> int:
    from jshard.cli.experiment import names_workers, opened, sketched

    target = Target.of(chosen)
    if chosen.program:
        from jshard.inspect.compiled.program_text import normalised
        from jshard.layers.user_code_errors import as_user_error

        configuration = target.configuration()
        with as_user_error("it is compiled"):
            only_shapes = configuration.mesh is not None and not names_workers(configuration)
            print(normalised(opened(target, only_shapes=only_shapes).lowered().compile()))
        return 0
    with sketched(target) as program:
        ledger = program.explain()
    if chosen.why is not None:
        show(ledger.why(chosen.why))
        return 0
    if chosen.phase is not None:
        ledger = ledger.only(phase=chosen.phase)
    if chosen.json:
        print(ledger.to_json())
    else:
        show(str(ledger) if chosen.by is None else ledger.text_by(chosen.by))
    return 0

"""`jshard explain`: every collective of a training step, and what is held between steps, from shapes alone."""

from __future__ import annotations

import argparse

from jshard.cli.target import Target, function_arguments
from jshard.cli.terminal import show

PHASES = ("forward", "backward", "update")
BY = ("signal", "axis", "line")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document, its schema named in it")
    parser.add_argument("--phase", choices=PHASES, help="only what this part of the step asks for")
    parser.add_argument("--by", choices=BY, help="sums by signal, mesh axis or YAML line instead of every collective")
    parser.add_argument(
        "--why",
        metavar="WHAT",
        help="why a parameter (path or glob) lies as it does, or a line (model.py:31) is split so",
    )
    parser.add_argument(
        "--program", action="store_true", help="the compiled text for (pretend) devices, names left out"
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

"""`jshard report`: one HTML page on where everything lies and what a step costs, from shapes alone."""

from __future__ import annotations

import argparse

from jshard.cli.plan import compiled_for
from jshard.cli.target import Target, function_arguments
from jshard.cli.terminal import show

FILE = "report.html"
NONE = "none"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar=FILE, default=FILE, help=f"the page to write; {FILE} when left out")
    parser.add_argument(
        "--json", action="store_true", help="print what a page tells as one JSON document, and write none"
    )
    parser.add_argument(
        "--topology",
        metavar="CHIP:SIZE",
        help="also compile for these devices, as jshard plan does, and show asked against got; those of jshard.topology "
        f"unless said, {NONE} to compile nothing",
    )
    function_arguments(parser)


def run(chosen: argparse.Namespace) -> int:
    target = Target.of(chosen)
    topology = chosen.topology or target.configuration().topology or NONE
    if topology == NONE:
        from jshard.cli.experiment import (
            sketched,
        )  # imports JAX, which `compiled_for` has to tell first that CPU is enough

        traced = sketched(target)
    else:
        traced = compiled_for(topology, target)
    with traced as found:
        from jshard.inspect.report import report
        from jshard.layers.user_code_errors import as_user_error
        from jshard.training.function import Function

        program, plan = found if isinstance(found, tuple) else (found, None)
        args = (program.f, *program.args) if isinstance(program, Function) else (program,)
        with as_user_error("it is traced"):
            page = report(*args, plan=plan)
    if chosen.json:
        print(page.to_json())
    else:
        show(f"{page}: {page.save(chosen.output)}")
    return 0

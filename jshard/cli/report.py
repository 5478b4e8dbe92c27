"""`jshard report`: an HTML page on layouts and the costs of a step, from shapes alone."""

from __future__ import annotations

import argparse

from jshard.cli.target import Target, function_arguments
from jshard.cli.terminal import show

FILE = "report.html"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar=FILE, default=FILE, help=f"the page to write; default: {FILE}")
    function_arguments(parser)


def run(chosen: argparse.Namespace) -> int:
    from jshard.cli.experiment import sketched

    with sketched(Target.of(chosen)) as program:
        from jshard.inspect.report import report
        from jshard.layers.user_code_errors import as_user_error
        from jshard.training.function import Function

        args = (program.f, *program.args) if isinstance(program, Function) else (program,)
        with as_user_error("it is traced"):
            page = report(*args)
    show(f"{page}: {page.save(chosen.output)}")
    return 0

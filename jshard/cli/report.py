"""`jshard report`: one HTML page on where everything lies and what a step costs, from shapes alone."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jshard.cli.plan import compiled_for
from jshard.cli.target import Target, function_arguments
from jshard.cli.terminal import show
from jshard.signals.config import load_configuration

if TYPE_CHECKING:
    from jshard.inspect.plan import Plan
    from jshard.train.experiment import Experiment
    from jshard.train.function import Function

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
    with _shown(Target.of(chosen), chosen.topology) as (told, plan):
        from jshard.inspect.report import report
        from jshard.inspect.user_code_errors import as_user_error
        from jshard.train.function import Function

        args = (told.f, *told.args) if isinstance(told, Function) else (told,)
        with as_user_error("it is traced"):
            page = report(*args, plan=plan)
    if chosen.json:
        print(page.to_json())
    else:
        show(f"{page}: {page.save(chosen.output)}")
    return 0


@contextlib.contextmanager
def _shown(asked: Target, topology: str | None) -> Iterator[tuple[Experiment | Function, Plan | None]]:
    """What is asked for, and its plan where there is a topology: then on the mesh of that."""
    topology = topology or load_configuration(asked.path, asked.overrides).topology
    if topology is None or topology == NONE:
        from jshard.cli.experiment import sketched

        with sketched(asked) as told:
            yield told, None
    else:
        with compiled_for(topology, asked) as both:
            yield both

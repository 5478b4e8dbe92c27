"""`jshard bench kernels`: times of collectives or products on the devices here, or tests against XLA's."""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jshard.cli.terminal import show
from jshard.errors import JShardError
from jshard.printing.table import table
from jshard.printing.units import BYTES

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jshard.kernels.measure import Timing

SIZES = ("4KiB", "64KiB", "1MiB", "16MiB")
SIDES = (1024, 2048, 4096, 8192)
COLUMNS = "op algorithm group payload median_us low_us high_us repeats GB_per_s link_GB_per_s".split()
PRODUCT_COLUMNS = "op algorithm group side median_us low_us high_us repeats TFLOP_per_s peak_TFLOP_per_s".split()


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["kernels"], help="what to time")
    parser.add_argument("--size", action="append", metavar="64KiB", help="bytes of one array; may be given again")
    parser.add_argument(
        "--side",
        action="append",
        type=int,
        metavar="4096",
        help="time products of square matrices with this many rows instead",
    )
    parser.add_argument("--csv", metavar="FILE", help="also write the timings to this file")
    parser.add_argument("--self-test", action="store_true", help="compare each kernel with XLA's own instead")


def run(chosen: argparse.Namespace) -> int:
    from jshard.launch.initialize import init
    from jshard.layouts.pretend import pretend

    pretend(1, platforms=None)
    init()
    return bench(chosen.size or SIZES, sides=chosen.side, self_test=chosen.self_test, csv_file=chosen.csv)


def bench(
    sizes: Sequence[str] = SIZES,
    *,
    sides: Sequence[int] | None = None,
    devices: int | None = None,
    repeats: int = 20,
    csv_file: str | None = None,
    self_test: bool = False,
) -> int:
    """Time all-reduce, reduce-scatter and all-gather by every algorithm available on the devices here.

    With `sides`, or on a single accelerator, time the matrix product instead. With `self_test`, compare
    each kernel with XLA's, and return 1 if a number differs. `devices` is their number; default: all.
    """
    import jax

    from jshard.kernels import measure

    amounts = [parsed(size) for size in sizes]
    mesh = jax.make_mesh((devices or jax.device_count(),), ("all",), axis_types=(jax.sharding.AxisType.Explicit,))
    kind = jax.devices()[0].device_kind
    if self_test:
        return _tested(mesh)
    if sides is None and mesh.size == 1 and kind != "cpu":
        sides = SIDES
    if sides is None:
        title = f"{mesh.size} x {kind}, jax {jax.__version__}"
        columns, cells = COLUMNS, rows(measure.measure(mesh, amounts, repeats=repeats), 1e9)
    else:
        if least := [side for side in sides if side < 1]:
            raise JShardError(f"a matrix of {least[0]} rows has nothing to multiply", hint="use --side 1024")
        title = f"{kind}, jax {jax.__version__}; products of bfloat16"
        columns, cells = PRODUCT_COLUMNS, rows(measure.measure_products(sides, repeats=repeats), 1e12)
    if jax.process_index() != 0:
        return 0
    print(f"{title}; {repeats} calls of each in turn, each waited for; microseconds")
    if kind == "cpu":
        print("pretend devices of a CPU: only XLA's own are timed, and the times don't apply to an accelerator")
    show("\n".join(table([columns, *cells], right=range(2, len(columns)))))
    if csv_file is not None:
        with open(csv_file, "w", newline="") as file:
            csv.writer(file).writerows([columns, *cells])
    return 0


def _tested(mesh: Mesh) -> int:
    """Compare each kernel with XLA's; process 0 prints the results."""
    import jax

    from jshard.kernels import measure

    wrong, first = 0, jax.process_index() == 0
    for proof in measure.self_test(mesh):
        wrong += proof.wrong
        if first:
            print(proof)
    on = f"{mesh.size} x {jax.devices()[0].device_kind}, jax {jax.__version__}"
    if first:
        print(f"{'all right' if not wrong else 'NOT right'} on {on}, {jax.process_count()} process(es)")
    return 1 if wrong and first else 0  # the others wait for process 0 to report it


def parsed(size: str) -> int:
    """Convert `64KiB` to bytes."""
    found = re.fullmatch(r"(\d+)\s*([KMG]iB|B|)", str(size))
    if found is None or int(found[1]) == 0:
        raise JShardError(f'"{size}" is no size of an array', hint="use bytes or a unit: 4096, 64KiB, 1MiB")
    return int(found[1]) * BYTES[found[2] or "B"]


def rows(found: Iterable[Timing], unit: float) -> list[tuple[str, ...]]:
    """Return the name, microseconds, number of calls, rate in `unit` and limit of each timing."""
    cells = []
    for t in found:
        times = (f"{seconds * 1e6:.1f}" for seconds in (t.median, t.low, t.high))
        limit = f"{t.limit / unit:g}" if t.limit else "unknown"
        what = t.op, t.algorithm, str(t.group), str(t.amount)
        cells.append((*what, *times, str(t.repeats), f"{t.rate / unit:.3f}", limit))
    return cells

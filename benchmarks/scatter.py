"""What it takes to hand out an array that one process has: time, and peak memory of each process as the system counts it.

python -m benchmarks.scatter [--processes 2 4 8] [--mebibytes 4 512] [--layout rows|columns|replicated]

Starts that many processes on this machine, one CPU device each. Memory is by how much the most that a process ever held
(VmHWM) is above what it held before; the root's own copy of the array, in its host memory, is added to the root's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jshard.hardware.host import free_port

MEBIBYTE = 2**20
COLUMNS = 1024
ORIGINAL = {2: (33, None), 4: (60, 56), 8: (78, 73)}  # per cent saved: by its own accounting, and as it printed
LAYOUTS = {"rows": ("w", None), "columns": (None, "w"), "replicated": (None, None)}


def measured(rows: int, layout: str = "rows") -> dict[str, dict[str, float]]:
    """Seconds and MiB of memory for each method, on this process; the bits of the two are compared. All processes call it."""
    import jax
    import numpy as np
    from jax.sharding import AxisType

    import jshard

    mesh = jax.make_mesh((jax.device_count(),), ("w",), axis_types=(AxisType.Explicit,))
    laid = jshard.Layout(mesh, *LAYOUTS[layout])
    root = jax.process_index() == 0
    whole = np.random.default_rng(0).integers(0, 2**32, (rows, COLUMNS), np.uint32).view(np.float32) if root else None
    jshard.scatter(np.zeros(8 * COLUMNS, np.float32) if root else None, jshard.Layout(mesh, "w"))  # connects them
    found, results = {}, []
    for method in ("scatter", "broadcast"):  # what is not given back makes the second look better than it is
        before = memory("VmRSS", reset=True)
        begin = time.perf_counter()
        results.append(jax.block_until_ready(jshard.scatter(whole, laid, method=method)))
        seconds = time.perf_counter() - begin
        found[method] = {"seconds": seconds, "mebibytes": memory("VmHWM") - before}
    for one, other in zip(*(each.addressable_shards for each in results), strict=True):
        assert np.asarray(one.data).tobytes() == np.asarray(other.data).tobytes(), "the two methods differ"
    return found


def memory(key: str, *, reset: bool = False) -> float:
    """MiB of this process, as Linux says; `reset` makes the peak start again from here."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def in_processes(count: int, mebibytes: int, layout: str = "rows", *, timeout: float = 600) -> list[dict[str, Any]]:
    """What `measured` finds in each of `count` processes."""
    return each_rank("benchmarks.scatter", count, str(mebibytes), layout, timeout=timeout)


def each_rank(module: str, count: int, *words: str, timeout: float = 600) -> list[dict[str, Any]]:
    """What each of `count` processes of `python -m module --one address count words... rank` prints last, as JSON."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "PJRT_NPROC": os.environ.get("PJRT_NPROC", "32"),
    }
    command = [sys.executable, "-m", module, "--one", f"127.0.0.1:{free_port()}", str(count), *words]
    started = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, env=environment, text=True)
        for rank in range(count)
    ]
    deadline = time.monotonic() + timeout
    try:
        told = [each.communicate(timeout=deadline - time.monotonic())[0] for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()
    assert not any(each.returncode for each in started), "a process failed"
    return [json.loads(each.splitlines()[-1]) for each in told]


def _one(address: str, count: int, mebibytes: int, layout: str, rank: int) -> None:
    import jax

    jax.distributed.initialize(address, count, rank, coordinator_bind_address=address)
    print(json.dumps(measured(mebibytes * MEBIBYTE // (4 * COLUMNS), layout)), flush=True)


def row(count: int, mebibytes: int, found: list[dict[str, Any]]) -> str:
    """One line of the table."""
    cells = [f"{mebibytes:>6} {count:>5}"]
    means = []
    for method in ("broadcast", "scatter"):
        peaks = [each[method]["mebibytes"] for each in found]
        seconds = max(each[method]["seconds"] for each in found)
        cells.append(f"{seconds:>7.2f} s {peaks[0]:>7.0f} {max(peaks[1:]):>7.0f}")
        means.append((sum(peaks) + mebibytes) / count)
    saved = 100 * (1 - means[1] / means[0])
    accounted, printed = ORIGINAL.get(count, (None, None))
    cells.append(f"{saved:>6.0f} %")
    cells.append(f"{'' if accounted is None else f'{accounted} %':>10} {'' if printed is None else f'{printed} %':>8}")
    return "   ".join(cells)


HEADER = f"""\
{"":12}   {"broadcast and slice":>25}   {"scatter":>25}   {"memory":>8}   {"the original's":>19}
{"MiB procs":>12}   {"time":>9} {"root":>7} {"others":>7}   {"time":>9} {"root":>7} {"others":>7}   {"saved":>8}   \
{"accounting":>10} {"printed":>8}"""


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[4, 512])
    parser.add_argument("--layout", choices=LAYOUTS, default="rows")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    if asked.one:
        address, count, mebibytes, layout, rank = asked.one
        return _one(address, int(count), int(mebibytes), layout, int(rank))
    print(f"float32 of {COLUMNS} columns, {asked.layout}; peak memory in MiB over what a process held before")
    print(HEADER)
    for mebibytes in asked.mebibytes:
        for count in asked.processes:
            print(row(count, mebibytes, in_processes(count, mebibytes, asked.layout)), flush=True)
    print("saved: of the mean over processes, the root's own array counted")


if __name__ == "__main__":
    main()

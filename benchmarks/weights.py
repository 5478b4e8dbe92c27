"""What it takes to read a file of weights into shards: bytes, peak memory and time of each process, against loading it whole.

python -m benchmarks.weights [--processes 4] [--mebibytes 512]

Half of the tensors are split by rows, half by columns, and half of each are permuted on the way. Memory is by how much the
most that a process held (VmHWM) is above what it held before; bytes are what Linux counts as read (rchar). The other way, where
the safetensors library is installed, is its `load_file` in every process and `jax.make_array_from_callback`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.scatter import MEBIBYTE, each_rank, memory

TENSORS, COLUMNS = 16, 1024
RENAME = "(.*[01]): \\1\n(.*): \\1 | permute 1 0\n"


def read_by_system() -> int:
    return next(
        int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar")
    )


def make(folder: Path, mebibytes: int) -> None:
    """Write the file and its rename file."""
    import numpy as np

    from jshard.training.checkpoints.tensors.safetensors import new_header

    shape = (mebibytes * MEBIBYTE // TENSORS // COLUMNS // 4, COLUMNS)
    header = new_header(folder / "x.safetensors", {name: (shape, np.dtype(np.float32)) for name in names()}, None)
    with (folder / "x.safetensors").open("wb") as file:
        file.write(header.text)
        for _ in range(TENSORS):
            file.write(np.random.default_rng(0).bytes(shape[0] * COLUMNS * 4))
    (folder / "r.txt").write_text(RENAME)


def names() -> list[str]:
    return [f"w{number}.{number % 4}" for number in range(TENSORS)]


def measured(folder: Path, rows: int) -> dict[str, dict[str, float]]:
    """Seconds, MiB held and MiB read for each way, on this process."""
    import jax
    import numpy as np

    import jshard

    mesh = jax.make_mesh((jax.device_count(),), ("d",))
    model = {}
    for number, name in enumerate(names()):
        where = jax.NamedSharding(mesh, jax.P("d") if number % 2 == 0 else jax.P(None, "d"))
        shape = (rows, COLUMNS) if number % 4 < 2 else (COLUMNS, rows)
        model[name] = jax.ShapeDtypeStruct(shape, np.float32, sharding=where)

    read_weights = jshard.load_weights  # which is imported now

    def by_jshard() -> Any:
        return read_weights(model, folder / "x.safetensors", rename=folder / "r.txt")

    def by_library() -> Any:
        full = importlib.import_module("safetensors.numpy").load_file(folder / "x.safetensors")
        seen = {name: array if int(name[-1]) < 2 else array.T for name, array in full.items()}
        return {
            name: jax.make_array_from_callback(
                shape.shape, shape.sharding, lambda part, array=seen[name]: array[part].copy()
            )
            for name, shape in model.items()
        }

    found, results = {}, []
    for way, read in {"jshard": by_jshard, "library": by_library}.items():
        before, count, begin = memory("VmRSS", reset=True), read_by_system(), time.perf_counter()
        try:
            results.append(jax.block_until_ready(read()))
        except ModuleNotFoundError:
            break
        seconds = time.perf_counter() - begin
        held = {"seconds": seconds, "held": memory("VmHWM") - before, "read": (read_by_system() - count) / MEBIBYTE}
        found[way] = held
    for name in names() if len(results) == 2 else ():
        ours, theirs = (np.asarray(each[name].addressable_shards[0].data) for each in results)
        assert ours.tobytes() == theirs.tobytes(), f"{name} differs"
    return found


def row(count: int, mebibytes: int, found: list[dict[str, Any]]) -> str:
    """The line: the most of any process."""
    cells = [f"{mebibytes} MiB in {count} processes, a shard is {mebibytes / count:.0f} MiB"]
    for way in found[0]:
        most = {key: max(each[way][key] for each in found) for key in ("read", "held", "seconds")}
        cells.append(f"{way} reads {most['read']:.0f} MiB, holds {most['held']:.0f} MiB, takes {most['seconds']:.2f} s")
    return "; ".join(cells)


def _one(address: str, count: int, folder: str, rows: int, rank: int) -> None:
    import jax

    jax.distributed.initialize(address, count, rank, coordinator_bind_address=address)
    jax.block_until_ready(jax.device_put(0.0))
    print(json.dumps(measured(Path(folder), rows)), flush=True)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    if asked.one:
        address, count, folder, rows, rank = asked.one
        return _one(address, int(count), folder, int(rows), int(rank))
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), asked.mebibytes)
        rows = str(asked.mebibytes * MEBIBYTE // TENSORS // COLUMNS // 4)
        found = each_rank("benchmarks.weights", asked.processes, folder, rows)
    print(row(asked.processes, asked.mebibytes, found), flush=True)


if __name__ == "__main__":
    main()

"""What test_weights.py runs in four processes: each reads its shards of a file of 96 MiB, counts, and writes them back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

import jshard
from benchmarks.scatter import memory
from jshard.errors import JShardError
from jshard.runs import events
from jshard.training.checkpoints.tensors.safetensors import new_header
from tests.support.processes import join

SHAPE, SPECS = (6144, 1024), [("d", None), (None, "d"), ("d", None), (None, "d")]  # 24 MiB each
RENAME = "(w.*[01]): \\1\n(w.*): \\1 | permute 1 0\nscale: scale\n"


def counted(name: str) -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def main(folder: str) -> None:
    join()
    me, path, rename = jax.process_index(), Path(folder) / "x.safetensors", Path(folder) / "r.txt"
    mesh = jax.make_mesh((4,), ("d",))
    names = [f"w{i}{i % 4}" for i in range(4)]
    if me == 0:
        shapes = {name: (SHAPE, np.dtype(np.float32)) for name in names} | {"scale": ((1024,), np.dtype(np.float32))}
        header = new_header(path, shapes, None)
        with path.open("wb") as file:
            file.write(header.text)
            for name in header.tensors:
                file.write(np.random.default_rng(len(name)).bytes(header.tensors[name].nbytes))
        rename.write_text(RENAME)
    multihost_utils.sync_global_devices("written")

    def shape(name: str) -> jax.ShapeDtypeStruct:
        which = int(name[-1])
        size = SHAPE if which < 2 else SHAPE[::-1]
        return jax.ShapeDtypeStruct(size, np.float32, sharding=jax.NamedSharding(mesh, jax.P(*SPECS[which])))

    model = {name: shape(name) for name in names}
    model["scale"] = jax.ShapeDtypeStruct((1024,), np.float32, sharding=jax.NamedSharding(mesh, jax.P()))
    shard = sum(int(np.prod(each.sharding.shard_shape(each.shape))) * 4 for each in model.values())
    told, read_weights = {}, jshard.load_weights  # which is imported now
    events.listen(lambda what, fields: told.update({what: fields}))
    before, read = memory("VmRSS", reset=True), counted("rchar")
    model = jax.block_until_ready(read_weights(model, path, rename=rename))
    result = {
        "shard": shard,
        "read": told["weights_read"]["read"],
        "system_read": counted("rchar") - read,
        "peak": (memory("VmHWM") - before) * 2**20,
    }
    wrote = counted("wchar")
    jshard.save_weights(model, path.with_name("again.safetensors"), rename=rename, like=path)
    result["wrote"] = counted("wchar") - wrote
    faults = []
    for deed in (
        lambda: jshard.save_weights(model, Path(folder) / "no" / "y.safetensors"),
        lambda: jshard.load_weights({"w": jax.ShapeDtypeStruct((4,), np.float32)}, path),
    ):
        try:
            deed()
        except JShardError as error:
            faults.append([each for each in error.faults if "sharding" in each or "no/y" in each][0])
    print(json.dumps(result | {"faults": faults}))


if __name__ == "__main__":
    main(*sys.argv[1:])

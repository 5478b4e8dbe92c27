"""Compiles the product's kernels for a GPU that is not here, and prints registers and spills: `... h200`

A process of its own, as a kernel for the wrong chip aborts it. A line of JSON for each product, by what `ptxas -v` says.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jshard import kernels
from jshard.inspect.plan.topology import Topology

# The dtypes of results. A Blackwell's kernel returns that of its operands, whatever is asked for.
DTYPES = {"h100": ("bfloat16", "float32"), "h200": ("bfloat16", "float32"), "b200": ("bfloat16",)}
SIZE = 4096


def output_of(compile_):
    """Return what a compilation writes to standard output and error, its child processes too."""
    with tempfile.TemporaryFile() as file:
        kept = [os.dup(1), os.dup(2)]
        try:
            sys.stdout.flush()
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            compile_()
        finally:
            for old, number in zip(kept, (1, 2), strict=True):
                os.dup2(old, number)
                os.close(old)
            file.seek(0)
            text = file.read().decode(errors="replace")
            if sys.exc_info()[0] is not None:
                print(text[-3000:], file=sys.stderr)
        return text


def figures(text):
    """What the assembler says of a kernel, and the instruction that multiplies."""
    products = re.findall(r"wgmma\.mma_async|tcgen05\.mma", text)
    return {
        "registers": max(int(each) for each in re.findall(r"Used (\d+) registers", text)),
        "spilled": sum(int(each) for each in re.findall(r"(\d+) bytes spill", text)),
        "instruction": products[0] if products else None,
    }


def compiled(chip, dtype):
    topology = Topology.of(f"{chip}:1")
    target = topologies.get_topology_desc(platform="cuda", topology_name=topology.name, **topology.target)
    mesh = jax.sharding.Mesh(np.array(target.devices), ("t",), axis_types=(AxisType.Explicit,))

    square = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.bfloat16, sharding=jax.NamedSharding(mesh, P()))
    product = lambda x, w: kernels.matmul(x, w, out_dtype=dtype, algorithm="pallas")
    run = jax.jit(jax.shard_map(product, mesh=mesh, in_specs=P(), out_specs=P()))
    return {"dtype": dtype, "chip": chip, **figures(output_of(run.lower(square, square).compile))}


if __name__ == "__main__":
    os.environ.update(MOSAIC_GPU_DUMP_PTXAS="1", MOSAIC_GPU_DUMP_PTX="1")
    for dtype in DTYPES[sys.argv[1]]:
        print(json.dumps(compiled(sys.argv[1], dtype)), flush=True)

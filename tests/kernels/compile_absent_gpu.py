"""Compiles the product's kernels for a GPU that is not here, and prints registers and spills: `... h200`

A process of its own, as a kernel for the wrong chip aborts it. A line of JSON for each product, by what `ptxas -v` says;
`docs/measurements/gpu_registers.jsonl` is what it printed for h100, h200 and b200 on both ends of the versions.
"""

from __future__ import annotations

import importlib.metadata
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

PRODUCTS = {  # bias, activation, dtype of the result
    "bare, by JAX's own": (False, None, None),
    "bare, to float32": (False, None, "float32"),
    "bias and gelu": (True, "gelu", None),
    "bias and gelu, to float32": (True, "gelu", "float32"),
    "bias and silu": (True, "silu", None),
    "bias and relu": (True, "relu", None),
    "tanh": (False, "tanh", None),
}
SIZE = 4096


def product(bias, activation, out_dtype):
    def run(x, w, b):
        return kernels.matmul(
            x, w, bias=b if bias else None, activation=activation, out_dtype=out_dtype, algorithm="pallas"
        )

    return run


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


def compiled(chip, name):
    topology = Topology.of(f"{chip}:1")
    target = topologies.get_topology_desc(platform="cuda", topology_name=topology.name, **topology.target)
    mesh = jax.sharding.Mesh(np.array(target.devices), ("t",), axis_types=(AxisType.Explicit,))

    def operand(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, P()))

    square = operand((SIZE, SIZE), jnp.bfloat16)
    run = jax.jit(jax.shard_map(product(*PRODUCTS[name]), mesh=mesh, in_specs=P(), out_specs=P()))
    lowered = run.lower(square, square, operand((SIZE,), jnp.bfloat16))
    return {
        "product": name,
        "chip": chip,
        "jax": jax.__version__,
        "assembler": importlib.metadata.version("nvidia-cuda-nvcc"),
        **figures(output_of(lowered.compile)),
    }


if __name__ == "__main__":
    os.environ.update(MOSAIC_GPU_DUMP_PTXAS="1", MOSAIC_GPU_DUMP_PTX="1")
    for name in PRODUCTS:
        print(json.dumps(compiled(sys.argv[1], name)), flush=True)

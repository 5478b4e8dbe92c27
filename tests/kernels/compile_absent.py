"""Compiles every kernel for TPUs that are not here; a process of its own, as libtpu stays loaded."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jshard import kernels
from tests.kernels.test_lowering import KERNELS

CHIPS = {"v4": "v4:2x2x1", "v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4", "tpu7x": "tpu7x:2x2x1"}
MANY = [
    ("v5e:16x16", {"a": 16, "t": 16}, ("t",), "ring"),
    ("v5p:8x8x16", {"u": 16, "t": 64}, ("t",), "ring"),
    ("v5p:16x16x24", {"a": 16, "b": 16, "c": 24}, ("a", "b", "c"), "torus"),
]


def compile_for(topology, sizes, body, shape, dtype, label):
    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    explicit = (AxisType.Explicit,) * len(sizes)
    mesh = jax.sharding.Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes), axis_types=explicit)
    spec = P(tuple(sizes))
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))
    begun = time.monotonic()
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
    assert "tpu_custom_call" in run.lower(x).compile().as_text()
    print(f"compiled {label} for {topology} in {time.monotonic() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    for topology in CHIPS.values():
        for name, (body, _) in KERNELS.items():
            compile_for(topology, {"t": 8}, body, (64, 200), jnp.bfloat16, name)
    for topology, sizes, axes, algorithm in MANY:

        def body(x, axes=axes, algorithm=algorithm):
            return kernels.all_reduce(x, axes, algorithm=algorithm)

        shape = (int(np.prod(list(sizes.values()))), 1024)
        compile_for(topology, sizes, body, shape, jnp.bfloat16, algorithm)

"""reduce_scatter and all_gather by the ring against plain XLA, in value and gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jshard import kernels
from jshard.kernels import all_reduction, gather_scatter
from jshard.kernels.chip import CHIPS

OPS = {"reduce_scatter": kernels.reduce_scatter, "all_gather": kernels.all_gather}
# mesh, mesh axes, one device's shape, axis, dtype
CASES = [
    ({"t": 2}, "t", (6, 7), 0, "float32"),
    ({"t": 3}, "t", (5, 129), 1, "int32"),
    ({"t": 8}, "t", (8,), 0, "bfloat16"),
    ({"d": 2, "t": 4}, "t", (4, 300, 3), 0, "float32"),
    ({"d": 2, "t": 3}, ("d", "t"), (6, 5), -2, "bfloat16"),
    ({"t": 4}, "t", (4, 0), 0, "float32"),
    ({"t": 2}, "t", (2, 70), 0, "int8"),
]
IDS = [f"{'x'.join(map(str, c[0].values()))}-{'x'.join(map(str, c[2]))}-{c[4]}" for c in CASES]


@pytest.mark.quick(*(f"{IDS[1]}-{name}" for name in OPS))
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_ring_gives_what_xla_gives_in_value_and_gradient(mesh, interpreted, name, case):
    sizes, axes, shape, axis, dtype = case
    here, op = mesh(**sizes), OPS[name]
    if name == "reduce_scatter" and shape[axis] % 3 and sizes.get("t") == 3:
        shape = (*shape[:-1], 3 * shape[-1])
    names = tuple(sizes)
    devices = here.size
    x = (np.arange(devices * int(np.prod(shape))) * 7 % 13 - 6).reshape(devices, *shape).astype(jnp.dtype(dtype))
    x = jax.device_put(x, jax.NamedSharding(here, P(names)))

    def both(algorithm):
        def body(x):
            y, pull = jax.vjp(lambda x: op(x[0], axes, axis=axis, algorithm=algorithm), x)
            return y[None], pull(jnp.sign(y) + lax.axis_index(names).astype(y.dtype))[0]

        if not jnp.issubdtype(x.dtype, jnp.floating):
            return lambda x: op(x[0], axes, axis=axis, algorithm=algorithm)[None]
        return body

    def run(algorithm):
        return jax.jit(jax.shard_map(both(algorithm), mesh=here, in_specs=P(names), out_specs=P(names)))(x)

    jax.tree.map(np.testing.assert_array_equal, run("ring"), run("xla"))


def test_all_gather_that_says_invariant_is_and_its_gradient_is_a_slice(mesh, interpreted):
    here = mesh(t=4)
    x = jax.device_put(np.arange(20, dtype=np.float32).reshape(4, 5), jax.NamedSharding(here, P("t")))

    def run(algorithm):
        def body(x):
            y, pull = jax.vjp(lambda x: kernels.all_gather(x, "t", result="invariant", algorithm=algorithm), x)
            return y, pull(y * 2)[0]

        return jax.jit(jax.shard_map(body, mesh=here, in_specs=P("t"), out_specs=(P(), P("t"))))(x)

    jax.tree.map(np.testing.assert_array_equal, run("ring"), run("xla"))


@pytest.mark.seconds
def test_batch_of_vmap_moves_at_once(mesh, interpreted):
    here = mesh(t=2)
    x = jax.device_put(np.arange(48, dtype=np.float32).reshape(2, 4, 6), jax.NamedSharding(here, P("t")))

    def run(algorithm):
        def body(x):
            part = jax.vmap(lambda x: kernels.reduce_scatter(x, "t", algorithm=algorithm), in_axes=1)(x[0])
            return part, jax.vmap(lambda x: kernels.all_gather(x, "t", algorithm=algorithm))(part)

        return jax.jit(jax.shard_map(body, mesh=here, in_specs=P("t"), out_specs=P("t")))(x)

    jax.tree.map(np.testing.assert_array_equal, run("ring"), run("xla"))


@pytest.mark.quick("reduce_scatter-jshard.kernels.gather_scatter")
@pytest.mark.parametrize(("op", "module"), [("all_reduce", all_reduction), ("reduce_scatter", gather_scatter)])
def test_what_exceeds_fast_memory_goes_in_pieces(mesh, interpreted, monkeypatch, op, module):
    monkeypatch.setattr(module, "vmem_budget", lambda: 12_000)
    here = mesh(t=2)
    x = jax.device_put(np.arange(2 * 2600, dtype=np.float32).reshape(2, 2600), jax.NamedSharding(here, P("t")))

    def run(algorithm):
        function = getattr(kernels, op)
        body = jax.shard_map(
            lambda x: function(x[0], "t", algorithm=algorithm),
            mesh=here,
            in_specs=P("t"),
            out_specs=P("t" if op == "reduce_scatter" else None),
        )
        return jax.jit(body)(x)

    np.testing.assert_array_equal(run("ring"), run("xla"))
    assert CHIPS["v4"].vmem == 16

"""A batch too large for memory is taken in parts, one behind the other, and its gradients are summed over devices once.

python -m examples.in_parts
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jshard

PARTS = 4
CONFIGURATION = {
    "jshard": {"mesh": {"data": 2, "tensor": 4}},
    "up": {"row": "data", "column": "tensor"},
    "down": {"row": "data", "reduction": "tensor"},
    "gradients": {"row": "data"},
}


def step_by(value_and_grad: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
    """Return a training step in one shard_map, and its state. Each device takes its own rows in parts, so no row moves."""
    model = jshard.MLP(784, 1024, 10, rngs=nnx.Rngs(0))
    graph, state = nnx.split((model, jshard.Optimizer(model, optax.sgd(0.02))))
    specs, rows = jax.tree.map(lambda x: x.sharding.spec, state), jax.P("data")

    def loss(model: nnx.Module, x: jax.Array, y: jax.Array) -> jax.Array:
        def part(total: jax.Array, rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return total + jshard.mean((model(rows[0]) - rows[1]) ** 2) / PARTS, None

        parts = jax.tree.map(lambda rows: rows.reshape(PARTS, -1, *rows.shape[1:]), (x, y))
        return jax.lax.scan(part, jnp.float32(0), parts)[0]

    def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        with jshard.signal("gradients"):
            value, gradients = value_and_grad(lambda model: loss(model, x, y))(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), value

    in_specs, out_specs = (specs, rows, rows), (specs, jax.P())
    return jax.jit(jax.shard_map(step, mesh=jshard.mesh(), in_specs=in_specs, out_specs=out_specs)), state


def main() -> None:
    jshard.pretend(8)
    jshard.load(CONFIGURATION)
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(64, 784)).astype(np.float32), draw.normal(size=(64, 10)).astype(np.float32)
    batch = jshard.signal.tensor(x, name="gradients"), jshard.signal.tensor(y, name="gradients")
    for name, value_and_grad in (("nnx", nnx.value_and_grad), ("jshard", jshard.value_and_grad)):
        step, state = step_by(value_and_grad)
        asked = jshard.explain(step, state, *batch, backward=False)
        moved = sum(line.count * line.wire for line in asked.lines if line.phase == "backward")
        losses = []
        for _ in range(5):
            state, value = step(state, *batch)
            losses.append(float(value))
        print(f"{name}.value_and_grad: {moved:,} B on the wire for gradients, loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()

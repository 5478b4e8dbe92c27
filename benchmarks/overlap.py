"""What waits for the wire in a two-layer MLP split by sequence, on chips that are not there: jit with NamedShardings, jshard's
layers, and these by permutes. Needs the compiler of the topology (`pip install "jshard[tpu]"`, or `"jshard[plan]"` for GPUs).

    python -m benchmarks.overlap [--topology v5e:4x4] [--tensor 4] [--features 4096] [--hidden 32768] [--tokens 65536]

Of XLA's collectives that is hidden which travels while the device works, by a walk through the compiled schedule
(docs/design/0019-schedule.md). Every byte that is left is "not hidden".
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jshard
from jshard.inspect.plan import Plan, Topology, plan
from jshard.inspect.plan.estimate import in_words
from jshard.inspect.plan.planning import mesh_on, moved_to
from jshard.printing.units import size
from jshard.signals.active_config import configuration, unload

PARTITIONER, LAYERS, PERMUTES = "jit with NamedShardings", "jshard's layers", "by permutes"
WAITS = "wait"
LENGTH = 2048


def plans(topology: str, *, tensor: int, features: int, hidden: int, tokens: int) -> dict[str, Plan]:
    """The loss and its gradients for every weight and for x, compiled once for each way."""
    batch = tokens // LENGTH
    mesh = {"data": Topology.of(topology).devices // tensor, "tensor": tensor}
    half = {"row": "data", "sequence": "tensor", "dtype": {"compute": "bfloat16"}}
    up, down = {**half, "column": "tensor"}, {**half, "reduction": "tensor"}

    def shape(sizes: tuple[int, ...], *axes: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(jshard.mesh(), P(*axes)))

    def by_partitioner() -> Plan:
        def loss_of(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
            whole = NamedSharding(jshard.mesh(), P("data", None, "tensor"))
            split = NamedSharding(jshard.mesh(), P("data", "tensor"))
            y = lax.with_sharding_constraint(nnx.relu(x @ up), whole) @ down
            return loss(lax.with_sharding_constraint(y, split))

        x = shape((batch, LENGTH, features), "data", "tensor")
        weights = shape((features, hidden), None, "tensor"), shape((hidden, features), "tensor")
        return plan(loss_of, x, *weights, topology=topology)

    def by_layers() -> Plan:
        def loss_of(model: nnx.Module, x: jax.Array) -> jax.Array:
            return loss(model(x))

        model = nnx.eval_shape(lambda: MLP(features, hidden, nnx.Rngs(0)))
        return plan(loss_of, model, shape((batch, LENGTH, features), "data", "tensor"), topology=topology)

    found = {}
    with on(topology, {"mesh": mesh, "axis_types": "auto"}):
        found[PARTITIONER] = by_partitioner()
    with on(topology, {"mesh": mesh}, up=up, down=down):
        found[LAYERS] = by_layers()
    gather, scatter = {"kernel": {"all_gather_matmul": "permute"}}, {"kernel": {"matmul_reduce_scatter": "permute"}}
    with on(topology, {"mesh": mesh}, up=up | gather, down=down | scatter):
        found[PERMUTES] = by_layers()
    return found


class MLP(nnx.Module):
    def __init__(self, features: int, hidden: int, rngs: nnx.Rngs):
        with jshard.signal("up"):
            self.up = jshard.Linear(features, hidden, use_bias=False, param_dtype=jnp.bfloat16, rngs=rngs)
        with jshard.signal("down"):
            self.down = jshard.Linear(hidden, features, use_bias=False, param_dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x)))


def loss(y: jax.Array) -> jax.Array:
    return jnp.square(y.astype(jnp.float32)).mean()


@contextlib.contextmanager
def on(topology: str, settings: dict[str, Any], **signals: Any) -> Iterator[None]:
    """A configuration, on the devices of a topology."""
    jshard.load({"jshard": settings, **signals})
    present = configuration()
    assert present is not None
    try:
        with moved_to(mesh_on(Topology.of(topology), present)):
            yield
    finally:
        unload()


def wire(made: Plan, mesh_axis: str) -> tuple[int, int]:
    """Bytes that run over a mesh axis, alone or with others, and those of them that no work hides."""
    assert made.comparison is not None, made.memory.verdict()
    rows = [row for row in made.comparison.rows if mesh_axis in row.mesh_axes]
    return sum(row.wire_got for row in rows), sum(row.wire_got - row.hidden for row in rows)


def table(found: dict[str, Plan]) -> str:
    waits = "not hidden"
    lines = [
        f"{'':26}{'over tensor':>14}{waits:>17}{'over data':>14}{waits:>17}{'that takes':>13}{'a step':>12}{'bound':>12}"
    ]
    least = min(made.estimate.seconds_of("work") for made in found.values() if made.estimate is not None)
    for name, made in found.items():
        (tensor, tensor_waits), (data, data_waits) = wire(made, "tensor"), wire(made, "data")
        assert made.estimate is not None
        lines.append(
            f"{name:26}{size(tensor):>14}{size(tensor_waits):>17}{size(data):>14}{size(data_waits):>17}"
            f"{in_words(made.estimate.seconds_of(WAITS)):>13}{in_words(made.estimate.seconds):>12}"
            f"{in_words(max(made.estimate.seconds_of('wire'), least)):>12}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description="What waits for the wire.")
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--tensor", type=int, default=4, help="devices that share a sequence")
    parser.add_argument("--features", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=32768)
    parser.add_argument("--tokens", type=int, default=65536, help=f"in the whole batch, {LENGTH} to a sequence")
    asked = parser.parse_args(arguments)
    found = plans(**vars(asked))
    partitioned = found[PARTITIONER]
    mesh = " x ".join(f"{name} {count}" for name, count in partitioned.mesh.items())
    print(
        f"{partitioned.topology}, mesh {mesh}, a loss and its gradients; on the wire per device, by a model of the chip:"
    )
    print(table(found))
    print(
        "bound: the longer of that wire and of the least work; over data go the gradients of weights, over tensor the sequence"
    )
    ours, theirs = (wire(found[name], "tensor")[1] for name in (PERMUTES, PARTITIONER))
    rest = f"{size(ours)} not hidden by permutes, {size(theirs)} in the partitioner's program"
    print(f"over tensor: {rest}: {100 * ours / theirs:.0f} %")


if __name__ == "__main__":
    main()

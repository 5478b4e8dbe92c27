"""What a step of a deep network takes whose weights rest split over all chips, by the schedule that their compiler makes of it:
products of `width -> hidden -> width` in bfloat16, layer by layer in a scan, with remat; loss, gradients and update. Nothing
runs: the programs are compiled for chips that are not here (`pip install "jshard[tpu]"`; a minute on two cores).

    python -m benchmarks.pod [--topology v5e:4x4] [--layers 8] [--width 2048] [--hidden 8192] [--rows 1024]

`partitioner` is jit with NamedShardings. `gather in each layer` is what `store` with remat does. `gather one layer ahead` is a
custom_vjp by hand: the next layer's weights travel under this layer's products, and gradients of the layer behind by a ring
of permutes, half of their columns each way round. How a schedule is walked through: docs/design/0019-schedule.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jshard
from benchmarks.overlap import on
from jshard.inspect.plan import Plan, Topology, plan

BF16, F32 = jnp.bfloat16, jnp.float32
Weights = tuple[jax.Array, jax.Array]
Stack = Callable[[jax.Array, Weights], jax.Array]


def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return x + jax.nn.gelu(x @ up) @ down


def gathered(weights: Weights) -> Any:
    return tuple(lax.all_gather(each.astype(BF16), "data", axis=0, tiled=True) for each in weights)


def scattered(gradient: jax.Array) -> jax.Array:
    """Sum over devices by permutes, which XLA makes asynchronous: each device is left with its rows."""
    devices, rank = lax.axis_size("data"), lax.axis_index("data")
    rows, half = gradient.shape[0] // devices, gradient.shape[1] // 2

    def part(hop: int) -> jax.Array:
        return lax.dynamic_slice_in_dim(gradient, (rank + hop) % devices * rows, rows)

    ways = {1: part(-1)[:, :half], -1: part(1)[:, half:]}
    for hop in range(2, devices + 1):
        for way in ways:
            columns = slice(None, half) if way == 1 else slice(half, None)
            sent = lax.ppermute(ways[way], "data", [(device, (device + way) % devices) for device in range(devices)])
            ways[way] = sent + part(-way * hop)[:, columns]
    return jnp.concatenate(list(ways.values()), 1).astype(F32)


def by_partitioner(x: jax.Array, weights: Weights) -> jax.Array:
    def layer(x: jax.Array, own: Weights) -> tuple[jax.Array, None]:
        y = jax.checkpoint(lambda x, own: block(x, *(each.astype(BF16) for each in own)))(x, own)
        return lax.with_sharding_constraint(y, NamedSharding(jshard.mesh(), P("data"))), None

    return lax.scan(layer, x, weights)[0]


def in_each_layer(x: jax.Array, weights: Weights) -> jax.Array:
    def layer(x: jax.Array, own: Weights) -> tuple[jax.Array, None]:
        return jax.checkpoint(lambda x, own: block(x, *gathered(own)))(x, own), None

    return lax.scan(layer, x, weights)[0]


@jax.custom_vjp
def one_ahead(x: jax.Array, weights: Weights) -> jax.Array:
    return _fwd(x, weights)[0]


def _layer(weights: Weights, number: Any) -> Any:
    return gathered(jax.tree.map(lambda each: lax.dynamic_index_in_dim(each, number, keepdims=False), weights))


def _fwd(x: jax.Array, weights: Weights) -> Any:
    layers = weights[0].shape[0]

    def layer(carry: Any, number: jax.Array) -> Any:
        x, own = carry
        return (block(x, *own), _layer(weights, jnp.minimum(number + 1, layers - 1))), x  # only the input is kept

    (y, _), inputs = lax.scan(layer, (x, _layer(weights, 0)), jnp.arange(layers))
    return y, (inputs, weights)


def _bwd(kept: Any, gradient: jax.Array) -> Any:
    inputs, weights = kept
    layers = weights[0].shape[0]

    def layer(carry: Any, number: jax.Array) -> Any:
        gradient, own, behind = carry
        before = _layer(weights, jnp.maximum(number - 1, 0))
        sums = tuple(map(scattered, behind))
        to_x, *to_own = jax.vjp(block, inputs[number], *own)[1](gradient)
        return (to_x, before, tuple(to_own)), sums

    last = _layer(weights, layers - 1)
    begin = gradient, last, jax.tree.map(jnp.zeros_like, last)
    (to_x, _, behind), sums = lax.scan(layer, begin, jnp.arange(layers - 1, -1, -1))
    first = tuple(map(scattered, behind))
    return to_x, tuple(jnp.concatenate([one[None], rest[1:][::-1]]) for one, rest in zip(first, sums, strict=True))


one_ahead.defvjp(_fwd, _bwd)


def step(stack: Stack, mean: Callable[[jax.Array], jax.Array], x: jax.Array, weights: Weights) -> Any:
    loss, gradients = jax.value_and_grad(lambda weights: jnp.square(stack(x, weights).astype(F32)).mean())(weights)
    return jax.tree.map(lambda each, gradient: each - 1e-3 * gradient, weights, gradients), mean(loss)


def plans(topology: str, *, layers: int, width: int, hidden: int, rows: int) -> dict[str, Plan]:
    """A training step on `rows` rows a device, compiled in three ways."""
    devices, split = Topology.of(topology).devices, P(None, "data")
    with on(topology, {"mesh": {"data": devices}, "axis_types": "auto"}):
        mesh = jshard.mesh()
        x = jax.ShapeDtypeStruct((rows * devices, width), BF16, sharding=NamedSharding(mesh, P("data")))
        sizes = (layers, width, hidden), (layers, hidden, width)
        weights = tuple(jax.ShapeDtypeStruct(each, F32, sharding=NamedSharding(mesh, split)) for each in sizes)

        def planned(program: Any) -> Plan:
            return plan(jax.jit(program, donate_argnums=1), x, weights, topology=topology, backward=False)

        def by_hand(stack: Stack) -> Plan:
            def body(x: jax.Array, weights: Weights) -> Any:
                return step(stack, lambda loss: lax.pmean(loss, "data"), x, weights)

            specs = {"in_specs": (P("data"), (split, split)), "out_specs": ((split, split), P())}
            return planned(jax.shard_map(body, mesh=mesh, **specs, check_vma=False))

        return {
            "partitioner": planned(lambda x, weights: step(by_partitioner, lambda loss: loss, x, weights)),
            "gather in each layer": by_hand(in_each_layer),
            "gather one layer ahead": by_hand(one_ahead),
        }


def row(made: Plan) -> tuple[float, float, float, float, float]:
    """MiB on the wire, the share of them that is not hidden, and milliseconds of the wire alone, of work and of a step."""
    comparison, estimate = made.comparison, made.estimate
    assert comparison is not None and estimate is not None, made.memory.verdict()
    wire, work, step = (1e3 * each for each in (*map(estimate.seconds_of, ("wire", "work")), estimate.seconds))
    return comparison.got / 2**20, 1 - comparison.hidden / comparison.got, wire, work, step


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pod", description="A step on a pod, by the schedule.")
    parser.add_argument("--topology", default="v5e:4x4")
    for name, default in {"layers": 8, "width": 2048, "hidden": 8192, "rows": 1024}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args(arguments)
    found = {name: row(made) for name, made in plans(**vars(asked)).items()}
    shape = f"{asked.layers} layers {asked.width}-{asked.hidden}-{asked.width}, {asked.rows:,} rows a device"
    print(f"{Topology.of(asked.topology)}, {shape}; a model, nothing was measured")
    print(f"{'':24}{'wire MiB':>10}{'not hidden':>12}{'wire ms':>9}{'work ms':>9}{'step ms':>9}{'bound':>9}")
    least = min(work for _, _, _, work, _ in found.values())
    for name, (mebibytes, late, *milliseconds) in found.items():
        times = "".join(f"{each:>9.1f}" for each in (*milliseconds, max(milliseconds[0], least)))
        print(f"{name:24}{mebibytes:>10,.0f}{100 * late:>10.0f} %{times}")
    print("bound: the longer of that wire and of the least work of the three")


if __name__ == "__main__":
    main()

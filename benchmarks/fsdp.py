"""A step of FSDP compiled for chips that are not there: what it keeps, what it sends, and how long it would take, by XLA's
partitioner and by `store` in its forms.

    python -m benchmarks.fsdp [--topology v5e:4x4] [--layers 8] [--rows 1024] [--width 2048] [--ways prefetch] [--quick]

Layers x + gelu(x up) down in bfloat16 over float32 masters, `rows` of x a chip, weights over all chips, one step of SGD. It
asks for `pip install "jshard[tpu]"`, or `"jshard[plan]"` for GPUs. The time is that of `jshard plan`, a model.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp

import jshard
from jshard.inspect.plan import Topology, plan
from jshard.inspect.plan.planning import mesh_on, moved_to
from jshard.signals.active_config import configuration

STORES: dict[str, Any] = {
    "keep": {"parameters": "data", "keep": True},
    "store": "data",
    "prefetch": {"parameters": "data", "prefetch": True},
}
WAYS = ("partitioner", *STORES)


def loss(params: Any, x: jax.Array) -> jax.Array:
    def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        up, down = (layer[name].astype(jnp.bfloat16) for name in ("up", "down"))
        return x + jax.nn.gelu(x @ up) @ down, None

    return jnp.mean(jnp.square(jax.lax.scan(block, x, params)[0].astype(jnp.float32)))


def step(loss: Any, params: Any, x: jax.Array) -> Any:
    value, gradients = jax.value_and_grad(loss)(params, x)
    return value, jax.tree.map(lambda w, g: w - 1e-3 * g, params, gradients)


def by_partitioner(params: Any, x: jax.Array) -> jax.Array:
    """The layers computed anew in the backward pass, their inputs split by rows."""

    def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        up, down = (layer[name].astype(jnp.bfloat16) for name in ("up", "down"))
        y = x + jax.nn.gelu(x @ up) @ down
        return jax.lax.with_sharding_constraint(y, jax.NamedSharding(jshard.mesh(), jax.P("data"))), None

    return jnp.mean(jnp.square(jax.lax.scan(jax.checkpoint(block), x, params)[0].astype(jnp.float32)))


def planned(way: str, topology: Topology, layers: int, rows: int, width: int) -> Any:
    auto = {"axis_types": "auto"} if way == "partitioner" else {}
    signal = {"row": "data", "store": STORES.get(way, "data"), "match": ["**"]}
    jshard.load({"jshard": {"mesh": {"data": topology.devices}, **auto}, "all": signal})
    present = configuration()
    assert present is not None
    with moved_to(mesh_on(topology, present)):

        def shape(sizes: tuple[int, ...], dtype: Any, *spec: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=jax.NamedSharding(jshard.mesh(), jax.P(*spec)))

        params = {
            "up": shape((layers, width, 4 * width), jnp.float32, None, "data"),
            "down": shape((layers, 4 * width, width), jnp.float32, None, "data"),
        }
        x = shape((rows * topology.devices, width), jnp.bfloat16, "data")
        f = by_partitioner if way == "partitioner" else jshard.shard(loss)
        run = jax.jit(lambda params, x: step(f, params, x), donate_argnums=0)
        return plan(run, params, x, topology=topology.name, backward=False)


def line(way: str, made: Any) -> str:
    wire = sum(got.total for got in made.got) / 2**20
    hidden = sum(got.total for got in made.got if got.asynchronous) / 2**20
    temporaries = made.memory.parts["temporaries"] / 2**20
    seconds = (
        "" if made.estimate is None else f"{1e3 * made.estimate.seconds:12.1f} ms"
    )  # nobody knows pretended devices
    return f"{way:12}{wire:10,.0f} MiB{hidden:10,.0f} MiB{temporaries:10,.0f} MiB{seconds}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fsdp", description="A step of FSDP on absent chips.")
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1024, help="of x on each chip")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--ways", default=",".join(WAYS), help="some of them, with commas between")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it runs")
    asked = parser.parse_args(arguments)
    layers, rows, width = (2, 16, 128) if asked.quick else (asked.layers, asked.rows, asked.width)
    topology = Topology.of(asked.topology)
    print(f"{topology}, {layers} layers of {width:,}, {rows:,} rows a chip")
    print(f"{'':12}{'wire':>14}{'asynchronous':>14}{'temporaries':>14}{'modelled step':>15}")
    for way in asked.ways.split(","):
        print(line(way, planned(way, topology, layers, rows, width)), flush=True)


if __name__ == "__main__":
    main()

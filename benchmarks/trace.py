"""What tracing and lowering a loss and its gradients costs by `jshard`, beside plain Flax, on eight pretend devices.

    python -m benchmarks.trace [CASE ...] [--rounds 5]

Both programs are lowered in turn, from functions that JAX has not seen; seconds are of processor time. A ratio is the median
over the rounds, beside its limit. `placed` is the first placement of a model, in plain lowerings. `traces` and `equations` are
what JAX traces and binds, and in brackets over plain Flax. `over by hand` compares with the same collectives in shard_map.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jshard
from benchmarks import decoder, stages

WIDTH, ROWS = 64, 16
SPLIT = {"row": "data", "store": "data"}
TWO_WAYS = {
    "jshard": {"mesh": {"data": 2, "tensor": 4}},
    "columns": {**SPLIT, "column": "tensor", "match": ["**/{gate,up}/kernel"]},
    "sums": {**SPLIT, "reduction": "tensor", "match": ["**/down/kernel"]},
    "rest": {**SPLIT, "match": ["**"]},
}
SIZES = {"vocabulary": 64, "width": 64, "depth": 4, "heads": 4, "hidden": 128}
MICROBATCHES = 4
PLACED_LIMIT, HAND_LIMIT = 1.0, 1.15


class Expert(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.gate, self.up, self.down = (nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.norm, self.mlp = nnx.RMSNorm(WIDTH, rngs=rngs), Expert(rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.mlp(self.norm(x))


class Routed(nnx.Module):
    """Six experts, one after the other, each of all rows."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.norm, self.router = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, 6, rngs=rngs)
        self.experts = nnx.List([Expert(rngs=rngs) for _ in range(6)])

    def __call__(self, x: jax.Array) -> jax.Array:
        shares = jax.nn.softmax(self.router(h := self.norm(x)))
        return x + sum(shares[:, i : i + 1] * expert(h) for i, expert in enumerate(self.experts))


class Chain(nnx.Module):
    def __init__(self, kind: Callable[..., nnx.Module], count: int, *, ends: bool = False):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([kind(rngs=rngs) for _ in range(count)])
        if ends:
            self.first, self.last = (nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(2))
            self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x) if hasattr(self, "first") else x
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x)) if hasattr(self, "last") else x


def squares(model: Chain, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(model(x)))


@dataclasses.dataclass
class Case:
    """A model and its batch, under a plan. `loss` and `differentiate` make what is lowered."""

    plan: dict[str, Any]
    build: Callable[[], Any]
    batch: Any
    loss: Callable[..., jax.Array]
    limit: float
    plain: Callable[..., Any] = nnx.value_and_grad
    ours: Callable[..., Any] = lambda loss: nnx.value_and_grad(jshard.shard(loss))
    by_hand: bool = False

    def fresh(self) -> Callable[..., jax.Array]:
        return lambda model, batch: self.loss(model, batch)

    def lowerings(self) -> dict[str, Callable[[], Any]]:
        """Return what lowers, by name; plain Flax is first. The model of `jshard` is placed."""
        plain, ours = self.build(), self.build()
        self.place(ours)
        steps = {
            "plain": lambda: nnx.jit(self.plain(self.fresh())).lower(plain, self.batch),
            "jshard": lambda: nnx.jit(self.ours(self.fresh())).lower(ours, self.batch),
        }
        return steps | ({"by hand": lambda: _by_hand(len(plain.blocks), self.batch)} if self.by_hand else {})

    def place(self, model: Any) -> None:
        jshard.shard(self.fresh()).place(model, self.batch)


def _by_hand(count: int, batch: Any) -> Any:
    """Lower the loss and gradients of blocks in shard_map: kernels are gathered over `data`, and again for the backward pass;
    products are summed over `tensor`."""
    kept = lambda primitive, *_, **__: primitive.name not in ("all_gather", "reshape", "broadcast_in_dim", "pvary")

    @functools.partial(jax.checkpoint, policy=kept)
    def loss(layers: Any, x: jax.Array) -> jax.Array:
        for layer in layers:
            norm, gate, up = (lax.all_gather(layer[name], "data", tiled=True) for name in ("norm", "gate", "up"))
            down = lax.all_gather(layer["down"], "data", axis=1, tiled=True)
            h = x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * norm
            x = x + lax.psum((jax.nn.silu(h @ gate) * (h @ up)) @ down, "tensor")
        return lax.pmean(jnp.mean(jnp.square(x)), "data")

    layer = {"norm": P("data"), **dict.fromkeys(("gate", "up"), P("data", "tensor")), "down": P("tensor", "data")}
    specs, gradients = [layer] * count, jax.value_and_grad(loss)
    mapped = jax.shard_map(gradients, mesh=jshard.mesh(), in_specs=(specs, P("data")), out_specs=(P(), specs))
    lies = lambda shape, spec: jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(jshard.mesh(), spec))
    layers = jax.tree.map(lambda spec: lies((WIDTH,) * len(spec), spec), specs)
    return jax.jit(mapped).lower(layers, lies(batch.shape, P("data")))


def by_microbatches(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Return the mean loss of microbatches and its gradients, in a loop over them."""

    def differentiated(model: Any, batch: jax.Array) -> Any:
        graph, parameters = nnx.split(model)
        step = jax.value_and_grad(lambda parameters, rows: loss(nnx.merge(graph, parameters), rows))

        def turn(sums: Any, rows: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, step(parameters, rows)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, parameters)
        sums, _ = lax.scan(turn, zeros, batch.reshape(MICROBATCHES, -1, *batch.shape[1:]))
        return jax.tree.map(lambda each: each / MICROBATCHES, sums)

    return differentiated


def cases() -> dict[str, Case]:
    x, tokens = np.ones((ROWS, WIDTH), np.float32), decoder.drawn_tokens(SIZES, ROWS, 32)
    model = lambda: decoder.model(SIZES)
    pipelined = {"plain": by_microbatches, "ours": lambda loss: jshard.value_and_grad(loss)}
    return {
        **{
            f"blocks-{n}": Case(TWO_WAYS, lambda n=n: Chain(Block, n), x, squares, 1.5, by_hand=True)
            for n in (2, 8, 32)
        },
        "experts": Case(TWO_WAYS, lambda: Chain(Routed, 4, ends=True), x, squares, 2.5),
        "decoder-fsdp": Case(decoder.configured("fsdp", 8), model, tokens, decoder.value_of, 2.0),
        "decoder-1f1b": Case(
            stages.configured("1f1b", 4, MICROBATCHES), model, tokens, decoder.value_of, 2.5, **pipelined
        ),
    }


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count traces that begin, and primitives that are bound."""
    from jax._src.core import Primitive
    from jax._src.interpreters.partial_eval import DynamicJaxprTrace

    counts = {"traces": 0, "equations": 0}

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            counts[name] += 1
            return function(*args, **how)

        return call

    begin = counting("traces", DynamicJaxprTrace.__init__)
    bind = counting("equations", Primitive.bind)
    with mock.patch.object(DynamicJaxprTrace, "__init__", begin), mock.patch.object(Primitive, "bind", bind):
        yield counts


def seconds(call: Callable[[], Any]) -> float:
    gc.collect()
    start = time.process_time()
    call()
    return time.process_time() - start


def measured(case: Case, rounds: int) -> str:
    """Return a case's row."""
    jshard.load(case.plan)
    lowerings = case.lowerings()
    counts = {}
    for name, lower in lowerings.items():
        lower()  # what JAX keeps of operations is made now
        with counted() as counts[name]:
            lower()
    found: dict[str, list[float]] = {name: [] for name in (*lowerings, "place")}
    for _ in range(rounds):
        for name, lower in lowerings.items():
            found[name].append(seconds(lower))
        model = case.build()
        found["place"].append(seconds(lambda model=model: case.place(model)))
    over = lambda name, of: statistics.median(a / b for a, b in zip(found[name], found[of], strict=True))
    times = f"{statistics.median(found['plain']):7.3f} s{statistics.median(found['jshard']):8.3f} s"
    ratios = f"{over('jshard', 'plain'):7.2f} ({case.limit:g}){over('place', 'plain'):8.2f} ({PLACED_LIMIT:g})"
    more = [
        f"{counts['jshard'][key]:,}".rjust(8) + f" ({counts['jshard'][key] / counts['plain'][key]:.1f})"
        for key in counts["plain"]
    ]
    hand = f"{over('jshard', 'by hand'):8.2f} ({HAND_LIMIT:g})" if "by hand" in found else ""
    return f"{times}{ratios}{''.join(more)}{hand}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace", description="What tracing and lowering cost.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="experts or decoder-1f1b; all if none is named")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args(arguments)
    jshard.pretend(8)
    every = cases()
    if unknown := set(asked.cases) - every.keys():
        parser.error(f"no case is named {', '.join(sorted(unknown))}; use {', '.join(every)}")
    print(
        "{:14}{:>9}{:>10}{:>13}{:>12}{:>14}{:>14}{:>15}".format(
            "", "plain", "jshard", "ratio", "placed", "traces", "equations", "over by hand"
        )
    )
    for name in asked.cases or every:
        print(f"{name:14}{measured(every[name], asked.rounds)}", flush=True)


if __name__ == "__main__":
    main()

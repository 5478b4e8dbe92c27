"""What a training step of a decoder costs by `jshard`, against the same model, unchanged, in plain Flax: `jit` with
NamedShardings, the same placements. Forward, backward and update; dispatch included, one step of each in turn, and how long
each takes to its first step: tracing and compiling.

python -m benchmarks.decoder [--quick] [--rounds 20] [--plan tensor]

`plain, again` is the same program a second time: how far its ratio is from 1.00 is the noise of the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jshard

PLANS: dict[str, dict[str, int]] = {
    "one device": {"data": 1, "tensor": 1},
    "data": {"data": 4, "tensor": 1},
    "tensor": {"data": 1, "tensor": 4},
    "fsdp": {"data": 4, "tensor": 1},
    "tensor + fsdp": {"data": 2, "tensor": 2},
}
PLAIN = "plain Flax"
SIZES = {"vocabulary": 4096, "width": 512, "depth": 4, "heads": 8, "hidden": 1536, "qk_norm": True}
QUICK = {"vocabulary": 32, "width": 16, "depth": 2, "heads": 4, "hidden": 32}


@dataclasses.dataclass
class Variant:
    """A step that trains on at each call, and how long the first call took."""

    step: Callable[[], Any]
    first: float = 0.0

    def __post_init__(self) -> None:
        start = time.perf_counter()
        self.step().block_until_ready()
        self.first = time.perf_counter() - start


def configured(plan: str) -> dict[str, Any]:
    split = {"row": "data", **({"store": "data"} if "fsdp" in plan else {})}
    return {
        "jshard": {"mesh": PLANS[plan]},
        "columns": {**split, "column": "tensor", "match": ["blocks/**/{q,k,v,gate,up}/kernel", "head/**"]},
        "sums": {**split, "reduction": "tensor", "match": ["blocks/**/{o,down}/kernel"]},
        "rest": {**split, "match": ["**"]},
    }


def variants(plan: str, sizes: Mapping[str, Any], batch: int, length: int) -> dict[str, Variant]:
    """One training step each, of the same parameters and on the same batch."""
    import jax
    import numpy as np
    import optax
    from flax import nnx
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    draw = np.random.default_rng(0)
    tokens = draw.integers(0, sizes["vocabulary"], size=(batch, length)).astype(np.int32)
    tx = optax.adamw(1e-3)

    def loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def model() -> Any:
        return jshard.Decoder(rngs=nnx.Rngs(0), **sizes)

    def value_of(model: Any, tokens: jax.Array) -> jax.Array:
        return loss(model(tokens), tokens)

    def stepping(model: Any, optimizer: Any, value_of: Any, batch: jax.Array) -> Callable[[], Any]:
        graph, state = nnx.split((model, optimizer))
        stays = jax.tree.map(lambda x: x.sharding, state)

        def train(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
            model, optimizer = nnx.merge(graph, state)
            value, gradients = nnx.value_and_grad(value_of)(model, batch)
            optimizer.update(model, gradients)
            return nnx.state((model, optimizer)), value

        program = jax.jit(train, donate_argnums=0, out_shardings=(stays, None))

        def step() -> jax.Array:
            nonlocal state
            state, value = program(state, batch)
            return value

        return step

    jshard.load(configured(plan))
    sharded = jshard.shard(model(), jax.ShapeDtypeStruct(tokens.shape, tokens.dtype))
    lies = jax.tree.map(lambda array: array.sharding.spec, nnx.state(sharded, nnx.Param))

    def by_jshard() -> Callable[[], Any]:
        rows = jax.device_put(tokens, NamedSharding(jshard.mesh(), PartitionSpec("data")))
        return stepping(sharded, jshard.Optimizer(sharded, tx), jshard.shard(value_of), rows)

    def plain() -> Callable[[], Any]:
        made, mesh = model(), Mesh(jshard.mesh().devices, jshard.mesh().axis_names, axis_types=(AxisType.Auto,) * 2)
        where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), lies)
        nnx.update(made, jax.device_put(nnx.state(made, nnx.Param), where))
        optimizer, whole = nnx.Optimizer(made, tx, wrt=nnx.Param), NamedSharding(mesh, PartitionSpec())
        state = nnx.state(optimizer)
        lie = jax.tree.map(lambda x: x.sharding if isinstance(x.sharding, NamedSharding) else whole, state)
        nnx.update(optimizer, jax.device_put(state, lie))
        rows = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data")))
        return stepping(made, optimizer, value_of, rows)

    ways = {PLAIN: plain, "plain, again": plain, "jshard": by_jshard}
    return {name: Variant(made()) for name, made in ways.items()}


def agree(steps: Mapping[str, Variant]) -> None:
    """Two steps more of each; an error unless all have the same losses, which fall."""
    import numpy as np

    losses = {name: [float(each.step()) for _ in range(2)] for name, each in steps.items()}
    for name, found in losses.items():
        np.testing.assert_allclose(found, losses[PLAIN], rtol=1e-4, err_msg=f"{name}: the losses of two steps")
    if not losses[PLAIN][0] > losses[PLAIN][1]:
        raise AssertionError(f"the losses do not fall: {losses[PLAIN]}")


def measure(steps: Mapping[str, Variant], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step until its loss is there, one step of each after the other."""
    names = list(steps)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            steps[name].step().block_until_ready()
            found[name].append(time.perf_counter() - start)
    return found


def table(steps: Mapping[str, Variant], found: Mapping[str, list[float]]) -> str:
    """Medians, the middle half, the median of the ratios of neighbours in time, and the first step."""
    lines = [f"{'':16}{'median':>10}{'middle half':>19}{'over plain':>12}{'first step':>12}"]
    for name, seconds in found.items():
        low, middle, high = (1e3 * each for each in statistics.quantiles(seconds, n=4))
        ratio = statistics.median(a / b for a, b in zip(seconds, found[PLAIN], strict=True))
        spread = f"{low:.1f} - {high:.1f} ms"
        lines.append(f"{name:16}{middle:>7.1f} ms{spread:>19}{ratio:>12.2f}{steps[name].first:>10.1f} s")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decoder", description="What a decoder's training step costs."
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that all variants run and agree")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--plan", choices=tuple(PLANS), action="append", help="only this one; may be given again")
    asked = parser.parse_args(arguments)

    jshard.pretend(4)
    sizes, batch, length = (QUICK, 4, 8) if asked.quick else (SIZES, 4, 256)
    print(f"a decoder of {sizes}, {batch} rows of {length} tokens, on pretend devices")
    for plan in asked.plan or PLANS:
        steps = variants(plan, sizes, batch, length)
        agree(steps)
        found = measure(steps, 3 if asked.quick else asked.rounds)
        print(f"\n{plan} {PLANS[plan]}: all variants agree on the losses\n{table(steps, found)}", flush=True)


if __name__ == "__main__":
    main()

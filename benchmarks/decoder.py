"""What a training step of a decoder costs by `jshard`, against the same model, unchanged, in plain Flax: `jit` with
NamedShardings, the same placements. Forward, backward and update; dispatch included, one step of each in turn, by the clock
and in processor time, which other work on the machine changes less. Ratios are medians of those of neighbours in time, with
their middle half. Beside them what tracing and the first step take, with compiling, in processor time.

python -m benchmarks.decoder [--quick] [--rounds 20] [--plan tensor] [--here]

`plain, again` is the same program a second time: how far its ratio is from 1.00 is the noise of the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jshard
from benchmarks.quartiles import quartiles

PLANS: dict[str, dict[str, int]] = {
    "one device": {"data": 1, "tensor": 1},
    "data": {"data": 4, "tensor": 1},
    "tensor": {"data": 1, "tensor": 4},
    "tensor, sequence": {"data": 1, "tensor": 4},
    "fsdp": {"data": 4, "tensor": 1},
    "fsdp, kept": {"data": 4, "tensor": 1},  # what is gathered is kept for the backward pass
    "tensor + fsdp": {"data": 2, "tensor": 2},
}
PLAIN = "plain Flax"
SIZES = {"vocabulary": 4096, "width": 512, "depth": 4, "heads": 8, "hidden": 1536, "qk_norm": True}
LARGE = {"vocabulary": 32768, "width": 1024, "depth": 12, "heads": 16, "hidden": 2816, "qk_norm": True}
QUICK = {"vocabulary": 32, "width": 16, "depth": 2, "heads": 4, "hidden": 32}


@dataclasses.dataclass
class Variant:
    """A step that trains on at each call; seconds of processor time that tracing it took, and the first call."""

    trace: Callable[[], Any]
    step: Callable[[], Any]
    traced: float = 0.0
    first: float = 0.0

    def __post_init__(self) -> None:
        start = time.process_time()
        self.trace()
        self.traced = time.process_time() - start
        self.step().block_until_ready()
        self.first = time.process_time() - start


def configured(plan: str, devices: int = 4) -> dict[str, Any]:
    store = {"parameters": "data", "keep": True} if "kept" in plan else "data"
    split = {"row": "data", **({"store": store} if "fsdp" in plan else {})}
    between = {"sequence": "tensor"} if "sequence" in plan else {}
    return {
        "jshard": {"mesh": {axis: devices if size == 4 else size for axis, size in PLANS[plan].items()}},
        "columns": {**split, **between, "column": "tensor", "match": ["blocks/**/{q,k,v,gate,up}/kernel", "head/**"]},
        "sums": {**split, **between, "reduction": "tensor", "match": ["blocks/**/{o,down}/kernel"]},
        "rest": {**split, "match": ["**"]},
    }


def model(sizes: Mapping[str, Any]) -> Any:
    """A new one, with the same parameters each time."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    graph, state = _drawn(tuple(sizes.items()))
    return nnx.merge(graph, jax.tree.map(jnp.array, state))


@functools.cache
def _drawn(sizes: tuple[tuple[str, Any], ...]) -> Any:
    """Its parameters on the host, as variants give the memory of theirs away."""
    import jax
    from flax import nnx

    graph, state = nnx.split(jshard.Decoder(rngs=nnx.Rngs(0), **dict(sizes)))
    return graph, jax.device_get(state)


def drawn_tokens(sizes: Mapping[str, Any], batch: int, length: int) -> Any:
    import numpy as np

    return np.random.default_rng(0).integers(0, sizes["vocabulary"], size=(batch, length)).astype(np.int32)


def stepping(model: Any, optimizer: Any, differentiated: Callable[..., Any], batch: Any) -> Variant:
    """The model trained on one batch; `differentiated` returns its loss and gradients."""
    import jax
    from flax import nnx

    graph, state = nnx.split((model, optimizer))
    stays = jax.tree.map(lambda x: x.sharding, state)

    def train(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        value, gradients = differentiated(model, batch)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), value

    program, compiled = jax.jit(train, donate_argnums=0, out_shardings=(stays, None)), None

    def step() -> jax.Array:
        nonlocal state, compiled
        if compiled is None:  # once: another configuration may be loaded by the next call
            compiled = program.lower(state, batch).compile()
        state, value = compiled(state, batch)
        return value

    return Variant(lambda: program.trace(state, batch), step)


def value_of(model: Any, tokens: Any) -> Any:
    """The mean loss of tokens by the logits at their own places."""
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens).mean()


def by_jshard(plan: str, sizes: Mapping[str, Any], batch: int, length: int, devices: int = 4) -> Variant:
    """A training step by the claims of a plan."""
    import jax
    import optax
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    tokens = drawn_tokens(sizes, batch, length)
    jshard.load(configured(plan, devices))
    sharded = jshard.shard(model(sizes), jax.ShapeDtypeStruct(tokens.shape, tokens.dtype))
    rows = jax.device_put(tokens, NamedSharding(jshard.mesh(), PartitionSpec("data")))
    optimizer = jshard.Optimizer(sharded, optax.adamw(1e-3))
    return stepping(sharded, optimizer, nnx.value_and_grad(jshard.shard(value_of)), rows)


def variants(
    plan: str, sizes: Mapping[str, Any], batch: int, length: int, devices: int = 4, *, again: bool = True
) -> dict[str, Variant]:
    """One training step each, of the same parameters and on the same batch."""
    import jax
    import optax
    from flax import nnx
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    tokens, tx = drawn_tokens(sizes, batch, length), optax.adamw(1e-3)

    ours = by_jshard(plan, sizes, batch, length, devices)
    sharded = jshard.shard(model(sizes), jax.ShapeDtypeStruct(tokens.shape, tokens.dtype))
    lies = jax.tree.map(lambda array: array.sharding.spec, nnx.state(sharded, nnx.Param))
    del sharded

    def plain() -> Variant:
        made, mesh = (
            model(sizes),
            Mesh(jshard.mesh().devices, jshard.mesh().axis_names, axis_types=(AxisType.Auto,) * 2),
        )
        where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), lies)
        nnx.update(made, jax.device_put(nnx.state(made, nnx.Param), where))
        optimizer, whole = nnx.Optimizer(made, tx, wrt=nnx.Param), NamedSharding(mesh, PartitionSpec())
        state = nnx.state(optimizer)
        lie = jax.tree.map(lambda x: x.sharding if isinstance(x.sharding, NamedSharding) else whole, state)
        nnx.update(optimizer, jax.device_put(state, lie))
        rows = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data")))
        return stepping(made, optimizer, nnx.value_and_grad(value_of), rows)

    return {PLAIN: plain(), **({"plain, again": plain()} if again else {}), "jshard": ours}


def agree(steps: Mapping[str, Variant], first: str = PLAIN, *, rtol: float = 1e-4) -> None:
    """Two steps more of each; an error unless all have the losses of the first, which fall."""
    import numpy as np

    losses = {name: [float(each.step()) for _ in range(2)] for name, each in steps.items()}
    for name, found in losses.items():
        np.testing.assert_allclose(found, losses[first], rtol=rtol, err_msg=f"{name}: the losses of two steps")
    if not losses[first][0] > losses[first][1]:
        raise AssertionError(f"the losses do not fall: {losses[first]}")


def measure(steps: Mapping[str, Variant], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each step until its loss is there, and those of processor time, one step of each after the other."""
    names = list(steps)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start, busy = time.perf_counter(), time.process_time()
            steps[name].step().block_until_ready()
            found[name].append((time.perf_counter() - start, time.process_time() - busy))
    return found


def table(
    steps: Mapping[str, Variant],
    found: Mapping[str, list[tuple[float, float]]],
    first: str = PLAIN,
    over: str = "over plain",
) -> str:
    """Medians by the clock and of processor time, each with its ratio to those of the first, and what comes before."""
    head = ("", "clock", over, "processor", over, "trace", "first step")
    lines = ["{:18}{:>12}{:>21}{:>12}{:>21}{:>9}{:>12}".format(*head)]
    for name, each in found.items():
        cells = []
        for which in range(2):
            ratios = [a[which] / b[which] for a, b in zip(each, found[first], strict=True)]
            low, middle, high = quartiles(ratios)
            spread = f"{middle:.3f} ({low:.2f} - {high:.2f})"
            cells.append(f"{1e3 * statistics.median(one[which] for one in each):>9.1f} ms{spread:>21}")
        lines.append(f"{name:18}{''.join(cells)}{steps[name].traced:>7.2f} s{steps[name].first:>10.1f} s")
    return "\n".join(lines)


def _accelerator(quick: bool) -> str:
    """The kind of the device at hand; an error on a CPU, where the larger model takes minutes a step."""
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu" and not quick:
        raise SystemExit("no accelerator is here; leave out --here, or add --quick")
    return f"{device.device_kind}, jax {jax.__version__}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decoder", description="What a decoder's training step costs."
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that all variants run and agree")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--plan", choices=tuple(PLANS), action="append", help="only this one; may be given again")
    parser.add_argument(
        "--here", action="store_true", help="by the first plan on the accelerator at hand: a larger model"
    )
    asked = parser.parse_args(arguments)

    if not asked.here:
        jshard.pretend(4)
    sizes, batch, length = (QUICK, 4, 8) if asked.quick else (LARGE, 8, 1024) if asked.here else (SIZES, 4, 256)
    on = _accelerator(asked.quick) if asked.here else "pretend devices"
    dtype = {"dtype": "bfloat16"} if asked.here else {}  # whose losses differ in the fourth digit by the order of sums
    print(f"a decoder of {sizes | dtype}, {batch} rows of {length} tokens, on {on}")
    for plan in asked.plan or (list(PLANS)[:1] if asked.here else PLANS):
        steps = variants(plan, {**sizes, **dtype}, batch, length, 1 if asked.here else 4)
        agree(steps, rtol=1e-3 if asked.here else 1e-4)
        found = measure(steps, 3 if asked.quick else asked.rounds)
        print(f"\n{plan} {PLANS[plan]}: all variants agree on the losses\n{table(steps, found)}", flush=True)


if __name__ == "__main__":
    main()

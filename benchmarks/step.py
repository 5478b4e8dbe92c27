"""What a training step costs: jshard by layers and by `jshard.jit`, against the same step written by hand in shard_map,
plain jit with NamedShardings, and one device. Forward, backward and update; dispatch included; interleaved in one run.

python -m benchmarks.step [--quick] [--devices 4] [--rounds 60] [--optimizer adamw]

`hand-written, again` is the same program a second time: how far its ratio is from 1.00 is the noise of the run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jshard
from benchmarks.quartiles import quartiles

CASES = {  # features, batch
    "784-256-10, batch 256": ((784, 256, 10), 256),
    "784-256-10, batch 2,048": ((784, 256, 10), 2048),
    "1024-4096-1024, batch 256": ((1024, 4096, 1024), 256),
}
QUICK = {"16-32-8, batch 32": ((16, 32, 8), 32)}
HAND = "shard_map by hand"


def variants(features: tuple[int, int, int], batch: int, optimizer: str) -> dict[str, Callable[[], Any]]:
    """By name: one training step each, all from the same parameters and on the same batch. Calling it again trains on."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from benchmarks.two_layers import Model, Plain, by_layers, losses, threaded

    mesh = jshard.mesh()
    tx = {"adamw": optax.adamw, "sgd": optax.sgd}[optimizer](1e-3)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(batch, features[0])).astype(np.float32)
    y = draw.integers(0, features[2], size=batch).astype(np.int32)

    # -- jshard: the model says nothing of the mesh, --

    def train(model: Model, optimizer: jshard.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
        value, gradients = nnx.value_and_grad(lambda model: jshard.mean(losses(model(x), y)))(model)
        optimizer.update(model, gradients)
        return value

    def made() -> tuple[Model, jshard.Optimizer]:
        model = Model(features, nnx.Rngs(0))
        return model, jshard.Optimizer(model, tx)

    rows = jshard.signal.tensor(x, name="rows"), jshard.signal.tensor(y, name="rows")

    # -- Flax's own layers: by `jshard.jit`, and by `nnx.jit` on one device, whose dispatch is compared --

    def plain(jit: Callable[..., Any], value_and_grad: Callable[..., Any], **how: Any) -> Callable[[], Any]:
        model = Plain(features)
        nnx.update(
            model, jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), nnx.to_pure_dict(nnx.state(made()[0], nnx.Param)))
        )
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        def step(model: Any, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
            value, gradients = value_and_grad(lambda model, x, y: jnp.mean(losses(model(x), y)))(model, x, y)
            optimizer.update(model, gradients)
            return value

        compiled = jit(step, **how)
        return lambda: compiled(model, optimizer, *(rows if jit is jshard.jit else alone))

    alone = jnp.asarray(x), jnp.asarray(y)

    # -- the same mathematics without jshard, on plain arrays --

    def dense(parameters: Any, x: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(x @ parameters["up"]["kernel"] + parameters["up"]["bias"])
        return hidden @ parameters["down"]["kernel"] + parameters["down"]["bias"]

    def update(value_of: Callable[[Any], jax.Array], state: Any) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(value_of)(state[0])
        updates, moments = tx.update(gradients, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), value

    model = Model(features, nnx.Rngs(0))
    parameters = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    column, row, whole = PartitionSpec(None, "tensor"), PartitionSpec("tensor"), PartitionSpec()
    specs = {"up": {"kernel": column, "bias": row}, "down": {"kernel": PartitionSpec("tensor", None), "bias": whole}}
    moments = jax.eval_shape(tx.init, parameters)
    state_specs = (
        specs,
        optax.tree_map_params(tx, lambda _, spec: spec, moments, specs, transform_non_params=lambda _: whole),
    )

    def placed(mesh: Any) -> tuple[Any, Any, Any]:
        def put(tree: Any, specs: Any) -> Any:
            return jax.device_put(tree, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))

        state = put((parameters, tx.init(parameters)), state_specs)
        return state, put(x, PartitionSpec("data")), put(y, PartitionSpec("data"))

    def by_hand() -> Callable[[], Any]:
        def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
            def value_of(parameters: Any) -> jax.Array:
                hidden = jax.nn.relu(x @ parameters["up"]["kernel"] + parameters["up"]["bias"])
                outputs = jax.lax.psum(hidden @ parameters["down"]["kernel"], "tensor") + parameters["down"]["bias"]
                return jax.lax.psum(jnp.sum(losses(outputs, y)), "data") / batch

            return update(value_of, state)

        batch_specs = PartitionSpec("data"), PartitionSpec("data")
        mapped = jax.shard_map(step, mesh=mesh, in_specs=(state_specs, *batch_specs), out_specs=(state_specs, whole))
        return threaded(jax.jit(mapped, donate_argnums=0), *placed(mesh))

    def by_partitioner(auto: Any) -> Callable[[], Any]:
        def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
            return update(lambda parameters: jnp.mean(losses(dense(parameters, x), y)), state)

        state, *batch = placed(auto)
        lies = jax.tree.map(lambda array: array.sharding, state)
        return threaded(jax.jit(step, donate_argnums=0, out_shardings=(lies, None)), state, *batch)

    def auto_mesh(devices: Any) -> Any:
        return jax.sharding.Mesh(devices, mesh.axis_names, axis_types=(AxisType.Auto,) * 2)

    return {
        HAND: by_hand(),
        "shard_map by hand, again": by_hand(),
        "jshard by layers": by_layers(train, made(), *rows),
        "jshard.jit": plain(jshard.jit, jshard.value_and_grad, donate=True),
        "jit with NamedShardings": by_partitioner(auto_mesh(mesh.devices)),
        "one device": by_partitioner(auto_mesh(mesh.devices[:1, :1])),
        "nnx.jit, one device": plain(nnx.jit, nnx.value_and_grad, donate_argnums=(0, 1)),
    }


def agree(steps: dict[str, Callable[[], Any]]) -> None:
    """Three steps of each; an error unless all have the same losses."""
    import numpy as np

    losses = {name: [float(step()) for _ in range(3)] for name, step in steps.items()}
    for name, found in losses.items():
        np.testing.assert_allclose(found, losses[HAND], rtol=1e-5, err_msg=f"{name}: the losses of three steps")
    if not losses[HAND][0] > losses[HAND][1] > losses[HAND][2]:
        raise AssertionError(f"the losses do not fall: {losses[HAND]}")


def measure(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of each step until its loss is there, and until the call returned, one step of each after the other."""
    names = list(steps)
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            loss = steps[name]()
            returned = time.perf_counter()
            loss.block_until_ready()
            found[name][0].append(time.perf_counter() - start)
            found[name][1].append(returned - start)
    return found


def table(found: dict[str, tuple[list[float], list[float]]]) -> str:
    """Medians, the middle half, the median of the ratios of neighbours in time, and how long a call takes to return."""
    lines = [f"{'':26}{'median':>10}{'middle half':>19}{'over by hand':>14}{'call returns':>15}"]
    for name, (whole, returned) in found.items():
        low, middle, high = (1e3 * each for each in quartiles(whole))
        ratio = statistics.median(a / b for a, b in zip(whole, found[HAND][0], strict=True))
        spread = f"{low:.2f} - {high:.2f} ms"
        call = f"{1e6 * statistics.median(returned):,.0f} us"
        lines.append(f"{name:26}{middle:>7.2f} ms{spread:>19}{ratio:>14.2f}{call:>15}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description="What a training step costs.")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that all variants run and agree")
    parser.add_argument("--devices", type=int, choices=(4, 8), default=4)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    asked = parser.parse_args(arguments)

    jshard.pretend(asked.devices)
    up = {"row": "data", "column": "tensor", "match": ["up/**"]}
    down = {"row": "data", "reduction": "tensor", "match": ["down/**"]}
    mesh = {"data": 2, "tensor": asked.devices // 2}
    jshard.load({"jshard": {"mesh": mesh}, "up": up, "down": down, "rows": {"row": "data"}})
    print(f"{asked.devices} pretend devices, mesh {{data: 2, tensor: {asked.devices // 2}}}, {asked.optimizer}")
    for name, (features, batch) in (QUICK if asked.quick else CASES).items():
        steps = variants(features, batch, asked.optimizer)
        agree(steps)
        found = measure(steps, 3 if asked.quick else asked.rounds)
        print(f"\n{name}: all variants agree on the losses of three steps\n{table(found)}", flush=True)


if __name__ == "__main__":
    main()

"""The steps of `benchmarks.processes` by JAX: jshard as one writes it, shard_map by hand, and jit with NamedShardings."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from typing import Any

import jshard
from benchmarks import decoder, stages
from benchmarks.processes import HAND, JSHARD, RATE, TOGETHER, Step
from jshard.schedules import KINDS

AXIS = "workers"
LAYOUTS = {
    "tensor": {"up": {"column": AXIS}, "down": {"reduction": AXIS}, "rows": {}},
    "data": {"up": {"row": AXIS}, "down": {"row": AXIS}, "rows": {"row": AXIS}},
}


def join(rank: int, processes: int, address: str) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.pop("JAX_NUM_CPU_DEVICES", None)
    os.environ["NPROC"] = "1"  # a thread for operations, as torchrun has it
    # Of unrolled layers XLA of jax 0.10.2 would join the backward pass's gathers with the forward's, and keep all weights.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_disable_hlo_passes=cse_barrier_expander"
    os.environ.update(JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES=str(processes), JAX_PROCESS_ID=str(rank))
    jshard.init(devices=processes, step_timeout=3600)


def leave() -> None:
    pass


def decoder_steps(plan: str, sizes: Mapping[str, Any], rows: int, length: int) -> dict[str, Step]:
    """By name: one training step each of the model of `benchmarks.decoder`, behind the first; in a pipeline with a microbatch
    for each row."""
    import jax

    if plan == "pipeline":
        kinds = (stages.TENSOR, *KINDS)
        found = {kind: stages.variant(kind, sizes, rows, length, rows, jax.device_count()).step for kind in kinds}
        alone = jax.process_index() == 0
        one = stages.variant(stages.ONE, sizes, rows, length, rows).step if alone else lambda: math.nan
        return {stages.ONE: one, **found}
    steps = decoder.variants(plan, sizes, rows, length, jax.device_count(), again=False)
    if plan == "tensor":  # as torchtitan has it
        steps["jshard, sequence too"] = decoder.by_jshard("tensor, sequence", sizes, rows, length, jax.device_count())
    if plan == "fsdp":
        steps["jshard, kept"] = decoder.by_jshard("fsdp, kept", sizes, rows, length, jax.device_count())
    return {name: each.step for name, each in steps.items()}


def steps(layout: str, weights: list[Any], x: Any, y: Any, optimizer: str) -> dict[str, Step]:
    """By name: one training step each, all from the same weights and on the same batch. Calling it again trains on."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from jax.flatten_util import ravel_pytree
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from benchmarks.two_layers import Model, by_layers, losses, threaded

    jshard.load({"jshard": {"mesh": {AXIS: jax.device_count()}}, **LAYOUTS[layout]})
    mesh, tx = jshard.mesh(), {"adamw": optax.adamw, "sgd": optax.sgd}[optimizer](RATE)
    features = (len(weights[0][0]), *(len(bias) for _, bias in weights))
    batch = len(x)

    # -- jshard: the model says nothing of processes, and the same step goes through both doors --

    def train(
        differentiate: Any, reduce: Any, model: Model, optimizer: jshard.Optimizer, x: jax.Array, y: jax.Array
    ) -> jax.Array:
        value, gradients = differentiate(lambda model: reduce(losses(model(x), y)))(model)
        optimizer.update(model, gradients)
        return value

    def made() -> tuple[Model, jshard.Optimizer]:
        model = Model(features, nnx.Rngs(0))
        for layer, (kernel, bias) in zip(model.layers, weights, strict=True):
            variables: tuple[Any, Any] = (layer.kernel, layer.bias)
            for variable, numbers in zip(variables, (kernel, bias), strict=True):
                variable[...] = laid(numbers, variable[...].sharding)
        return model, jshard.Optimizer(model, tx)

    def laid(numbers: Any, sharding: Any) -> jax.Array:
        return jax.make_array_from_callback(numbers.shape, sharding, lambda index: numbers[index])

    def in_one_shard_map(differentiate: Any, reduce: Any) -> Step:
        graph, state = nnx.split(made())
        specs = jax.tree.map(lambda x: x.sharding.spec, state)

        def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
            model, optimizer = nnx.merge(graph, state)
            value = train(differentiate, reduce, model, optimizer, x, y)
            return nnx.state((model, optimizer)), value

        in_specs, out_specs = (specs, batch_spec, batch_spec), (specs, whole)
        mapped = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        return threaded(jax.jit(mapped, donate_argnums=0), state, *rows)

    # -- bare JAX --

    whole, split = PartitionSpec(), PartitionSpec(AXIS)
    if layout == "tensor":
        specs, batch_spec = [(PartitionSpec(None, AXIS), split), (PartitionSpec(AXIS, None), whole)], whole
    else:
        specs, batch_spec = [(whole, whole)] * len(weights), split
    moments = jax.eval_shape(tx.init, weights)
    state_specs = (
        specs,
        optax.tree_map_params(tx, lambda _, spec: spec, moments, specs, transform_non_params=lambda _: whole),
    )
    rows = laid(x, NamedSharding(mesh, batch_spec)), laid(y, NamedSharding(mesh, batch_spec))

    def placed(mesh: Any) -> Any:
        """Parameters and moments on the mesh."""
        state = jax.tree.map(
            lambda each, spec: (each, NamedSharding(mesh, spec)), (weights, tx.init(weights)), state_specs
        )
        return jax.tree.map(lambda pair: laid(jax.device_get(pair[0]), pair[1]), state, is_leaf=_is_pair)

    def update(state: Any, value: Any, gradients: Any) -> tuple[Any, jax.Array]:
        updates, moments = tx.update(gradients, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), value

    def forward(parameters: Any, x: jax.Array, total: Any) -> jax.Array:
        *first, (down, more) = parameters
        for up, bias in first:
            x = jax.nn.relu(x @ up + bias)
        return total(x @ down) + more

    def by_hand(flat: str = "") -> Step:
        def value_of(parameters: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            if layout == "tensor":
                return jnp.mean(losses(forward(parameters, x, lambda y: jax.lax.psum(y, AXIS)), y))
            mean = jnp.sum(losses(forward(parameters, x, lambda y: y), y)) / batch
            return mean if flat else jax.lax.psum(mean, AXIS)

        def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
            if not flat:
                return update(state, *jax.value_and_grad(value_of)(state[0], x, y))
            parameters = jax.tree.map(lambda each: jax.lax.pcast(each, AXIS, to="varying"), state[0])
            value, gradients = jax.value_and_grad(value_of)(parameters, x, y)
            vector, back = ravel_pytree((value, gradients))
            value, gradients = back(jax.lax.psum(vector, AXIS))
            return update(state, value, gradients)

        out = (state_specs, whole)
        mapped = jax.shard_map(step, mesh=mesh, in_specs=(state_specs, batch_spec, batch_spec), out_specs=out)
        return threaded(jax.jit(mapped, donate_argnums=0), placed(mesh), *rows)

    def by_partitioner() -> Step:
        auto = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,))
        state = placed(auto)

        def value_of(parameters: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.mean(losses(forward(parameters, x, lambda y: y), y))

        def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
            return update(state, *jax.value_and_grad(value_of)(state[0], x, y))

        lies = jax.tree.map(lambda array: array.sharding, state)
        batch = laid(x, NamedSharding(auto, batch_spec)), laid(y, NamedSharding(auto, batch_spec))
        return threaded(jax.jit(step, donate_argnums=0, out_shardings=(lies, None)), state, *batch)

    found = {
        HAND: by_hand(),
        "the same, again": by_hand(),
        JSHARD: by_layers(functools.partial(train, nnx.value_and_grad, jshard.mean), made(), *rows),
        "jshard, one shard_map": in_one_shard_map(nnx.value_and_grad, jshard.mean),
    }
    found["jit with NamedShardings"] = by_partitioner()
    if layout == "data":
        found[TOGETHER] = in_one_shard_map(jshard.value_and_grad, lambda losses: losses)
        found["by hand, one sum of all"] = by_hand("flat")
    return found


def _is_pair(each: Any) -> bool:
    from jax.sharding import NamedSharding

    return isinstance(each, tuple) and len(each) == 2 and isinstance(each[1], NamedSharding)

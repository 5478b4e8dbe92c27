"""The reference of `jshard verify`: two training steps in 64 bits by plain Flax and optax, on a device without a
configuration. It shares the model and a named loss with the experiment, but no code of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jshard.inspect.ledger.tracing import is_inexact
from jshard.inspect.verify.first_divergence import relative
from jshard.inspect.verify.inputs import shaken
from jshard.inspect.verify.interpreter import Evaluation, quickly
from jshard.inspect.verify.residues import widened
from jshard.inspect.verify.verification import PlainSteps
from jshard.layers.layer import AuxLoss
from jshard.layouts.gathering import on_host, put, raw
from jshard.programs.jaxprs import Shaped
from jshard.signals.active_config import nothing_loaded
from jshard.training.checkpoints.checkpoint import named
from jshard.training.experiments.loop import TrainingStep
from jshard.training.experiments.loss import Objective
from jshard.training.optimizers.chain import Chain
from jshard.training.settings import Settings

SMALL = 1e-4  # of the largest number of the model or of the optimizer; smaller numbers may be rounding alone
CREATED = 4  # last bits of difference allowed in an initial number: compilers round differently

SHAKES = 3
TakesStep = Callable[..., tuple[Any, Any]]  # (state, x, y) -> (state, loss)


def plain_steps(settings: Settings, objective: Objective, step: TrainingStep, batches: Sequence[Any]) -> PlainSteps:
    """Train on the batches by reference and experiment, from plain Flax's initial numbers, and compare the results."""
    own = named(step.state)
    with nothing_loaded():
        model = objective.model(rngs=nnx.Rngs(settings["seed"]))
        tx = Chain.of(settings, clip=optax.clip_by_global_norm).tx
        graph, state = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))
        created = named(state)
        if other := sorted(own.keys() ^ created.keys()):
            return PlainSteps({}, unknown=f"plain Flax makes other variables: {', '.join(other[:3])}")
        here = [jax.tree.map(on_host, batch) for batch in batches]
        take = _stepping(_plain_step(settings, objective, graph), state, here)
        numbers = [on_host(array).astype(np.float64) if is_inexact(array) else array for array in created.values()]
        expected = take(created)
        moved = [take(dict(zip(created, shaken(numbers, 2.0**-52, seed), strict=True))) for seed in range(SHAKES)]
    off = {f"{name} as created": off for name, off in _offs(created, own).items() if off > _last_bits(created[name])}
    begun = {
        name: put(on_host(created[name]), own[name].sharding) if is_inexact(own[name]) else own[name] for name in own
    }
    offs = _offs(expected, _stepping(step.program, step.state, batches)(begun))
    rounding = [_offs(expected, results) for results in moved]
    return PlainSteps({**off, **offs}, {name: max(errors[name] for errors in rounding) for name in offs})


def _last_bits(array: Shaped) -> float:
    return CREATED * float(jnp.finfo(array.dtype).eps) if is_inexact(array) else 0.0


def _plain_step(settings: Settings, objective: Objective, graph: Any) -> TakesStep:
    """Return a training step as written by hand, with the gradients of the microbatches added up."""
    loss, parts = _loss(settings, objective), settings["microbatches"]

    def step(state: Sequence[Any], x: object, y: object) -> tuple[Any, Any]:
        model, optimizer = nnx.merge(graph, state)
        batches = [(x, y)] if parts == 1 else [jax.tree.map(lambda array, n=n: array[n], (x, y)) for n in range(parts)]
        counts = [jnp.sum(y >= 0) if isinstance(y, jax.Array) else 1 for _, y in batches]
        results = [nnx.value_and_grad(loss)(model, *batch, sum(counts) / parts) for batch in batches]
        gradients = jax.tree.map(lambda *terms: sum(terms) / parts, *(gradient for _, gradient in results))
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), sum(value for value, _ in results) / parts

    return step


def _loss(settings: Settings, objective: Objective) -> Callable[..., jax.Array]:
    written, z = objective.written, settings.table("loss").get("z", 0.0)

    def loss(model: Any, x: object, y: Any, count: Any) -> jax.Array:
        outputs = model(x)
        auxiliary = sum(jnp.sum(term) for term in jax.tree.leaves(nnx.state(model, AuxLoss)))
        if written is not None:
            return written(outputs, y) + auxiliary
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, jnp.maximum(y, 0))
        losses += z * jax.nn.logsumexp(outputs, axis=-1) ** 2
        return jnp.sum(jnp.where(y >= 0, losses, 0.0)) / jnp.maximum(count, 1) + auxiliary

    return loss


def _stepping(step: TakesStep, like: object, batches: Sequence[Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function from an initial state to the state and the losses after all steps, in 64 bits."""
    jaxpr = jax.make_jaxpr(lambda state, batch: step(state, *batch))(like, batches[0])
    how, where = Evaluation(wide=True), [*(leaf.sharding for leaf in jax.tree.leaves(like)), None]
    program = jax.jit(
        lambda arrays: how(jaxpr, arrays)[0], out_shardings=where, compiler_options=quickly(jax.devices()[0])
    )

    def take(start: Mapping[str, Any]) -> dict[str, Any]:
        losses = {}
        with jax.enable_x64(True):
            state = [_wide(array) for array in start.values()]
            for number, batch in enumerate(batches, 1):
                *state, loss = program([*state, *map(_wide, jax.tree.leaves(batch))])
                losses[f"loss of step {number}"] = on_host(loss)
            return {**losses, **{name: on_host(raw(array)) for name, array in zip(start, state, strict=True)}}

    return take


def _wide(array: jax.Array | np.ndarray) -> Any:
    return array.astype(widened(array.dtype)) if is_inexact(array) else array


def _offs(expected: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, float]:
    """Return each array's error relative to its largest number, or to `SMALL` of its model's or optimizer's largest."""
    host = {name: on_host(raw(array)) for name, array in expected.items()}
    largest: dict[str, float] = {}
    for name, array in host.items():
        if is_inexact(array):
            of = name.partition(".")[0]
            largest[of] = max(largest.get(of, 0.0), float(np.max(np.abs(array), initial=0.0)))
    least = {name: SMALL * largest.get(name.partition(".")[0], 0.0) for name in host}
    return {name: _off(array, on_host(raw(found[name])), least[name]) for name, array in host.items()}


def _off(one: np.ndarray, two: np.ndarray, least: float) -> float:
    if not np.issubdtype(one.dtype, np.inexact):
        return 0.0 if np.array_equal(one, two) else 1.0
    return relative(np.asarray(one, np.float64), np.asarray(two, np.float64), least=least)

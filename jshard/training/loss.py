"""The loss of an experiment: cross entropy or one that is named, checked against what the model and the data return.

Each reduction is one of jshard's own, so that outputs may lie split by rows and by classes and nothing moves unseen.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jshard import layers
from jshard.errors import JShardError
from jshard.training.components import Component, parameters_of

MODES = ("train", "training", "is_training", "deterministic")  # arguments that Flax's views stand in for


def cross_entropy(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Compute the mean over all examples of -log softmax(outputs) at the target."""
    shifted = outputs - jax.lax.stop_gradient(layers.max(outputs, axis=-1, keepdims=True))
    return layers.mean(jnp.log(layers.sum(jnp.exp(shifted), axis=-1)) - _at(shifted, targets))


def correct(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Return 1.0 for each example whose target has the largest output and shares it with no other class, else 0.0."""
    rivals = layers.sum((outputs >= _at(outputs, targets)[..., None]).astype(jnp.float32), axis=-1)
    return (rivals == 1).astype(jnp.float32)


def _at(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Select the output at each target. A selection and a sum: a gather can't be typed on a mesh that splits the classes."""
    chosen = jnp.arange(outputs.shape[-1]) == targets[..., None]
    return layers.sum(jnp.where(chosen, outputs, 0), axis=-1)


@dataclasses.dataclass(frozen=True)
class Objective:
    """`objective(outputs, targets)`: the loss. Forms are checked while it is traced, which is before the first step."""

    loss: Callable[[Any, Any], Any]
    written: Component | None  # None: cross entropy
    model: Component
    data: Component
    classes: Mapping[str, tuple[int, int]]  # part of the data -> its least and its largest class
    tokens: int | None = None  # how many the tokenizer knows, where the data are text

    def __call__(self, outputs: Any, targets: Any) -> jax.Array:
        if self.written is None:
            self._check_classes(outputs, targets)
        value = self.loss(outputs, targets)
        if not isinstance(value, jax.Array) or value.ndim:
            raise JShardError(
                f"{self.written}, which returns {shown(value)} and not one number",
                hint="reduce it to the loss of the batch: jshard.mean(losses)",
            )
        return value

    def _check_classes(self, outputs: Any, targets: Any) -> None:
        if not isinstance(outputs, jax.Array) or not outputs.ndim:
            raise JShardError(
                f"{self.model}, which returns {shown(outputs)}, and cross entropy takes an array with a number for each class",
                hint="return that array alone, or write loss: and the path of a loss for what it returns",
            )
        if not are_classes(outputs, targets):
            one_hot = isinstance(targets, jax.Array) and targets.shape == outputs.shape
            raise JShardError(
                f"{self.data}, which returns targets {shown(targets)} for outputs {shown(outputs)}, and cross entropy takes "
                "a class number for each",
                hint=f"return {'y.argmax(axis=-1)' if one_hot else f'int32{list(outputs.shape[:-1])}'}, or write loss: and "
                "the path of a loss for these",
            )
        if self.tokens is not None and outputs.shape[-1] < self.tokens:
            raise JShardError(
                f"{self.data}, whose tokenizer has {self.tokens:,} tokens, and {self.model.path} has {outputs.shape[-1]:,} "
                "outputs",
                hint=f"give the model a vocabulary of {self.tokens:,}",
            )
        for part, numbers in self.classes.items():
            self.check_numbers(numbers, outputs.shape[-1], f'in "{part}"')

    def check_numbers(self, numbers: tuple[int, int], count: int, where: str) -> None:
        """Raise an error where the least or the largest class is none of `count` outputs, as its loss would mean nothing."""
        least, largest = numbers
        if least < 0 or largest >= count:
            raise JShardError(
                f"{self.data}, which returns class {least if least < 0 else largest} {where}, and {self.model.path} has "
                f"{count} outputs",
                hint=f"return classes from 0 to {count - 1}"
                + ("" if least < 0 else f", or give the model {largest + 1} outputs"),
            )


def are_classes(outputs: Any, targets: Any) -> bool:
    """Whether targets are class numbers for the last axis of outputs."""
    if not all(isinstance(each, (jax.Array, jax.ShapeDtypeStruct)) for each in (outputs, targets)):
        return False
    return jnp.issubdtype(targets.dtype, jnp.integer) and targets.shape == outputs.shape[:-1] and bool(outputs.ndim)


def shown(value: Any) -> str:
    """Describe a value: `float32[8, 10]`, or what it is: `a tuple`."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return f"a {type(value).__name__}"


def check_called(component: Component, model: Any) -> None:
    """Raise an error for a model that `model(x)` alone does not call."""
    if not callable(model):
        raise JShardError(f"{component}, which has no __call__", hint="define __call__(self, x) in it")
    _, *more = parameters_of(model.__call__).values() or (None,)
    for each in more:
        if each.name in MODES and each.default is not None:
            raise JShardError(
                f'{component}, whose __call__ takes "{each.name}"',
                hint=f"leave {each.name} out: model(x) is called under Flax's train and eval views, which set Dropout and "
                "BatchNorm",
            )
        if each.default is inspect.Parameter.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            raise JShardError(
                f'{component}, whose __call__ needs "{each.name}", and is called with x alone',
                hint=f"give {each.name} a default, or return it in x: a tuple or a mapping of arrays",
            )

"""The loss of an experiment: cross entropy or one that is named, checked against what the model and the data return.

Each reduction is one of jshard's own, so that outputs may lie split by rows and by classes and nothing moves unseen.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jshard import layers
from jshard.errors import JShardError, kind_of
from jshard.layers.token_loss import CHUNK, at_targets, by_places, losses_of
from jshard.training.components import Component, parameters_of

FIGURES = ("loss", "accuracy", "perplexity")  # of an evaluation, whose names no metric has
MODES = ("train", "training", "is_training", "deterministic")  # arguments that Flax's views stand in for


def correct(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Return 1.0 for each example whose target has the largest output and shares it with no other class, else 0.0."""
    rivals = layers.sum((outputs >= at_targets(outputs, targets)[..., None]).astype(jnp.float32), axis=-1)
    return (rivals == 1).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Objective:
    """`objective(model, x, targets)`: the loss. Forms are checked while it is traced, which is before the first step."""

    loss: Callable[..., Any]
    written: Component | None  # None: cross entropy
    model: Component
    data: Component
    # part of the data -> its least and its largest class
    classes: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    tokens: int | None = None  # how many the tokenizer knows, where the data are text
    metrics: Sequence[Component] = ()
    chunk: int = CHUNK  # places of a row whose logits there are at a time, of a model that has `hidden` and `logits`

    def __post_init__(self) -> None:
        names = [*FIGURES, *(metric.name for metric in self.metrics)]
        for number, metric in enumerate(self.metrics, len(FIGURES)):
            if metric.name in names[:number]:
                fault = f"{metric}, and there is a figure {metric.name} already"
                raise JShardError(fault, hint="give the function another name")

    def __call__(self, model: Any, x: object, targets: Any, *count: object) -> jax.Array:
        outputs, logits = self._called(model, x, targets)
        how = {} if logits is None else {"head": logits, "chunk": self.chunk}
        return self._checked(self.loss(outputs, targets, **how, **({"count": count[0]} if count else {})))

    def _called(self, model: Any, x: object, targets: object, *, all_logits: bool = False) -> tuple[Any, Any]:
        """Return what the model makes of x; of one that has `hidden` and `logits` its hidden states, and `logits`."""
        if all_logits or self.written is not None or getattr(targets, "ndim", 0) != 2 or not has_hidden(model):
            outputs = shape = model(x)
            logits = None
        else:
            outputs, logits = model.hidden(x), model.logits
            shape = jax.eval_shape(logits, outputs)
        if self.written is None:
            self._check_classes(shape, targets)
        return outputs, logits

    def _checked(self, value: Any) -> jax.Array:
        if not isinstance(value, jax.Array) or value.ndim:
            raise JShardError(
                f"{self.written}, which returns {shown(value)} and not one number",
                hint="reduce it to the loss of the batch: jshard.mean(losses)",
            )
        return value

    def scores(self, model: Any, x: object, targets: Any) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Return for each figure of an evaluation what each row adds to it, and for how much of it the row counts."""
        rows = jax.tree.leaves(targets)[0].shape[0]
        outputs, logits = self._called(model, x, targets, all_logits=bool(self.metrics))
        classes = logits is not None or are_classes(outputs, targets)
        counted = targets >= 0 if classes and targets.ndim > 1 else jnp.ones(rows, bool)
        if logits is not None:

            def losses_and_right(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
                return losses_of(made := logits(x), y, 0.0), correct(made, y)

            losses, right = by_places(losses_and_right, outputs, targets, self.chunk)
        else:
            right = correct(outputs, targets) if classes else None
            losses = losses_of(outputs, targets, 0.0) if self.written is None else self.loss(outputs, targets)
        if self.written is None:
            found = {"loss": _by_row(losses, counted)}
        else:
            found = {"loss": _by_row(jnp.broadcast_to(self._checked(losses), rows), jnp.ones(rows, bool))}
        for metric in self.metrics:
            values = metric(outputs, targets)
            if not isinstance(values, jax.Array) or not values.ndim or values.shape[0] != rows:
                raise JShardError(
                    f"{metric}, which returns {shown(values)} for {rows} rows", hint="return one number for each row"
                )
            alike = counted.shape == values.shape
            found[metric.name] = _by_row(values, counted if alike else jnp.ones(values.shape, bool))
        if right is not None:
            found["accuracy"] = _by_row(right, counted)
        return found

    def _check_classes(self, outputs: Any, targets: Any) -> None:
        if not isinstance(outputs, (jax.Array, jax.ShapeDtypeStruct)) or not outputs.ndim:
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


def _by_row(values: jax.Array, counted: jax.Array) -> tuple[jax.Array, jax.Array]:
    both = jnp.where(counted, values, 0).astype(jnp.float32), counted.astype(jnp.float32)
    axes = tuple(range(1, values.ndim))
    return both if not axes else tuple(layers.sum(each, axis=axes) for each in both)  # type: ignore[return-value]  # two


def are_classes(outputs: Any, targets: Any) -> bool:
    """Whether targets are class numbers for the last axis of outputs."""
    if not all(isinstance(each, (jax.Array, jax.ShapeDtypeStruct)) for each in (outputs, targets)):
        return False
    return jnp.issubdtype(targets.dtype, jnp.integer) and targets.shape == outputs.shape[:-1] and bool(outputs.ndim)


def shown(value: Any) -> str:
    """Describe a value: `float32[8, 10]`, or what it is: `a tuple`."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return kind_of(value)


def has_hidden(model: object) -> bool:
    """Whether `model(x)` is `model.logits(model.hidden(x))`, as of a jshard.Decoder. Layers of these names don't say so."""
    return all(inspect.isfunction(getattr(type(model), name, None)) for name in ("hidden", "logits"))


def check_called(component: Component, model: object) -> None:
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

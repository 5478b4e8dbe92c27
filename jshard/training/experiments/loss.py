"""The loss of an experiment: cross entropy or a named loss, checked against the model's outputs and the data.

All reductions are jshard's own, so outputs may be split by rows and by classes, and every collective is listed.
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

FIGURES = ("loss", "accuracy", "perplexity")  # names of an evaluation's figures, not allowed for metrics
MODES = ("train", "training", "is_training", "deterministic")  # arguments replaced by Flax's views


def correct(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Return 1.0 for each example if its target has the largest output, without a tie, else 0.0."""
    rivals = layers.sum((outputs >= at_targets(outputs, targets)[..., None]).astype(jnp.float32), axis=-1)
    return (rivals == 1).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss as a function `objective(model, x, targets)`; shapes are checked at tracing, before the first step."""

    loss: Callable[..., Any]
    written: Component | None  # None: cross entropy
    model: Component
    data: Component
    # part of the data -> its least and its largest class
    classes: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    tokens: int | None = None  # the tokenizer's vocabulary, for text
    metrics: Sequence[Component] = ()
    chunk: int = CHUNK  # positions with logits in memory at a time, for a model with `hidden` and `logits`

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
        """Return the model's outputs and None; or, for a model with `hidden` and `logits`, its hidden states and `logits`."""
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
        """Return for each figure of an evaluation the rows' sums and the rows' weights."""
        rows = jax.tree.leaves(targets)[0].shape[0]
        outputs, logits = self._called(model, x, targets, all_logits=bool(self.metrics))
        classes = logits is not None or are_classes(outputs, targets)
        counted = targets >= 0 if classes and targets.ndim > 1 else jnp.ones(rows, bool)
        if logits is not None:

            def losses_and_right(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
                return losses_of(part := logits(x), y, 0.0), correct(part, y)

            losses, right = by_places(losses_and_right, outputs, targets, self.chunk)
        else:
            right = correct(outputs, targets) if classes else None
            losses = losses_of(outputs, targets, 0.0) if self.written is None else self.loss(outputs, targets)
        if self.written is None:
            figures = {"loss": _by_row(losses, counted)}
        else:
            figures = {"loss": _by_row(jnp.broadcast_to(self._checked(losses), rows), jnp.ones(rows, bool))}
        for metric in self.metrics:
            values = metric(outputs, targets)
            if not isinstance(values, jax.Array) or not values.ndim or values.shape[0] != rows:
                raise JShardError(
                    f"{metric}, which returns {shown(values)} for {rows} rows", hint="return one number for each row"
                )
            alike = counted.shape == values.shape
            figures[metric.name] = _by_row(values, counted if alike else jnp.ones(values.shape, bool))
        if right is not None:
            figures["accuracy"] = _by_row(right, counted)
        return figures

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
        """Raise an error if the least or the largest class is not among `count` outputs: its loss would be meaningless."""
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
    """Return True if targets are class numbers for the last axis of outputs."""
    if not all(isinstance(each, (jax.Array, jax.ShapeDtypeStruct)) for each in (outputs, targets)):
        return False
    return jnp.issubdtype(targets.dtype, jnp.integer) and targets.shape == outputs.shape[:-1] and bool(outputs.ndim)


def shown(value: Any) -> str:
    """Describe a value for an error message, as `float32[8, 10]` or `a tuple`."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return kind_of(value)


def has_hidden(model: object) -> bool:
    """Return True if the model has methods `hidden` and `logits`, as a `jshard.Decoder`; layers of
    these names don't count. `model(x)` must then equal `model.logits(model.hidden(x))`."""
    return all(inspect.isfunction(getattr(type(model), name, None)) for name in ("hidden", "logits"))


def check_called(component: Component, model: object) -> None:
    """Raise an error for a model that cannot be called as `model(x)`."""
    if not callable(model):
        raise JShardError(f"{component}, which has no __call__", hint="define __call__(self, x) in it")
    _, *more = parameters_of(model.__call__).values() or (None,)
    for parameter in more:
        name = parameter.name
        if name in MODES and parameter.default is not None:
            raise JShardError(
                f'{component}, whose __call__ takes "{name}"',
                hint=f"leave {name} out: model(x) is called under Flax's train and eval views, which set Dropout and "
                "BatchNorm",
            )
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_variadic:
            raise JShardError(
                f'{component}, whose __call__ needs "{name}", and is called with x alone',
                hint=f"give {name} a default, or return it in x: a tuple or a mapping of arrays",
            )

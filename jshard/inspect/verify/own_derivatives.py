"""Derivatives by rules of the program's own, each beside a finite difference of its
function. Both sides of a comparison use them, so the comparison can't test them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jshard.errors import in_a_line
from jshard.inspect.ledger.tracing import is_array, is_inexact
from jshard.programs.jaxprs import Shaped
from jshard.programs.provenance import own_line

STEP = 1e-4  # the step of a finite difference


@dataclasses.dataclass(frozen=True)
class OwnDerivative:
    """A function with a derivative written by the program: its slope in a direction, by the rule and by a difference."""

    name: str
    source: str
    by_rule: float = 0.0
    by_difference: float = 0.0
    unknown: str = ""  # why it can't be run by itself

    def __str__(self) -> str:
        what = f"derivatives of your own: {self.name}() at {self.source}, not compared with its function"
        if self.unknown:
            return f"{what}, and it can't be run by itself: {self.unknown}"
        return f"{what}; in a random direction its rule gives {self.by_rule:.6g}, a finite difference {self.by_difference:.6g}"


@contextlib.contextmanager
def noticed() -> Iterator[dict[Any, tuple[Any, ...]]]:
    """Collect the functions with derivatives of the program's own called inside, and their first arguments."""
    found: dict[Any, tuple[Any, ...]] = {}
    kinds: tuple[Any, ...] = jax.custom_vjp, jax.custom_jvp
    before = [kind.__call__ for kind in kinds]

    def noticing(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(self: object, *args: object, **kwargs: object) -> Any:
            if _source(self):
                found.setdefault(self, jax.tree.map(_described, (args, kwargs)))
            return call(self, *args, **kwargs)

        return called

    try:
        for kind, call in zip(kinds, before, strict=True):
            kind.__call__ = noticing(call)
        yield found
    finally:
        for kind, call in zip(kinds, before, strict=True):
            kind.__call__ = call


def _source(call: Any) -> str:
    """Return `m.py:3` for a function of the program, "" for others."""
    code = getattr(call.fun, "__code__", None)
    return "" if code is None else own_line([(code.co_filename, code.co_firstlineno)])


def _described(leaf: Shaped) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf


def tested(call: Any, described: object) -> OwnDerivative:
    """Run a function by itself on numbers between 0.1 and 1, and compare its rule with a finite difference."""
    own = OwnDerivative(call.fun.__name__, _source(call))
    leaves, tree = jax.tree.flatten(described)
    smooth = [n for n, leaf in enumerate(leaves) if is_array(leaf) and is_inexact(leaf)]
    random = np.random.default_rng(0)
    at = [random.uniform(0.1, 1.0, leaves[n].shape) for n in smooth]
    way = [random.normal(size=each.shape) for each in at]

    def total(f: Callable[..., Any], values: list[Any]) -> Any:
        filled = [jnp.zeros(leaf.shape, leaf.dtype) if is_array(leaf) else leaf for leaf in leaves]
        for n, value in zip(smooth, values, strict=True):
            filled[n] = value
        args, kwargs = jax.tree.unflatten(tree, filled)
        results = [each for each in jax.tree.leaves(f(*args, **kwargs)) if is_inexact(each)]
        return sum(jnp.sum(each * jnp.cos(jnp.arange(each.size).reshape(each.shape))) for each in results)

    try:
        numbers = [jnp.asarray(each, leaves[n].dtype) for n, each in zip(smooth, at, strict=True)]
        slopes = jax.grad(lambda values: total(call, values))(numbers)
        by_rule = sum(
            float(np.sum(np.asarray(one, np.float64) * other)) for one, other in zip(slopes, way, strict=True)
        )
        with jax.enable_x64(True):
            moved = ([x + step * v for x, v in zip(at, way, strict=True)] for step in (STEP, -STEP))
            more, less = (float(total(call.fun, [jnp.asarray(each) for each in values])) for values in moved)
    except Exception as error:
        return dataclasses.replace(own, unknown=in_a_line(error))
    return dataclasses.replace(own, by_rule=by_rule, by_difference=(more - less) / (2 * STEP))

"""A cache of calls: a repeated call of equal structure is recognised in microseconds.

NNX splits and merges the arguments of every call, at a higher cost than a small step.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer

from jshard.layouts.creation import is_hashable

Part = tuple[Any, tuple[str, ...] | None, tuple[Any, ...]]  # a dict or list, its keys, its values


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The attributes and variables of all modules among the arguments, and the types of all arrays.
    The arguments themselves are not referenced, so they can be freed."""

    program: Any
    situation: Any
    tree: Any  # of the arguments other than modules
    parts: list[Part]
    variables: list[Any]
    metadata: list[dict[str, Any]]
    types: list[tuple[Any, Any]]  # of the variables' numbers, then of the arrays

    def operands(
        self, args: tuple[Any, ...], situation: object, place: Callable[[int, Any], Any]
    ) -> tuple[list[Any], list[Any]] | None:
        """Return the program's operands in order; None if anything except numbers has changed.
        `place(number, x)` moves an array with another sharding."""
        leaves, tree = jax.tree.flatten(_others(args))
        if tree != self.tree or situation != self.situation:
            return None
        for container, keys, values in self.parts:
            if len(container) != len(values) or (keys is not None and tuple(container) != keys):
                return None
            if not all(map(operator.is_, container if keys is None else container.values(), values)):
                return None
        numbers = [variable.get_raw_value() for variable in self.variables]
        arrays = [place(number, x) for number, x in enumerate(leaves)]
        if not _are_like([*numbers, *arrays], self.types):
            return None
        metadata = [variable.get_metadata() for variable in self.variables]
        return (numbers, arrays) if metadata == self.metadata else None


def names(args: tuple[Any, ...]) -> tuple[int | None, ...]:
    """Return the `id` of each module among the arguments, None for other arguments."""
    return tuple(id(each) if isinstance(each, nnx.Pytree) else None for each in args)


def take(args: tuple[Any, ...], numbers: list[Any], program: Any, situation: Any, arrays: list[Any]) -> Snapshot | None:
    """Take the snapshot of a call; None if a change in it could go unnoticed. `numbers` are the
    variables' arrays from NNX, and `arrays` the program's other operands."""
    parts: list[Part] = []
    watched: dict[int, nnx.Variable] = {}
    if not all(_watch(module, parts, watched, set()) for module in args if isinstance(module, nnx.Pytree)):
        return None
    holders = {id(variable.get_raw_value()): variable for variable in watched.values()}
    variables: list[Any] = [holders.pop(id(x), None) for x in numbers]
    if any(variable is None for variable in variables) or holders:  # two variables share an array, or NNX found others
        return None
    tree = jax.tree.structure(_others(args))
    if len(arrays) != tree.num_leaves or not all(map(_is_array, arrays)):
        return None
    metadata = [dict(variable.get_metadata()) for variable in variables]
    types = [_type(x) for x in (*numbers, *arrays)]
    return Snapshot(program, situation, tree, parts, variables, metadata, types)


def _others(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if isinstance(each, nnx.Pytree) else each for each in args)


def _watch(value: object, parts: list[Part], variables: dict[int, nnx.Variable], seen: set[int]) -> bool:
    """Add the parts and variables below `value`; return False if a change there could go unnoticed."""
    if isinstance(value, nnx.Variable):
        variables[id(value)] = value
        return _is_array(value.get_raw_value())
    if isinstance(value, nnx.State):
        value = value.raw_mapping
    if isinstance(value, nnx.Pytree):
        value = vars(value)
    if not isinstance(value, (dict, list, tuple)):
        return is_hashable(value)  # an array is not
    if id(value) in seen:
        return True
    seen.add(id(value))
    held = tuple(value.values()) if isinstance(value, dict) else tuple(value)
    if not isinstance(value, tuple):  # a tuple's members can't be replaced
        parts.append((value, tuple(value) if isinstance(value, dict) else None, held))
    return all(_watch(each, parts, variables, seen) for each in held)


def _is_array(value: object) -> bool:
    return isinstance(value, jax.Array) and not isinstance(value, Tracer)


def _type(leaf: object) -> tuple[Any, Any]:
    return getattr(leaf, "aval", None), getattr(leaf, "sharding", None)


def _are_like(leaves: list[Any], held: list[tuple[Any, Any]]) -> bool:
    """Return True if all leaves have the types and shardings of `held`. Results of a program share
    their type objects. `held` is updated to them, so that later comparisons are by identity."""
    for place, (leaf, (aval, sharding)) in enumerate(zip(leaves, held, strict=True)):
        if not _is_array(leaf):
            return False
        if leaf.aval is not aval or leaf.sharding is not sharding:
            if leaf.aval != aval or leaf.sharding != sharding:
                return False
            held[place] = _type(leaf)
    return True

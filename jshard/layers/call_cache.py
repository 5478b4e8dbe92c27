"""Recognise a call of the same objects, of which nothing but numbers has changed, in a few microseconds.

NNX takes the arguments of every call apart and together again, which costs more than a small step does.
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
    """The attributes of all modules among the arguments, their variables, and what each array was like. It holds the
    modules' parts but none of the arguments themselves, which may go."""

    program: Any
    situation: Any
    tree: Any  # of the arguments that are no modules
    parts: list[Part]
    variables: list[Any]
    metadata: list[dict[str, Any]]
    types: list[tuple[Any, Any]]  # of the variables' numbers, then of the arrays

    def operands(
        self, args: tuple[Any, ...], situation: object, place: Callable[[int, Any], Any]
    ) -> tuple[list[Any], list[Any]] | None:
        """Return what the program takes, in its order; None when anything but numbers is not as it was. `place(number, x)`
        moves an array that lies elsewhere."""
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
        return (numbers, arrays) if [each.get_metadata() for each in self.variables] == self.metadata else None


def names(args: tuple[Any, ...]) -> tuple[int | None, ...]:
    """Return the identities of the modules among the arguments."""
    return tuple(id(each) if isinstance(each, nnx.Pytree) else None for each in args)


def take(args: tuple[Any, ...], numbers: list[Any], program: Any, situation: Any, arrays: list[Any]) -> Snapshot | None:
    """Take the snapshot of a call whose variables NNX found to hold `numbers`; None when something in it can change unseen.
    `arrays` are the others as the program takes them, in the order of their leaves."""
    parts: list[Part] = []
    found: dict[int, nnx.Variable] = {}
    if not all(_watch(each, parts, found, set()) for each in args if isinstance(each, nnx.Pytree)):
        return None
    holders = {id(each.get_raw_value()): each for each in found.values()}
    variables: list[Any] = [holders.pop(id(each), None) for each in numbers]
    if any(each is None for each in variables) or holders:  # two hold one array, or NNX has found others
        return None
    tree = jax.tree.structure(_others(args))
    if len(arrays) != tree.num_leaves or not all(map(_is_array, arrays)):
        return None
    metadata = [dict(each.get_metadata()) for each in variables]
    types = [_type(each) for each in (*numbers, *arrays)]
    return Snapshot(program, situation, tree, parts, variables, metadata, types)


def _others(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if isinstance(each, nnx.Pytree) else each for each in args)


def _watch(value: object, parts: list[Part], variables: dict[int, nnx.Variable], seen: set[int]) -> bool:
    """Return whether every change below `value` shows in `parts` or in `variables`, which are added to."""
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
    if not isinstance(value, tuple):  # whose members can't be replaced
        parts.append((value, tuple(value) if isinstance(value, dict) else None, held))
    return all(_watch(each, parts, variables, seen) for each in held)


def _is_array(value: object) -> bool:
    return isinstance(value, jax.Array) and not isinstance(value, Tracer)


def _type(leaf: object) -> tuple[Any, Any]:
    return getattr(leaf, "aval", None), getattr(leaf, "sharding", None)


def _are_like(leaves: list[Any], held: list[tuple[Any, Any]]) -> bool:
    """Return whether all have the shapes, dtypes and shardings of `held`. Results of one program share the objects that say
    so, which are held from then on."""
    for place, (leaf, (aval, sharding)) in enumerate(zip(leaves, held, strict=True)):
        if not _is_array(leaf):
            return False
        if leaf.aval is not aval or leaf.sharding is not sharding:
            if leaf.aval != aval or leaf.sharding != sharding:
                return False
            held[place] = _type(leaf)
    return True

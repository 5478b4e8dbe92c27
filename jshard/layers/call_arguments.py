"""The arguments of a call: their arrays, and the structure that a program is traced for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from jshard.layers.linen import arguments
from jshard.layers.written_back import arrays_of_variables, is_array
from jshard.layouts.paths import keys_of, words_of

Path = tuple[str, ...]


class _Mark:
    """A place for an array, or for an NNX object, among values that are compiled in."""


ARRAY, NODE = _Mark(), _Mark()
PARAMETER, VARIABLE, OTHER, OUTSIDE = range(4)


@dataclasses.dataclass(frozen=True)
class Structure:
    """All of a call's arguments but their arrays."""

    names: tuple[str, ...]  # of the arguments; the first `positional` are given by place
    positional: int
    static: tuple[tuple[str, Any], ...]
    tree: Any
    graphdef: Any
    states: Any  # the tree of what NNX splits the objects into
    values: tuple[
        Any, ...
    ]  # the leaves of the states, then of the arguments: ARRAY, NODE or a value that is compiled in

    def __hash__(self) -> int:
        """Leave out what a model may hold that has no hash, as a list; equality does not."""
        return hash((self.names, self.positional, self.tree, self.states))

    def holding(self, arrays: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...], dict[str, Any], dict[Any, list[Any]]]:
        """Return NNX objects that hold these arrays, the arguments with them in, and the arrays of the objects' variables."""
        states, others = self._parts(arrays)
        before = arrays_of_variables(states[:2])
        (nodes,) = nnx.merge(self.graphdef, *states)
        objects = iter(nodes)
        given = jax.tree.unflatten(self.tree, [next(objects) if x is NODE else x for x in others])
        static = dict(self.static)
        by_name = dict(zip((name for name in self.names if name not in static), given, strict=True)) | static
        args = tuple(by_name[name] for name in self.names[: self.positional])
        return nodes, args, {name: by_name[name] for name in self.names[self.positional :]}, before

    def states_of(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the states of the NNX objects with these arrays."""
        return self._parts(arrays)[0]

    def _parts(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        supply, count = iter(arrays), self.states.num_leaves
        leaves = [next(supply) if value is ARRAY else value for value in self.values]
        return jax.tree.unflatten(self.states, leaves[:count]), leaves[count:]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The structure of a call, its NNX objects, and its arrays: first those of the objects, then all others."""

    structure: Structure
    given: dict[str, Any]  # the arguments that are not compiled in, by name
    nodes: list[Any]
    arrays: list[Any]
    paths: list[Path]  # of each array, from the name of its argument
    keys: list[tuple[Any, ...]]  # of each array that is in an object: the number of the object, and the keys in it
    kinds: list[int]  # of each array: PARAMETER or VARIABLE or OTHER of an object, or OUTSIDE of all

    @classmethod
    def of(
        cls,
        f: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        static: Sequence[str] = (),
        is_array: Callable[[Any], bool] = is_array,
    ) -> Arguments:
        """Take a call apart. The arguments `static`, and leaves that are no arrays, are compiled in."""
        given = arguments(f, args, kwargs)
        names = tuple(given)
        compiled_in = tuple((name, given.pop(name)) for name in static if name in given)
        named = tuple(given)
        found, tree = jax.tree_util.tree_flatten_with_path(tuple(given.values()), is_leaf=is_node)
        nodes = [x for _, x in found if is_node(x)]
        graphdef, *states = nnx.split((nodes,), nnx.Param, nnx.Variable, ...)
        inside, of_states = jax.tree_util.tree_flatten_with_path(states)
        found = [((named[path[0].idx], *words_of(path[1:])), x) for path, x in found]
        outer = [path for path, x in found if is_node(x)]
        leaves = [(path[0].idx, (*outer[keys_of(path)[2]], *words_of(path)[3:]), x) for path, x in inside]
        leaves += [(OUTSIDE, path, x) for path, x in found if not is_node(x)]
        arrays = [each for each in leaves if is_array(each[2])]
        values = [*(x for _, x in inside), *(NODE if is_node(x) else x for _, x in found)]
        marked = tuple(ARRAY if x is not NODE and is_array(x) else x for x in values)
        return cls(
            Structure(names, len(args), compiled_in, tree, graphdef, of_states, marked),
            given,
            nodes,
            [x for _, _, x in arrays],
            [path for _, path, _ in arrays],
            [keys_of(path)[2:] for path, x in inside if is_array(x)],
            [kind for kind, _, _ in arrays],
        )

    @property
    def in_nodes(self) -> int:
        """The number of arrays that are in objects: the first."""
        return len(self.keys)


def is_node(x: object) -> bool:
    return isinstance(x, (nnx.Pytree, nnx.Variable, nnx.State))

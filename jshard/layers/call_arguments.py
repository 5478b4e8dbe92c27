"""The arguments of a call, the structure that a program is traced for, and the way back of its changes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jshard.errors import JShardError
from jshard.layers.linen import arguments
from jshard.layouts.paths import keys_of, slashed, words_of

Path = tuple[str, ...]


class _Mark:
    """A place for an array, or for an NNX object, among values that are compiled in."""


ARRAY, NODE = _Mark(), _Mark()
PARAMETER, VARIABLE, OTHER, OUTSIDE = range(4)


def is_array(x: object) -> bool:
    """Whether a leaf is an array, or a number that is traced as one."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex, jax.ShapeDtypeStruct))


@dataclasses.dataclass(frozen=True)
class Structure:
    """All of a call's arguments but their arrays."""

    names: tuple[str, ...]  # of the arguments; the first `positional` are given by place
    positional: int
    static: tuple[tuple[str, Any], ...]
    tree: Any
    graphdef: Any
    states: Any  # the tree of what NNX splits the objects into
    # the leaves of the states, then of the arguments: ARRAY, NODE or a value that is compiled in
    values: tuple[Any, ...]

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


# -- the way back: variables that a traced function changes, creates or deletes --


Keys = tuple[Any, ...]


def arrays_of_variables(states: Sequence[Any]) -> dict[Keys, list[Any]]:
    """Return the arrays of each variable, by its path."""
    return {path: jax.tree.leaves(variable) for state in states for path, variable in nnx.to_flat_state(state)}


@dataclasses.dataclass(frozen=True)
class WrittenBack:
    """The tree of a function's result and of the variables that it leaves."""

    tree: Any
    result: Any  # the tree of the function's result alone
    others: Sequence[Any]  # the leaves that are no arrays, as functions; None for an array
    returns_to: Mapping[int, int]  # by the number of a result: the number of the argument that it replaces
    created: Sequence[Keys]
    deleted: Sequence[Keys]

    @classmethod
    def of(
        cls,
        result: object,
        states: Sequence[Any],
        before: Mapping[Keys, list[Any]],
        arguments: Sequence[Any],
        *,
        keep: bool = False,
    ) -> tuple[WrittenBack, list[Any]]:
        """Return the arrays of a traced call in order: its result, the variables that are no parameters, and the parameters
        that it changes; all of them with `keep`. An unchanged parameter would cost a gather."""
        parameters, variables = (dict(nnx.to_flat_state(state)) for state in states)
        after = arrays_of_variables(states)
        changed = {
            path: each
            for path, each in parameters.items()
            if keep or any(x is not old for x, old in itertools.zip_longest(after[path], before.get(path, ())))
        }
        ends = [nnx.from_flat_state(each.items()) for each in (variables, changed)]
        leaves, tree = jax.tree.flatten((result, *ends))
        numbers = {id(x): number for number, x in enumerate(arguments)}
        returns_to, begin = {}, len(jax.tree.leaves(result))
        left = (
            (path, at) for state in ends for path, xs in arrays_of_variables([state]).items() for at in range(len(xs))
        )
        for number, (path, at) in enumerate(left, begin):
            old = before[path][at] if at < len(before.get(path, ())) else None
            if old is not None and id(old) in numbers and leaves[number].shape == old.shape:
                returns_to[sum(map(is_array, leaves[:number]))] = numbers[id(old)]
        created, deleted = (
            [path for path in after if path not in before],
            [path for path in before if path not in after],
        )
        flat, others = list(filter(is_array, leaves)), [None if is_array(x) else x for x in leaves]
        return cls(tree, jax.tree.structure(result), others, returns_to, created, deleted), flat

    @property
    def targets(self) -> list[int] | None:
        """The numbers of the arguments that the arrays after the result replace; None where one replaces none."""
        begin = self.result.num_leaves
        targets = [self.returns_to.get(number, -1) for number in range(begin, len(self.others))]
        is_plain = not (self.created or self.deleted) and all(other is None for other in self.others)
        return targets if is_plain and -1 not in targets else None

    def into(self, arguments: object, outs: Sequence[Any]) -> Any:
        """Give the models among the arguments their variables, and return the result."""
        arrays = iter(outs)
        leaves = [next(arrays) if other is None else other for other in self.others]  # a tree has no leaf None
        result, *states = jax.tree.unflatten(self.tree, leaves)
        if self.created or self.deleted:
            variables = {path: each for state in states for path, each in nnx.to_flat_state(state)}
            for path in self.deleted:
                delattr(_module_around(arguments, path), path[-1])
            for path in self.created:
                setattr(_module_around(arguments, path), path[-1], variables.pop(path))
            states = [nnx.from_flat_state(variables.items())]
        nnx.update(arguments, *states)
        return result


def _module_around(arguments: Any, path: Keys) -> Any:
    """Return the module that holds the variable at this path."""
    found = arguments
    for key in path[:-1]:
        inside = isinstance(found, (tuple, list, Mapping))
        found = (found[key] if inside else getattr(found, key, None)) if found is not None else None
    if not isinstance(found, nnx.Pytree) or not isinstance(path[-1], str):
        raise JShardError(
            f"a function under jshard.shard creates {slashed(words_of(path[2:]))} in a module that its caller does not have",
            hint="create modules before the call; a call may create variables of them",
        )
    return found

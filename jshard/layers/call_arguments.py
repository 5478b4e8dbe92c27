"""The arguments of a call, their structure as the key of a trace, and the write-back of changed variables."""

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
    """A placeholder for an array or an NNX object among static values."""


ARRAY, NODE = _Mark(), _Mark()
PARAMETER, VARIABLE, OTHER, OUTSIDE = range(4)


def is_array(x: object) -> bool:
    """Return True for an array, or a number to be traced as an array."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex, jax.ShapeDtypeStruct))


@dataclasses.dataclass(frozen=True)
class Structure:
    """A call's arguments without their arrays."""

    names: tuple[str, ...]  # of the arguments; the first `positional` are positional
    positional: int
    static: tuple[tuple[str, Any], ...]
    tree: Any
    graphdef: Any
    states: Any  # the tree of the states that NNX splits the objects into
    # the leaves of the states, then of the arguments: ARRAY, NODE or a static value
    values: tuple[Any, ...]

    def __hash__(self) -> int:
        """Hash a subset of the fields: a model may hold unhashable values, such as lists."""
        return hash((self.names, self.positional, self.tree, self.states))

    def holding(self, arrays: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...], dict[str, Any], dict[Any, list[Any]]]:
        """Rebuild NNX objects and arguments with these arrays; return objects, args, kwargs and the variables' arrays."""
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
    """The structure of a call, its NNX objects, and its arrays: first the objects' arrays, then all others."""

    structure: Structure
    given: dict[str, Any]  # the arguments that are not static, by name
    nodes: list[Any]
    arrays: list[Any]
    paths: list[Path]  # of each array, from the name of its argument
    keys: list[tuple[Any, ...]]  # of each array in an object: the number of the object, and the keys in it
    kinds: list[int]  # of each array: PARAMETER, VARIABLE or OTHER of an object, or OUTSIDE all objects

    @classmethod
    def of(
        cls,
        f: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        static: Sequence[str] = (),
        is_array: Callable[[Any], bool] = is_array,
    ) -> Arguments:
        """Split a call into structure, objects and arrays; `static` names static arguments."""
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
        arrays = [leaf for leaf in leaves if is_array(leaf[2])]
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
        """The number of arrays in objects; they come first in `arrays`."""
        return len(self.keys)


def is_node(x: object) -> bool:
    return isinstance(x, (nnx.Pytree, nnx.Variable, nnx.State))


# -- write-back: variables that a traced function changes, creates or deletes --

Keys = tuple[Any, ...]


def arrays_of_variables(states: Sequence[Any]) -> dict[Keys, list[Any]]:
    """Return the arrays of each variable, by its path."""
    return {path: jax.tree.leaves(variable) for state in states for path, variable in nnx.to_flat_state(state)}


@dataclasses.dataclass(frozen=True)
class WrittenBack:
    """The structure of a function's results: its return value, and the variables it changes, creates or deletes."""

    tree: Any
    result: Any  # the tree of the return value alone
    others: Sequence[Any]  # leaves other than arrays, such as functions; None for an array
    returns_to: Mapping[int, int]  # number of a result -> number of the argument it replaces
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
        """Return the structure and the arrays of a traced call's results. The order is: return
        value, variables except parameters, changed parameters. An unchanged parameter is omitted
        unless `keep`, because it would cost a gather."""
        parameters, variables = (dict(nnx.to_flat_state(state)) for state in states)
        after = arrays_of_variables(states)
        changed = {
            path: parameter
            for path, parameter in parameters.items()
            if keep or any(x is not old for x, old in itertools.zip_longest(after[path], before.get(path, ())))
        }
        ends = [nnx.from_flat_state(state.items()) for state in (variables, changed)]
        leaves, tree = jax.tree.flatten((result, *ends))
        numbers = {id(x): number for number, x in enumerate(arguments)}
        returns_to, begin = {}, len(jax.tree.leaves(result))
        places = (
            (path, at) for state in ends for path, xs in arrays_of_variables([state]).items() for at in range(len(xs))
        )
        for number, (path, at) in enumerate(places, begin):
            old = before[path][at] if at < len(before.get(path, ())) else None
            if old is not None and id(old) in numbers and leaves[number].shape == old.shape:
                returns_to[sum(map(is_array, leaves[:number]))] = numbers[id(old)]
        created = [path for path in after if path not in before]
        deleted = [path for path in before if path not in after]
        flat, others = list(filter(is_array, leaves)), [None if is_array(x) else x for x in leaves]
        return cls(tree, jax.tree.structure(result), others, returns_to, created, deleted), flat

    @property
    def targets(self) -> list[int] | None:
        """The numbers of the arguments replaced by the arrays after the return value; None if an array replaces none."""
        begin = self.result.num_leaves
        targets = [self.returns_to.get(number, -1) for number in range(begin, len(self.others))]
        is_plain = not (self.created or self.deleted) and all(other is None for other in self.others)
        return targets if is_plain and -1 not in targets else None

    def into(self, arguments: object, outs: Sequence[Any]) -> Any:
        """Write the variables back into the models among the arguments, and return the result."""
        arrays = iter(outs)
        leaves = [next(arrays) if other is None else other for other in self.others]  # a tree has no leaf None
        result, *states = jax.tree.unflatten(self.tree, leaves)
        if self.created or self.deleted:
            variables = {path: variable for state in states for path, variable in nnx.to_flat_state(state)}
            for path in self.deleted:
                delattr(_module_around(arguments, path), path[-1])
            for path in self.created:
                setattr(_module_around(arguments, path), path[-1], variables.pop(path))
            states = [nnx.from_flat_state(variables.items())]
        nnx.update(arguments, *states)
        return result


def _module_around(arguments: Any, path: Keys) -> Any:
    """Return the module around the variable at this path."""
    module = arguments
    for key in path[:-1]:
        if module is not None:
            module = module[key] if isinstance(module, (tuple, list, Mapping)) else getattr(module, key, None)
    if not isinstance(module, nnx.Pytree) or not isinstance(path[-1], str):
        raise JShardError(
            f"a function under jshard.shard creates {slashed(words_of(path[2:]))} in a module that its caller does not have",
            hint="create modules before the call; a call may create variables of them",
        )
    return module

"""The variables that a traced function changes, creates or deletes, and their way back into the caller's models."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jshard.errors import JShardError
from jshard.layouts.paths import slashed, words_of

Path = tuple[Any, ...]


def arrays_of_variables(states: Sequence[Any]) -> dict[Path, list[Any]]:
    """Return the arrays of each variable, by its path."""
    return {path: jax.tree.leaves(variable) for state in states for path, variable in nnx.to_flat_state(state)}


def is_array(x: object) -> bool:
    """Whether a leaf is an array, or a number that is traced as one."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex, jax.ShapeDtypeStruct))


@dataclasses.dataclass(frozen=True)
class WrittenBack:
    """The tree of a function's result and of the variables that it leaves."""

    tree: Any
    result: Any  # the tree of the function's result alone
    others: Sequence[Any]  # the leaves that are no arrays, as functions; None for an array
    returns_to: Mapping[int, int]  # by the number of a result: the number of the argument that it replaces
    created: Sequence[Path]
    deleted: Sequence[Path]

    @classmethod
    def of(
        cls,
        result: object,
        states: Sequence[Any],
        before: Mapping[Path, list[Any]],
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


def _module_around(arguments: Any, path: Path) -> Any:
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

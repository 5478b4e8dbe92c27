"""A path of `jax.tree_util.tree_flatten_with_path` in plain words: its keys, numbers and names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def key_of(step: Any) -> Any:
    """The key, number or name of one step of a path."""
    for attribute in ("key", "idx", "name"):
        if hasattr(step, attribute):
            return getattr(step, attribute)
    return step


def keys_of(path: Sequence[Any]) -> tuple[Any, ...]:
    """Those of all steps; the `value` of a variable is the variable itself."""
    ends_in_a_variable = len(path) > 0 and getattr(path[-1], "name", None) == "value"
    return tuple(map(key_of, path[:-1] if ends_in_a_variable else path))


def words_of(path: Sequence[Any]) -> list[str]:
    return [str(each) for each in keys_of(path)]

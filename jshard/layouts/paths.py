"""Paths of `jax.tree_util.tree_flatten_with_path` as plain keys, numbers and names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def key_of(step: object) -> Any:
    """Return the key, number or name of a step in a path."""
    for attribute in ("key", "idx", "name"):
        if hasattr(step, attribute):
            return getattr(step, attribute)
    return step


def keys_of(path: Sequence[Any]) -> tuple[Any, ...]:
    """Return the keys of a path, without the `value` of a variable, even where it holds a tree."""
    return tuple(key_of(step) for step in path if getattr(step, "name", None) != "value")


def slashed(keys: Iterable[Any]) -> str:
    """Return the path of an array as `match` claims it: `blocks/attn/q/kernel`."""
    return "/".join(map(str, keys))


def words_of(path: Sequence[Any]) -> list[str]:
    return [str(each) for each in keys_of(path)]

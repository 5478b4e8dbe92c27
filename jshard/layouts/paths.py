"""A path of `jax.tree_util.tree_flatten_with_path` in plain words: its keys, numbers and names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def key_of(step: object) -> Any:
    """The key, number or name of one step of a path."""
    for attribute in ("key", "idx", "name"):
        if hasattr(step, attribute):
            return getattr(step, attribute)
    return step


def keys_of(path: Sequence[Any]) -> tuple[Any, ...]:
    """Those of all steps; the `value` of a variable is the variable itself, also where it holds a tree."""
    return tuple(key_of(step) for step in path if getattr(step, "name", None) != "value")


def slashed(keys: Iterable[Any]) -> str:
    """The path of an array as `match` claims it: `blocks/attn/q/kernel`."""
    return "/".join(map(str, keys))


def words_of(path: Sequence[Any]) -> list[str]:
    return [str(each) for each in keys_of(path)]

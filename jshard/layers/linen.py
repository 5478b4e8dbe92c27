"""Which arguments of a call are Linen's parameters, or any other tree of arrays that is called `params`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jshard.errors import JShardError
from jshard.signals.config import Configuration

Argument = tuple[int, int | str]  # 0 and its place, or 1 and its keyword
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def trees_of_parameters(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Argument, Any]:
    """Find the arguments that hold parameters: Linen's variables, and what is called `params`."""
    return {
        argument: tree
        for argument, name, tree in _arguments(f, args, kwargs)
        if is_variables(tree) or (name == "params" and not _is_nnx(tree) and jax.tree.leaves(tree))
    }


def is_variables(tree: Any) -> bool:
    """Whether a tree is a collection of Linen's variables; of these only `params` are parameters."""
    return isinstance(tree, Mapping) and isinstance(tree.get("params"), Mapping)


def replaced(arguments: Arguments, trees: Mapping[Argument, Any]) -> Arguments:
    """Return the arguments with trees in place of some."""
    args, kwargs = arguments
    return tuple(trees.get((0, at), x) for at, x in enumerate(args)), {
        k: trees.get((1, k), x) for k, x in kwargs.items()
    }


def check_nothing_looks_like_parameters(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], present: Configuration
) -> None:
    """Refuse a call whose parameters have another name, where signals claim some: they would not be split."""
    if not present.has_claims:
        return
    for _, name, tree in _arguments(f, args, kwargs):
        nested = isinstance(tree, Mapping) and any(isinstance(each, Mapping) for each in tree.values())
        if nested and any(hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(tree)):
            raise JShardError(
                f'{getattr(f, "__name__", type(f).__name__)} takes a tree of arrays as "{name}", and no model or tree of '
                f"parameters for {present.source} to claim",
                hint=f'if "{name}" holds the parameters, call that argument params',
            )


def _arguments(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Argument, str, Any]]:
    try:
        known = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):  # of C, say
        known = ()
    names = [each.name for each in known if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    for at, x in enumerate(args):
        yield (0, at), names[at] if at < len(names) else f"argument {at}", x
    for name, x in kwargs.items():
        yield (1, name), name, x


def _is_nnx(tree: Any) -> bool:
    return isinstance(tree, nnx.Module | nnx.State | nnx.Variable)

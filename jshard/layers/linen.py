"""The detection of parameters in arguments: Linen's variables, a TrainState, Equinox's models, or a tree named `params`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import all_leaves

from jshard.errors import JShardError, did_you_mean, quoted
from jshard.layers.user_code_errors import name_of
from jshard.layouts.paths import slashed, words_of
from jshard.programs.jaxprs import Shaped
from jshard.signals.config import Configuration
from jshard.signals.faults import listed
from jshard.signals.globs import OTHERS, Glob, ParameterPath


def trees_of_parameters(given: Mapping[str, Any], names: Sequence[str] = ("params",)) -> dict[str, Any]:
    """Return the arguments with parameters: Linen's variables, a TrainState, a callable tree such as Equinox's, or `names`."""
    return {
        name: tree
        for name, tree in given.items()
        if has_params(tree) or is_callable_tree(tree) or (name in names and not _is_nnx(tree) and jax.tree.leaves(tree))
    }


def has_params(tree: object) -> bool:
    """Return True if a tree has a part `params`, its only parameters, as Linen's variables and a TrainState."""
    if isinstance(tree, Mapping):
        return isinstance(tree.get("params"), Mapping)
    return isinstance(getattr(tree, "params", None), Mapping) and not _is_nnx(tree) and not all_leaves([tree])


def is_callable_tree(tree: object) -> bool:
    """Return True for a callable tree of floating-point arrays, such as a model of Equinox."""
    if not callable(tree) or isinstance(tree, (type, functools.partial)) or _is_nnx(tree):
        return False
    return not all_leaves([tree]) and any(map(_is_floating, jax.tree.leaves(tree)))


def check_names(f: Callable[..., Any], names: Sequence[str]) -> None:
    """Raise an error for a name in `parameters=` that is not an argument of the function."""
    try:
        known = inspect.signature(f).parameters
    except (TypeError, ValueError):  # a function in C
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for name in names:
        if name not in known:
            raise JShardError(
                f'jshard.shard({name_of(f)}, parameters="{name}"): {name_of(f)} has no argument of that name',
                hint=did_you_mean(name, known, f"use {listed(known)}" if known else "remove parameters"),
            )


def check_nothing_looks_like_parameters(
    f: Callable[..., Any], given: Mapping[str, Any], present: Configuration
) -> None:
    """Raise an error for parameters under an unknown name if signals claim parameters: they would not be split."""
    if not present.has_claims and not present.splits_parameters:
        return
    names = [name for name, tree in given.items() if _looks_like_parameters(tree, name, present)]
    if names:
        both, holds = " and ".join(map(quoted, names)), "hold" if names[1:] else "holds"
        asked = f"({', '.join(map(quoted, names))})" if names[1:] else both
        raise JShardError(
            f"{name_of(f)} takes a tree of arrays as {both}, and no model or tree of parameters for {present.source} to claim",
            hint=f"if {both} {holds} the parameters, write jshard.shard({name_of(f)}, parameters={asked})",
        )


def _looks_like_parameters(tree: object, name: str, present: Configuration) -> bool:
    """Return True if a tree of floating-point arrays is nested, or a glob matches a path in it."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    paths = [words_of(path) for path, x in leaves if _is_floating(x)]
    globs = [Glob(glob) for signal in present.signals.values() for glob in signal.match if glob != OTHERS]
    nested = isinstance(tree, Mapping) and any(isinstance(branch, Mapping) for branch in tree.values())
    return bool(paths) and (
        nested or any(path and glob.fits(ParameterPath.of(name, slashed(path))) for path in paths for glob in globs)
    )


def _is_floating(x: Shaped) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def arguments(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, first positional; a name also used as a keyword becomes a number."""
    names = [f"argument {at}" if name in kwargs else name for at, name in enumerate(positional_names(f, len(args)))]
    return dict(zip((*names, *kwargs), (*args, *kwargs.values()), strict=True))


def positional_names(f: Callable[..., Any], count: int) -> list[str]:
    """Return the names of the first `count` parameters of `f`; "argument 2" if it has no name."""
    try:
        known = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):  # a function in C
        known = ()
    names = [parameter.name for parameter in known if parameter.kind <= parameter.POSITIONAL_OR_KEYWORD]
    return [*names[:count], *(f"argument {at}" for at in range(len(names), count))]


def _is_nnx(tree: object) -> bool:
    return isinstance(tree, nnx.Module | nnx.State | nnx.Variable)

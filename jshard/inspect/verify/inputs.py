"""The inputs of verify, equal on every mesh, and the program with a name for
each result. Every floating-point array becomes whole numbers modulo a prime."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import Literal
from jax.sharding import Mesh, NamedSharding

from jshard.errors import JShardError
from jshard.inspect.ledger.tracing import Traced, is_array, is_inexact
from jshard.inspect.verify.residues import mixed, widened
from jshard.layers.layer import Path, model_arrays, parameter_of
from jshard.layers.linen import positional_names
from jshard.layers.sharded_call import alone
from jshard.layouts.gathering import is_key, kind, on_host, put, raw, typed
from jshard.layouts.layout import Layout
from jshard.layouts.paths import key_of, slashed, words_of
from jshard.programs.jaxprs import Shaped, bare
from jshard.signals.active_config import configuration
from jshard.signals.claims import found_claims


def draw(name: str, shape: tuple[int, ...], prime: int, seed: int) -> np.ndarray:
    """Return the numbers of an array, from its name and the seed alone: each residue modulo the prime is equally likely."""
    random = np.random.default_rng(zlib.crc32(f"{seed} {name}".encode()))
    return random.integers(-(prime // 2), prime // 2 + 1, shape, np.int32)


def near(name: str, given: object, *, parameter: bool) -> np.ndarray:
    """Return numbers near the given arrays', for the true operations: each within a third
    of itself. A parameter of zeros, and an array without numbers, get small random ones."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    if isinstance(given, jax.ShapeDtypeStruct):
        return random.normal(0, 0.3, given.shape)
    values = on_host(given).astype(np.float64)
    moved = values * random.uniform(0.7, 1.3, values.shape)
    return random.normal(0, 0.1, values.shape) if parameter and not values.any() else moved


def shaken(numbers: list[Any], size: float, seed: int) -> list[Any]:
    """Move each number by up to `size`, relative to itself."""
    random = np.random.default_rng(seed)
    return [
        each * random.uniform(1 - size, 1 + size, each.shape) if getattr(each, "dtype", None) == np.float64 else each
        for each in numbers
    ]


@dataclasses.dataclass(frozen=True)
class Named:
    """The results of a function, with names: `Named({"loss": value})`."""

    results: Mapping[str, Any]


def named_leaves(name: str, tree: object) -> dict[str, Any]:
    """Return the arrays of a state or of gradients by name: `model.up.kernel`."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {".".join([name, *words_of(path)]): leaf for path, leaf in paths}


class Subject:
    """A call `f(*args)` to run on any mesh: its value, and the gradients of all
    floating-point arguments. A function that already holds gradients gets no more."""

    def __init__(self, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], backward: bool | None):
        self.returned: list[str] = []
        self.title = getattr(f, "__name__", type(f).__name__)
        self._value_name = "value" if self.title in ("<lambda>", "named") else self.title

        def named(f: Callable[..., Any], *args: object, **kwargs: object) -> Any:
            result = f(*args, **kwargs)
            if isinstance(result, Named):
                self.returned[:] = list(result.results)
                return list(result.results.values())
            paths = jax.tree_util.tree_flatten_with_path(result)[0]
            self.returned[:] = [self._value_name + jax.tree_util.keystr(path) for path, leaf in paths if is_array(leaf)]
            return result

        self.traced = Traced(named, (f, *args), kwargs)
        self.backward, self.with_gradients = backward, None
        self.names = self._names(["f", *positional_names(f, len(args))])
        self.of_optimizers: set[str] = set()  # the names of their state
        self.signals = self._signals()

    @property
    def given(self) -> list[Any]:
        """The arrays as given."""
        return self.traced.arrays

    def _names(self, arguments: Sequence[str]) -> list[str]:
        """Return a name for each input array, modules' first: `model.up.kernel` or `batch["x"]`."""
        paths = [(_label(each.outer, arguments), *map(str, each.inner[1:])) for each in self.traced.paths]
        return [".".join(filter(None, words)) for words in paths]

    def _signals(self) -> dict[str, tuple[str, ...]]:
        """Return the signal of each parameter, by name: the signal it was built under, or its claim's."""
        present, claims = configuration(), {}
        found: dict[str, tuple[str, ...]] = {}
        of_models: dict[Path, tuple[str, ...]] = {}
        paths = {name: each.inner for name, each in zip(self.names, self.traced.paths, strict=True) if each.inner}
        parameters = {each.inner for each in self.traced.paths if each.is_parameter}
        placed = model_arrays(self.traced.nodes)
        if present is not None:  # claims of a model that only a function of jshard.shard takes
            claims = found_claims(present, {slashed(path[1:]) for path in parameters})
        for name, path in paths.items():
            under, claim = placed[path].signal_path, claims.get(slashed(path[1:]))
            if not under and path in parameters and claim is not None:
                under = tuple(claim.signal.name.split("/"))
            if under:
                found[name] = of_models[path[1:]] = under
        for name, (number, *rest) in paths.items():  # optimizer state, by its parameters
            if isinstance(self.traced.nodes[number], nnx.Optimizer):
                self.of_optimizers.add(name)
                if (of := parameter_of(tuple(rest), of_models)) is not None:
                    found[name] = of_models[of]
        return found

    # -- its arrays --

    def probes(self, prime: int, seed: int) -> list[Any]:
        """Return whole numbers modulo a prime for floating-point arrays, and all others as given."""
        return [
            np.asarray(draw(name, array.shape, prime, seed)) if is_inexact(array) else _as_given(name, array)
            for name, array in zip(self.names, self.given, strict=True)
        ]

    def natural(self) -> list[Any]:
        """Return the arrays as given, with floating-point numbers moved to general positions."""
        return [
            near(name, array, parameter=name in self.signals and name not in self.of_optimizers)
            if is_inexact(array)
            else _as_given(name, array)
            for name, array in zip(self.names, self.given, strict=True)
        ]

    def placed(self, numbers: list[Any], mesh: Mesh, *, wide: bool = False) -> list[Any]:
        """Return the arrays on `mesh`, in the layouts of the given arrays; floats in 64 bits if `wide`."""
        return [
            _place(name, each, array, mesh, widened(array.dtype) if wide else array.dtype)
            for name, each, array in zip(self.names, numbers, self.given, strict=True)
        ]

    # -- its text --

    def trace(self, arrays: list[Any]) -> tuple[Any, list[str], list[int]]:
        """Return the jaxpr, a name for each result, and the numbers of computed results (not just passed through)."""
        traced = self.traced.with_arrays(arrays)
        if self.with_gradients is None:
            self.with_gradients = traced.lacks_backward(self.backward)
        if self.with_gradients:
            cotangent = lambda number, leaf: _cotangent(self.returned[number], leaf)
            jaxpr = jax.make_jaxpr(functools.partial(traced.call_with_gradients, cotangent=cotangent))(arrays)
        else:
            jaxpr = traced.forward()
        names = list(self.returned)
        names += [f"{name} after" for name in self.names[: self.traced.state_tree.num_leaves]]
        if self.with_gradients:
            inexact = [name for name, array in zip(self.names, self.given, strict=True) if is_inexact(array)]
            names += [f"gradient of {name}" for name in inexact]
        results, operands = bare(jaxpr).outvars, set(bare(jaxpr).invars)
        assert len(names) == len(results)
        made = [n for n, each in enumerate(results) if not isinstance(each, Literal) and each not in operands]
        return jaxpr, names, made

    def changed_plainly(self) -> list[str]:
        """Return the names of the results changed by a call on one device, where jshard splits nothing."""
        shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in self.given]
        with alone():
            _, names, made = self.trace(shapes)
        return [names[number] for number in made]


def _cotangent(name: str, leaf: Shaped) -> Any:
    """Return the cotangent of a result: 1 for a scalar, small nonzero numbers for an array. They depend on its name and
    each element's position in the whole array, so they are equal for every split, and each device computes its own."""
    if not leaf.ndim:
        return jnp.ones_like(leaf)
    sharding = jax.typeof(leaf).sharding
    where = None if sharding.mesh.empty else sharding
    bits: Any = jnp.uint32(zlib.crc32(name.encode()))
    for axis in range(leaf.ndim):
        bits = mixed(bits + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis, out_sharding=where))
    small = (bits % jnp.uint32(4)).astype(jnp.int32) - 2
    return jnp.where(small < 0, small, small + 1).astype(leaf.dtype)


def _label(path: tuple[Any, ...], arguments: Sequence[str]) -> str:
    """Return a path into (named, (f, *args), kwargs), in the user's words."""
    if not path or key_of(path[0]) == 0:
        return ""
    name = key_of(path[1]) if key_of(path[0]) == 2 else arguments[key_of(path[1])]
    return f"{name}{jax.tree_util.keystr(path[2:])}"


def _as_given(name: str, array: object) -> Any:
    if not isinstance(array, jax.ShapeDtypeStruct):
        return array
    if is_key(array):
        raise JShardError(
            f"{name} is a ShapeDtypeStruct, and verify can't invent a random key", hint="pass the key itself"
        )
    return (np.arange(np.prod(array.shape, dtype=int)).reshape(array.shape) % 2).astype(array.dtype)


def _place(name: str, numbers: Any, given: Any, mesh: Mesh, dtype: Any) -> Any:
    sharding = getattr(given, "sharding", None)
    dtype = np.int32 if is_inexact(given) and numbers.dtype == np.int32 else dtype  # probes stay whole numbers
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        if isinstance(numbers, jax.Array) and is_key(given):
            return numbers
        return jnp.asarray(np.asarray(numbers), jax.dtypes.canonicalize_dtype(dtype))
    missing = [axis for axis in sharding.mesh.axis_names if axis not in mesh.axis_names]
    if missing:
        raise JShardError(
            f'{name} is on a mesh with an axis "{missing[0]}", but the configured mesh is {dict(mesh.shape)}',
            hint="place it on jshard.mesh(): jshard.place(x, layout)",
        )
    layout = Layout.from_sharding(NamedSharding(mesh, sharding.spec), len(given.shape))
    layout.shard_shape(given.shape, label=name)
    if is_key(given):
        return typed(put(on_host(raw(numbers)), layout.sharding), kind(numbers))
    return put(on_host(numbers).astype(dtype), layout.sharding)

"""`module:function` and its `--args` on the command line, in place of an experiment."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jshard.errors import JShardError, did_you_mean
from jshard.inspect.ledger import Ledger, Traced, ledger_of
from jshard.inspect.plan import Plan, Topology, explain, plan
from jshard.inspect.plan.aot import LIMIT
from jshard.inspect.plan.planning import program_of
from jshard.inspect.verify import Verification, verify
from jshard.layers.creating import abstract
from jshard.layers.user_code_errors import as_user_error
from jshard.layouts.layout import Layout
from jshard.signals.active_config import mesh
from jshard.signals.config import Configuration
from jshard.signals.schema import IMPORT_PATH
from jshard.training.components import function_at, parameters_of, value_at

DTYPES = (
    "float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "int32", "int8", "int16", "int64", "uint32",
    "uint8", "uint16", "uint64", "bool", "complex64", "key",
)  # fmt: skip
FORM = re.compile(r"(\w+)\[([0-9, ]*)\](?:@(.+))?")
EXAMPLE = "float32[64,784], float32[64,784]@data or train:model"


@dataclasses.dataclass(frozen=True)
class Shape:
    """The description of an array argument: `float32[64,784]@data,None` has a dtype, sizes and the mesh axes of each axis."""

    word: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...] | None  # None: no sharding is given

    @classmethod
    def of(cls, word: str) -> Shape:
        found = FORM.fullmatch(word)
        if found is None:
            raise JShardError(f'--args "{word}" is neither a shape nor a function', hint=f"write it like {EXAMPLE}")
        dtype, sizes, axes_words = found[1], [size.strip() for size in found[2].split(",")], found[3]
        if dtype not in DTYPES:
            hint = did_you_mean(dtype, DTYPES, f"use {', '.join(DTYPES[:3])}, int32 or another of JAX")
            raise JShardError(f'--args "{word}" has the dtype "{dtype}", which jshard does not know', hint=hint)
        if dtype in ("float64", "int64", "uint64") and not jax.config.read("jax_enable_x64"):
            narrow = f"{dtype[:-2]}32{word.removeprefix(dtype)}"
            raise JShardError(
                f'--args "{word}" is 64 bits wide, and JAX runs in 32', hint=f"write {narrow}, or set JAX_ENABLE_X64=1"
            )
        if "" in sizes[: -1 if len(sizes) > 1 else None] and sizes != [""]:
            raise JShardError(f'--args "{word}" has an empty size', hint=f"write it like {EXAMPLE}")
        axes = None if axes_words is None else tuple(map(_mesh_axes, axes_words.split(",")))
        return cls(word, dtype, tuple(int(size) for size in sizes if size), axes)

    def made(self, configuration: Configuration, *, only_shapes: bool) -> Any:
        """Return the argument as a `ShapeDtypeStruct`; a random key is an array unless `only_shapes`."""
        if self.dtype == "key":
            if not only_shapes:
                return jax.random.split(jax.random.key(0), self.shape) if self.shape else jax.random.key(0)
            return jax.ShapeDtypeStruct(self.shape, jax.eval_shape(lambda: jax.random.key(0)).dtype)
        dtype = jnp.dtype(self.dtype)
        if self.axes is None:
            return jax.ShapeDtypeStruct(self.shape, dtype)
        for name in (name for names in self.axes for name in names):
            known = configuration.mesh.names if configuration.mesh else ()
            if configuration.mesh is not None and name not in known:
                raise JShardError(
                    f'--args "{self.word}" names mesh axis "{name}", which is not in jshard.mesh '
                    f"({configuration.mesh.place}: {', '.join(known)})",
                    hint=did_you_mean(name, known, f"use {' or '.join(known)}"),
                )
        axes = (*self.axes, *((),) * (len(self.shape) - len(self.axes)))
        layout = Layout(mesh(), *axes)
        layout.shard_shape(self.shape, label=f'--args "{self.word}"')
        return jax.ShapeDtypeStruct(self.shape, dtype, sharding=layout.sharding)


def _mesh_axes(word: str) -> tuple[str, ...]:
    return () if word.strip() in ("", "None") else tuple(name.strip() for name in word.split("+"))


@dataclasses.dataclass(frozen=True)
class Maker:
    """A model, optimizer, array or tree, or a function without arguments for it; a tuple is several arguments."""

    word: str
    function: Callable[[], Any]

    @classmethod
    def of(cls, word: str) -> Maker:
        value = value_at(label := f'--args "{word}" names a function, but', word)
        if _is_made(value) or jax.tree.structure(value) != jax.tree.structure(0):
            return cls(word, lambda: value)
        function = function_at(label, word)
        needed = [
            each.name for each in parameters_of(function).values() if each.default is each.empty and each.kind < 2
        ]
        if needed:
            raise JShardError(
                f'--args "{word}" is called without arguments, and needs "{needed[0]}"',
                hint="write a function around it that takes none",
            )
        return cls(word, function)

    def made(self, configuration: Configuration, *, only_shapes: bool) -> Any:
        with as_user_error(f"{self.word} is called"):
            return _described(self.function) if only_shapes else self.function()


def _described(function: Callable[[], Any]) -> Any:
    """Call a function with shapes in place of arrays; return all other leaves unchanged."""
    kept: list[Any] = []
    trees: list[Any] = []

    def arrays() -> list[Any]:
        leaves, tree = jax.tree.flatten(function(), is_leaf=_is_node)
        trees[:], kept[:] = [tree], [None if _is_made(leaf) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if _is_made(leaf)]

    shapes = iter(abstract(arrays))
    return jax.tree.unflatten(trees[0], [next(shapes) if leaf is None else leaf for leaf in kept])


def _is_node(leaf: object) -> bool:
    return isinstance(leaf, (nnx.Pytree, nnx.Variable))


def _is_made(leaf: object) -> bool:
    return _is_node(leaf) or isinstance(leaf, (jax.Array, np.ndarray))


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """A function and the makers of its arguments; nothing is called yet."""

    name: str
    f: Callable[..., Any]
    arguments: tuple[Shape | Maker, ...]

    @classmethod
    def of(cls, name: str, words: Sequence[str]) -> FunctionCall:
        """Import the function `name`, a `module:function`; each word is a shape or another `module:function`."""
        f = function_at(f'"{name}" names a function, but', name)
        if inspect.isclass(f):
            raise JShardError(f'"{name}" names a class', hint="name a function that calls it")
        return cls(name, f, tuple(Maker.of(word) if IMPORT_PATH.parse(word) else Shape.of(word) for word in words))

    def built(self, configuration: Configuration, _: object, *, only_shapes: bool) -> Function:
        """Build the arguments, on the mesh of the loaded configuration."""
        args: list[Any] = []
        for argument in self.arguments:
            made = argument.made(configuration, only_shapes=only_shapes)
            args += made if type(made) is tuple else [made]
        _check_taken(self.name, self.f, args)
        return Function(self.name, self.f, tuple(args), configuration)


def _check_taken(name: str, f: Callable[..., Any], args: Sequence[Any]) -> None:
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):  # a builtin has none
        return
    try:
        signature.bind(*args)
    except TypeError:
        takes = ", ".join(signature.parameters) or "nothing"
        gives = f"{len(args)} argument{'' if len(args) == 1 else 's'}"
        raise JShardError(
            f"{name} takes {takes}, and is given {gives}",
            hint=f"write one word for each argument after --args, such as {EXAMPLE}",
        ) from None


@dataclasses.dataclass(frozen=True)
class Function:
    """A function and its arguments; with shapes for arguments it can be explained and compiled, not run."""

    name: str
    f: Callable[..., Any]
    args: tuple[Any, ...]
    configuration: Configuration

    def explain(self) -> Ledger:
        """List every collective of the function and of its gradients; an optimizer argument adds its memory."""
        return explain(self.f, *self.args)

    @property
    def asked(self) -> Ledger:
        """The requested collectives, without the compiler's: nothing is compiled."""
        traced = Traced(self.f, self.args, {})
        return ledger_of(traced, traced.nodes)

    def lowered(self) -> Any:
        """Lower the function for the devices of the mesh."""
        program, args, kwargs = program_of(Traced(self.f, self.args, {}), None)
        return program.lower(*args, **kwargs)

    def plan(self, topology: Topology, *, limit: float = LIMIT) -> Plan:
        """Compile the function for a topology of absent devices."""
        return plan(self.f, *self.args, topology=topology.name, limit=limit)

    def verify(self, meshes: Sequence[Mapping[str, int]] = ()) -> Verification:
        """Verify value and gradients, sharded against unsharded; shapes are filled with numbers."""
        return verify(self.f, *self.args, meshes=meshes)

"""`jshard.shard`: partition an unmodified Flax model, or a function of a model, by the configuration's claims."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.core import Tracer

from jshard.errors import JShardError, kind_of
from jshard.layers.layer import AuxLoss, is_by_layers, is_sharded, parameters_by_path
from jshard.layers.linen import arguments, check_names, is_callable_tree, trees_of_parameters
from jshard.layers.recording import recorder
from jshard.layers.sharded_call import Call, alone
from jshard.layers.user_code_errors import boundary, name_of
from jshard.signals.active_config import configuration, use_stages
from jshard.signals.claims import check_globs
from jshard.signals.scope import unplaced

M = TypeVar("M", bound=nnx.Module | nn.Module)
P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class ShardedFunction(Protocol[P, R]):
    """A function partitioned by `jshard.shard`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def place(self, *args: object, **kwargs: object) -> Any:
        """Return the trees of parameters among the arguments, sharded for such a call; NNX models
        are sharded in place. A single tree is returned by itself."""


@overload
def shard(program: M, *args: object, **kwargs: object) -> M: ...
@overload
def shard(program: Callable[P, R], *, parameters: str | Sequence[str] = "params") -> ShardedFunction[P, R]: ...
def shard(program: Any, *args: Any, **kwargs: Any) -> Any:
    """Partition a model, or a function of a model, by the signals that claim its parameters.

    An NNX model keeps its class and code; a trace of its call with `args`, which may be `jax.ShapeDtypeStruct`s, places its
    parameters, else its first call does. A Linen module keeps its class and code too: its `init` returns sharded variables,
    and its `apply` is partitioned. For a function, `parameters` names the arguments that are trees of parameters ("params");
    Linen's variables, a TrainState and a model of Equinox are recognised under any name. `shard(f).place(*args)` returns
    these trees sharded.

    Without a configuration everything runs unchanged. With `axis_types: auto` the signals place parameters and rows and
    constrain activations by `sequence`; XLA partitions the program.
    """
    use_stages()
    if isinstance(program, nnx.Module):
        if not is_sharded(program):
            subclass = _sharded_class if is_by_layers(program) else _unplaced_class
            program.__class__ = subclass(type(program))
        if (present := configuration()) is not None and present.has_claims:
            check_globs(present, parameters_by_path(program))
        if args or kwargs:
            place(program, *args, **kwargs)
        return program
    if is_callable_tree(program):
        raise JShardError(
            f"jshard.shard was given a {type(program).__name__}, which is a tree of arrays",
            hint="write loss = jshard.shard(loss) and model = loss.place(model, ...), which returns it placed",
        )
    if not isinstance(program, nn.Module):
        check_program("jshard.shard", program)
    names = kwargs.pop("parameters", ("params",)) if not isinstance(program, nn.Module) else ()
    names = (names,) if isinstance(names, str) else tuple(names)
    if args or kwargs:
        linen = isinstance(program, nn.Module)
        name = type(program).__name__ if linen else getattr(program, "__name__", type(program).__name__)
        raise JShardError(
            f"jshard.shard was given arguments for {name}, which holds no parameters",
            hint=f"write {'shard(module).init' if linen else f'shard({name}).place'}(...), which returns them placed",
        )
    if isinstance(program, nn.Module):
        if not is_sharded(program):
            linen = _sharded_linen_class(type(program))
            program = program.clone()
            object.__setattr__(program, "__class__", linen)  # Linen's own __setattr__ refuses frozen modules
        return program
    check_names(program, names if names != ("params",) else ())
    return sharded(program, names)


def check_program(op_name: str, program: object) -> None:
    """Raise an error for a class, or for a value that cannot be called."""
    if isinstance(program, type):
        name = program.__name__
        raise JShardError(f"{op_name} was given the class {name}", hint=f"build it: {op_name}({name}(...))")
    if not callable(program):
        fault = f"{op_name} was given {kind_of(program)}"
        raise JShardError(fault, hint="give it a Flax model, or a function that takes one")


def place(model: nnx.Module, *args: object, **kwargs: object) -> None:
    """Shard the parameters of a model for a call with these arguments, which may be abstract."""
    _placed(type(model)._jshard_original.__call__, (model, *args), kwargs)  # type: ignore[attr-defined]  # is_sharded


def partitioned(model: nnx.Module, f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f`, a function of the model, partitioned if the model is."""
    return sharded(f) if is_sharded(model) else f


def objective_of(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return the training objective: `loss(model, *batch)` plus all auxiliary losses."""

    def objective(model: nnx.Module, *batch: object) -> Any:
        value = loss(model, *batch)
        for auxiliary in jax.tree.leaves(nnx.state(model, AuxLoss)):
            value = value + jnp.sum(auxiliary)
        return value

    return objective


@contextlib.contextmanager
def as_sharded(modules: Sequence[Any]) -> Iterator[None]:
    """Partition the calls of these NNX modules inside the context, as after `shard(module)`."""
    not_yet = _unplaced(modules)  # `jshard.jit` places these
    before = [(module, type(module)) for module in [*not_yet, *filter(_is_callable_module, modules)]]
    for module, cls in before:
        module.__class__ = getattr(cls, "_jshard_placed", None) or _sharded_class(cls)
    try:
        yield
    finally:
        for module, cls in before:
            module.__class__ = cls


def _is_callable_module(x: object) -> bool:
    """Return True for a callable NNX module, unless its layers place themselves or it is already sharded."""
    is_called = any("__call__" in vars(cls) for cls in type(x).__mro__)
    return isinstance(x, nnx.Module) and is_called and not is_sharded(x) and not is_by_layers(x)


@functools.cache
def _sharded_class(cls: type) -> type:
    """Return a subclass of `cls` with a partitioned call."""
    return _subclass(cls, {"__call__": _partitioned_call(cls)})


def _subclass(cls: Any, names: dict[str, Any]) -> type:
    """Return a subclass with these methods and the name of `cls`; its instances are pickled as instances of `cls`."""

    def reduce_ex(self: Any, protocol: Any) -> Any:
        make, (_, *rest), *state = cls.__reduce_ex__(self, protocol)
        return _unpickled, (cls, make, *rest), *state

    names = {**names, "__reduce_ex__": reduce_ex, "_jshard_original": cls}
    return type(cls)(cls.__name__, (cls,), {**names, "__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _unpickled(cls: Any, make: Callable[..., Any], *rest: Any) -> Any:
    return make(_sharded_linen_class(cls) if issubclass(cls, nn.Module) else _sharded_class(cls), *rest)


@functools.cache
def _unplaced_class(cls: type) -> type:
    """Return a partitioned subclass for a model not placed yet; a trace cannot move its parameters, and raises an error."""
    return _subclass(cls, {"__call__": _partitioned_call(cls), "_jshard_placed": _sharded_class(cls)})


def _partitioned_call(cls: type) -> Callable[..., Any]:
    def call(self: object, *args: object, **kwargs: object) -> Any:
        return _run(cls.__call__, (self, *args), kwargs)

    return functools.update_wrapper(call, cls.__call__)


@functools.cache
def _sharded_linen_class(cls: Any) -> type:
    """Return a subclass of a Linen module with a sharded `init` and a partitioned `apply`."""

    @nn.nowrap
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(types.MethodType(cls.apply, self), args, kwargs)

    @nn.nowrap
    def init(self: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        def made(rngs: Any) -> Any:
            with alone():
                return cls.init(self, rngs, *args, **kwargs)

        if configuration() is None or unplaced.value:
            return cls.init(self, rngs, *args, **kwargs)
        described = jax.eval_shape(made, rngs), *args
        placed = _placed(types.MethodType(cls.apply, self), described, {**kwargs, "rngs": rngs, "mutable": True})
        cast = lambda rngs: jax.tree.map(lambda x, like: x.astype(like.dtype), made(rngs), placed)
        return jax.jit(cast, out_shardings=jax.tree.map(lambda x: x.sharding, placed))(rngs)

    return _subclass(cls, {"apply": apply, "init": init})


def sharded(f: Callable[..., Any], names: Sequence[str] = ("params",)) -> Callable[..., Any]:
    """Partition each call of `f`, whose arguments `names` are trees of parameters."""

    @functools.wraps(f)
    def call(*args: object, **kwargs: object) -> Any:
        return _run(f, args, kwargs, names)

    call.place = lambda *args, **kwargs: _placed(f, args, kwargs, names)  # type: ignore[attr-defined]  # ShardedFunction
    return call


@boundary
def _placed(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str] = ("params",)
) -> Any:
    """Shard NNX models among the arguments for such a call, in place, and return the trees of parameters sharded."""
    if configuration() is None:
        trees = list(trees_of_parameters(arguments(f, args, kwargs), names).values())
    else:
        as_placed((*args, *kwargs.values()))
        call = Call(f, args, kwargs, names)
        has_model = any(isinstance(x, nnx.Module) for x in (*args, *kwargs.values()))
        if not has_model and not any(each.path for each in call.described):
            first = next(iter(getattr(getattr(f, "__code__", None), "co_varnames", ())), "params")
            raise JShardError(
                f"{getattr(f, '__name__', 'the function')} has no model and no argument of parameters to place",
                hint=f'write jshard.shard({getattr(f, "__name__", "f")}, parameters="{first}")',
            )
        trees = call.kept(call.placed())
    return trees[0] if len(trees) == 1 else tuple(trees)


@boundary
def _run(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str] = ("params",)
) -> Any:
    if configuration() is None or unplaced.value:
        return f(*args, **kwargs)
    return call_of(f, args, kwargs, names).run(name_of(f))


def call_of(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str] = ("params",)
) -> Call:
    """Return a call of `f`; raise an error if a traced model's parameters would stay whole on every device."""
    traced = _unplaced_in_trace((*args, *kwargs.values()))
    call = Call(f, args, kwargs, names)
    is_final = recorder() is None  # `jshard.jit` traces once before it places
    if traced and is_final and any(each.lies.at_rest.mesh_axes for each in call.program.placed.values()):
        raise _unplaced_error(f, traced[0], args)
    return call


def _unplaced(args: Sequence[Any]) -> list[Any]:
    """Return the models without placed parameters."""
    return [each for each in args if hasattr(type(each), "_jshard_placed")]


def as_placed(models: Sequence[Any]) -> None:
    """Mark models as placed, for an abstract trace of a call."""
    for model in _unplaced(models):
        model.__class__ = type(model)._jshard_placed


def _unplaced_in_trace(args: Sequence[Any]) -> list[Any]:
    """Return the unplaced models with traced parameters; mark the others as placed, because their call places them."""
    traced = []
    for model in _unplaced(args):
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(nnx.state(model, nnx.Param))):
            traced.append(model)
        else:
            model.__class__ = type(model)._jshard_placed
    return traced


def _unplaced_error(f: Callable[..., Any], model: Any, args: Sequence[Any]) -> JShardError:
    shapes = [
        f'jax.ShapeDtypeStruct({x.shape}, "{x.dtype}")' for x in args if hasattr(x, "dtype") and hasattr(x, "shape")
    ]
    is_its_call = f is type(model)._jshard_original.__call__
    call = "model = jshard.shard(" if is_its_call else f"jshard.shard({name_of(f)}).place("
    return JShardError(
        f"{type(model).__name__} is traced, and no earlier call has placed its parameters: every device would keep all of them",
        hint=f"write {call}{', '.join(['model', *shapes])}) first, or @jshard.jit for @nnx.jit",
    )

"""`jshard.create`: models and arrays created directly as shards, and models of shapes only."""

from __future__ import annotations

import dataclasses
import functools
from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax._src.core import trace_state_clean
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jshard.errors import JShardError
from jshard.layers.call_arguments import is_node
from jshard.layers.layer import built_arrays
from jshard.layers.user_code_errors import boundary, in_own_words, name_of
from jshard.layouts.creation import create_by
from jshard.layouts.layout import Layout
from jshard.layouts.mesh import with_axis_types
from jshard.layouts.paths import keys_of
from jshard.layouts.redistribution import replicated
from jshard.programs.jaxprs import ClosedJaxpr, Eqn, bound, evaluate, makers
from jshard.programs.provenance import line_here
from jshard.signals.active_config import configuration, mesh, on_mesh
from jshard.signals.scope import signal, signal_here, tensor_layout

Made = TypeVar("Made")
Model = TypeVar("Model", bound=nnx.Module)
SMALL = 1024  # largest size of an array computed in advance, such as the keys of random draws
TAG = "jshard.create"  # of the NNX context that keeps object identity across the trace


@boundary
def create(f: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Return the result of `f(*args, **kwargs)` without making any array whole on a device.

    A model, an optimizer or a tree of parameters holds shapes until a function under `jshard.jit` takes it; each device then
    makes its own shards, with the numbers of plain creation. An optimizer of such a model is created likewise. A single
    array, under a signal, is made at once, in the signal's layout.

        model = jshard.create(Model, rngs=nnx.Rngs(0))
        optimizer = jshard.create(nnx.Optimizer, model, optax.adamw(1e-3), wrt=nnx.Param)

    Without a configuration, and in a trace, this is `f(*args, **kwargs)`.
    """
    if (present := configuration()) is None or present.mesh is None:
        return f(*args, **kwargs)
    if not trace_state_clean():
        result = f(*args, **kwargs)
        return signal.tensor(result) if isinstance(result, jax.Array) else result
    result = described(f, *args, **kwargs)
    if not isinstance(result, Uncreated):
        return result
    layout = tensor_layout(signal_here("jshard.create"), result.ndim)
    return realized([result.at(layout.sharding)])[0]


def described(f: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Trace `f` abstractly, and return its result with shapes in place of arrays. NNX objects among
    the arguments change as in a call; for example, random streams advance."""
    name = f"jshard.create({name_of(f)}) at {line_here()}"
    operands, tree = jax.tree.flatten((args, kwargs), is_leaf=is_node)
    given = [x for x in operands if _is_array(x)]
    with nnx.update_context(TAG):
        with nnx.split_context(TAG) as context:
            graph, state = context.split(list(filter(is_node, operands)))
        held, structure = jax.tree.flatten(state)
        form: list[Any] = []

        def traced(*xs: object) -> list[Any]:
            with nnx.merge_context(TAG, True) as context:
                nodes = context.merge(graph, jax.tree.unflatten(structure, xs[: len(held)]))
            objects, arrays = iter(nodes), iter(xs[len(held) :])
            inner = [next(objects) if is_node(x) else next(arrays) if _is_array(x) else x for x in operands]
            args, kwargs = jax.tree.unflatten(tree, inner)
            with nnx.use_eager_sharding(False):  # else an annotated variable needs a mesh with axes of its names
                leaves, of_result = jax.tree.flatten(in_own_words(f)(*args, **kwargs), is_leaf=is_node)
            with nnx.split_context(TAG) as context:
                after, left = context.split((nodes, list(filter(is_node, leaves))))
            _check_nothing_is_static(name, after)
            paths, of_left = jax.tree_util.tree_flatten_with_path(left)
            form[:] = after, of_left, [keys_of(path)[0] == 0 for path, _ in paths], leaves, of_result
            return [*(x for _, x in paths), *filter(_is_array, leaves)]

        jaxpr = jax.make_jaxpr(traced)(*held, *given)
        after, of_left, are_given, leaves, of_result = form
        outs = _shapes(Recipe.of(name, jaxpr, [*held, *given]), are_given)
        with nnx.merge_context(TAG, False) as context:
            _, made = context.merge(after, jax.tree.unflatten(of_left, outs[: len(are_given)]))
    objects, arrays = iter(made), iter(outs[len(are_given) :])
    for node in made:
        _lay_out(node)
    result = [next(objects) if is_node(x) else next(arrays) if _is_array(x) else x for x in leaves]
    return jax.tree.unflatten(of_result, result)


def _check_nothing_is_static(name: str, graph: Any) -> None:
    """Raise an error for an array held outside of the model's variables: it would be a tracer after the trace."""
    for attribute, held in graph.attributes:
        if isinstance(getattr(held, "value", None), Tracer):
            raise JShardError(
                f"{name} computes the array {attribute} outside of a variable",
                hint=f"write self.{attribute} = nnx.Variable(...), or build the model without jshard.create",
            )


def _shapes(recipe: Recipe, are_given: Sequence[bool]) -> list[Any]:
    """Return a shape for each result of a recipe, or an array for operands and small parts of arguments."""
    operands = dict(zip(recipe.jaxpr.invars, recipe.operands, strict=True))
    outs = []
    for number, variable in enumerate(recipe.jaxpr.outvars):
        is_variable = not hasattr(variable, "val")
        if is_variable and variable in operands:
            outs.append(operands[variable])
        elif is_variable and variable in recipe.known and number < len(are_given) and are_given[number]:
            outs.append(recipe.known[variable])
        else:
            outs.append(Uncreated(variable.aval, recipe, number, sharding=_typed(variable.aval)))
    return outs


def _typed(aval: Any) -> NamedSharding | None:
    """Return the sharding in the type of an array, as on an explicit mesh; None if it is not split."""
    spec = aval.sharding.spec
    return NamedSharding(mesh(), spec) if any(spec) else None


def _lay_out(node: object) -> None:
    """Set the sharding and dtype of the shapes in jshard's layers built under signals."""
    if not isinstance(node, nnx.Module):
        return
    built = built_arrays(node)
    for path, variable in nnx.to_flat_state(nnx.state(node)):
        x, known = variable.get_raw_value(), built[path]
        if known.layout is not None and known.signal is not None and isinstance(x, Uncreated):
            variable.set_raw_value(x.at(known.layout.sharding, known.signal.dtype.param))


def _is_array(x: object) -> bool:
    return isinstance(x, (jax.Array, jax.ShapeDtypeStruct))


# -- models of shapes only --


def abstract(factory: Callable[[], Made]) -> Made:
    """Build the NNX modules, optimizers or trees of `factory()`, with a `jax.ShapeDtypeStruct` for each array.

        model = abstract(lambda: Model(rngs=nnx.Rngs(0)))

    The shapes have the shardings of their signals on the loaded mesh, whose devices may be absent; arrays without a signal
    are replicated. Shardings are read from types, and a slice of devices (`shard: {workers: [0, 1]}`) is a separate mesh:
    arrays on it count as replicated.
    """
    if configuration() is None:
        return nnx.eval_shape(factory)
    home = mesh()
    with on_mesh(with_axis_types(home, "explicit")):
        model = nnx.eval_shape(factory)

    def placed(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = array.sharding.spec if isinstance(array.sharding, NamedSharding) else PartitionSpec()
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(home, spec))

    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(placed, state))


def created(factory: Callable[[], Model], placed: Callable[[], Model], only: Any = ...) -> Model:
    """Build the model of `placed()` with the numbers of `factory()`; each device computes only its
    own shards. Variables outside the filter `only` stay shapes."""
    model = abstract(placed)
    targets, tree = jax.tree.flatten(nnx.state(model, only))
    drawn = jax.tree.leaves(nnx.state(described(factory), only))
    shapes = [x.at(like.sharding, like.dtype) for x, like in zip(drawn, targets, strict=True)]
    nnx.update(model, jax.tree.unflatten(tree, realized(shapes)))
    return model


# -- uncreated arrays: each device makes its shards when a call first needs them --


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe:
    """A traced function for arrays to be made, with its operands: arrays, and shapes of other recipes."""

    name: str  # with the line of the call
    jaxpr: Any
    operands: Sequence[Any]
    known: dict[Any, Any]  # variable -> array, of the operands and of small arrays computed from them

    @classmethod
    def of(cls, name: str, closed: ClosedJaxpr, operands: Sequence[Any]) -> Recipe:
        """Return a recipe, with its small arrays computed."""
        jaxpr = closed.jaxpr
        known = dict[Any, Any]()

        def step(eqn: Eqn, xs: list[Any]) -> Sequence[Any]:
            is_known = not any(x is None for x in xs) and sum(variable.aval.size for variable in eqn.outvars) <= SMALL
            return bound(eqn, xs) if is_known else [None] * len(eqn.outvars)

        evaluate(closed, [None if isinstance(x, jax.ShapeDtypeStruct) else x for x in operands], step, known=known)
        return cls(name, jaxpr, operands, {variable: x for variable, x in known.items() if x is not None})

    @functools.cached_property
    def source(self) -> dict[Any, Any]:
        """The map from each variable to its equation."""
        return makers(self.jaxpr)

    def result(self, number: int) -> Any:
        """Compute a result from the known arrays, in a trace."""
        values, unmade = ChainMap[Any, Any]({}, self.known), dict(zip(self.jaxpr.invars, self.operands, strict=True))

        def value(atom: Any) -> Any:
            if hasattr(atom, "val"):
                return atom.val
            if atom not in values:
                if atom in unmade:
                    values[atom] = unmade[atom].drawn()
                else:
                    eqn = self.source[atom]
                    values.update(zip(eqn.outvars, bound(eqn, list(map(value, eqn.invars))), strict=True))
            return values[atom]

        return value(self.jaxpr.outvars[number])


class Uncreated(jax.ShapeDtypeStruct):
    """The shape of an array not made yet; each device makes its own shard once `jshard.jit` needs the array."""

    __slots__ = ("number", "recipe")

    def __init__(self, like: Any, recipe: Recipe, number: int, dtype: jnp.dtype | None = None, sharding: Any = None):
        super().__init__(like.shape, dtype or like.dtype, sharding=sharding, weak_type=like.weak_type)
        object.__setattr__(self, "recipe", recipe)
        object.__setattr__(self, "number", number)

    def at(self, sharding: Any, dtype: Any = None) -> Uncreated:
        """Return a copy with another sharding and dtype."""
        return Uncreated(self, self.recipe, self.number, dtype or self.dtype, sharding)

    def drawn(self) -> Any:
        """Compute the array, in a trace."""
        x = self.recipe.result(self.number)
        return x if x.dtype == self.dtype else jnp.asarray(x, self.dtype)

    def refuse(self, *_: object, **__: object) -> Any:
        raise JShardError(
            f"{self.recipe.name} makes {self.dtype}{list(self.shape)} when a function under jshard.jit is called with it",
            hint="call such a function first, outside of jax.jit",
        )

    __array__ = __jax_array__ = __getitem__ = __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = refuse


def realized(arrays: Sequence[Any]) -> list[Any]:
    """Return the arrays with each `Uncreated` made, in sequence, each device its own shard."""
    missing = [x for x in arrays if isinstance(x, Uncreated)]
    if missing and not trace_state_clean():
        missing[0].refuse()
    make = lambda x: create_by(x.drawn, Layout.of(x) or replicated(mesh(), x.ndim))
    return [make(x) if isinstance(x, Uncreated) else x for x in arrays]

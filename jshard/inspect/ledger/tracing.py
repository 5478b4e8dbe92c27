"""`jshard.explain(f, *args)`: the ledger of a function's forward and backward, read without running anything."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jshard.errors import JShardError
from jshard.inspect.ledger.entries import Unused
from jshard.inspect.ledger.jaxpr_walk import has_transposed, scopes_in
from jshard.inspect.ledger.ledger import Ledger, read
from jshard.inspect.ledger.memory import at_rest
from jshard.inspect.ledger.unsplit import unsplit
from jshard.inspect.user_code_errors import told
from jshard.layers.layer import model_arrays
from jshard.layers.training_step import Untyped
from jshard.layouts.mesh import is_explicit, present_mesh, with_axis_types
from jshard.layouts.paths import words_of
from jshard.signals.active_config import mesh, on_mesh
from jshard.signals.keys import unused


def explain(f: Callable[..., Any], *args: Any, backward: bool | None = None, **kwargs: Any) -> Ledger:
    """Every collective that `f(*args)` asks for, each with the YAML line that asked for it.

    Arguments are arrays, `jax.ShapeDtypeStruct`s, NNX modules and pytrees of them; `f` may be jitted, or a module. With
    `backward` left out, a function that holds a gradient already (a training step) is read as it is, and any other is
    read with the gradients of every floating-point array among its arguments. With an optimizer among the arguments, the
    ledger also says what is held between steps.

        print(jshard.explain(loss, model, x))
    """
    whole = Traced(f, args, kwargs)
    return ledger_of(whole, whole.nodes, backward=backward)


def ledger_of(whole: Traced, nodes: Sequence[Any], *, backward: bool | None = None) -> Ledger:
    """The ledger of a function whose arrays are those of these modules and optimizers, or of what they were split into."""
    loaded, is_typed = present_mesh(), False
    try:
        jaxpr = _jaxpr(whole, backward)
    except Untyped:  # the same, where types say how arrays lie
        twin, is_typed = with_axis_types(mesh(), "explicit"), True
        with on_mesh(twin):
            jaxpr = _jaxpr(whole.typed_on(twin), backward)
    ledger = read(jaxpr)
    models = [node for node in nodes if isinstance(node, nnx.Module)]
    modules = {tuple(map(str, path)): each for model in models for path, each in nnx.iter_modules(model)}
    built_under = {each.signal_path for each in model_arrays(nodes).values()}
    return dataclasses.replace(
        ledger,
        unused=tuple(Unused(signal.place, signal.name) for signal in unused({*scopes_in(jaxpr), *built_under})),
        memory=at_rest(nodes) if any(isinstance(node, nnx.Optimizer) for node in nodes) else (),
        unsplit=unsplit(jaxpr, whole.arrays, whole.names, modules),
        is_auto=bool(ledger.lines or whole.meshes)
        and not (is_typed or all(map(is_explicit, whole.meshes if loaded is None else [loaded]))),
    )


def _jaxpr(whole: Traced, backward: bool | None) -> Any:
    with told("it is traced"):
        return whole.with_gradients() if whole.lacks_backward(backward) else whole.forward()


class Traced:
    """A function and its arguments, to be traced with the arrays among them abstract. The user's modules stay as they
    are: what the function changes, it changes in copies."""

    def __init__(self, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.given = (f, args, kwargs)
        paths_and_leaves, self.tree = jax.tree_util.tree_flatten_with_path(self.given, is_leaf=_is_node)
        leaves = [leaf for _, leaf in paths_and_leaves]
        self.nodes = [leaf for leaf in leaves if _is_node(leaf)]
        self.graph, state = nnx.split(self.nodes)
        node_arrays, self.state_tree = jax.tree.flatten(state)
        self.static = [None if _is_node(leaf) or _is_array(leaf) else leaf for leaf in leaves]
        self.kinds = ["node" if _is_node(leaf) else "array" if _is_array(leaf) else "static" for leaf in leaves]
        self._forward: Any = None
        self.arrays = [*node_arrays, *(leaf for leaf, kind in zip(leaves, self.kinds, strict=True) if kind == "array")]
        outer = [path[2:] for path, leaf in paths_and_leaves if _is_node(leaf)]
        self.names = [*_parameter_names(outer, state), *(None for _ in self.arrays[len(node_arrays) :])]

    @property
    def meshes(self) -> set[Any]:
        """The meshes of more than one device that its arrays lie on."""
        shardings = (getattr(array, "sharding", None) for array in self.arrays)
        return {each.mesh for each in shardings if isinstance(each, NamedSharding) and each.mesh.size > 1}

    def typed_on(self, mesh: Mesh) -> Traced:
        """The same function of arrays that lie alike on `mesh`; they are only described."""
        typed = copy.copy(self)
        typed._forward, typed.arrays = None, [_lying_on(mesh, array) for array in self.arrays]
        return typed

    def call(self, arrays: list[Any]) -> tuple[Any, list[Any]]:
        """The function's arrays, and the state its modules are left in."""
        states = self.state_tree.num_leaves
        nodes = nnx.merge(self.graph, jax.tree.unflatten(self.state_tree, arrays[:states]))
        supply = {"node": iter(nodes), "array": iter(arrays[states:]), "static": None}
        leaves = [
            static if kind == "static" else next(supply[kind])
            for kind, static in zip(self.kinds, self.static, strict=True)
        ]
        f, args, kwargs = jax.tree.unflatten(self.tree, leaves)
        result = f(*args, **kwargs)
        returned = jax.tree.leaves(result)
        changed = jax.tree.leaves(nnx.split(nodes)[1])
        return [leaf for leaf in returned if _is_array(leaf)], changed

    def is_differentiable(self, arrays: list[Any]) -> bool:
        """Whether there is anything to differentiate, and anything to differentiate by."""
        shapes, _ = jax.eval_shape(self.call, arrays)
        return any(map(_is_inexact, arrays)) and any(map(_is_inexact, shapes))

    def lacks_backward(self, backward: bool | None) -> bool:
        """Whether a backward pass is to be added: as said, else where there is none yet and can be one."""
        return (
            self.is_differentiable(self.arrays) and not has_transposed(self.forward()) if backward is None else backward
        )

    def forward(self) -> Any:
        """The jaxpr of the call."""
        if self._forward is None:
            self._forward = jax.make_jaxpr(self.call)(self.arrays).jaxpr
        return self._forward

    def with_gradients(self) -> Any:
        """The jaxpr of the call and of the gradients of all its floating-point arguments."""
        return jax.make_jaxpr(self.call_with_gradients)(self.arrays).jaxpr

    def call_with_gradients(self, arrays: list[Any]) -> Any:
        """The gradients of all floating-point arrays, each result weighed alike, and what the call returns."""
        if not self.is_differentiable(self.arrays):
            raise JShardError(
                "explain was asked for a backward pass of a function with no floating-point argument or result",
                hint="use explain(..., backward=False)",
            )

        def of_inexact(inexact: list[Any]) -> Any:
            supply = iter(inexact)
            result, changed = self.call([next(supply) if _is_inexact(array) else array for array in arrays])
            smooth = [leaf for leaf in result if _is_inexact(leaf)]
            return smooth, (result, changed)

        smooth, pull, rest = jax.vjp(of_inexact, [a for a in arrays if _is_inexact(a)], has_aux=True)
        return pull([jnp.ones_like(leaf) for leaf in smooth]), rest


def _parameter_names(outer: Sequence[Any], state: Any) -> Iterator[tuple[str, ...] | None]:
    """For each array of the nodes at the paths `outer`: the path in its model if it is a parameter, else None."""
    is_variable = lambda each: isinstance(each, nnx.Variable)
    for path, variable in jax.tree_util.tree_flatten_with_path(state, is_leaf=is_variable)[0]:
        words = words_of((*outer[int(words_of(path)[0])], *path[1:]))
        name = tuple(itertools.dropwhile(str.isdecimal, words))  # the place of the model in a tuple
        yield from [name if isinstance(variable, nnx.Param) else None] * len(jax.tree.leaves(variable))


def _lying_on(mesh: Mesh, array: Any) -> Any:
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return array
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, sharding.spec))


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, (nnx.Pytree, nnx.Variable))


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_inexact(leaf: Any) -> bool:
    return _is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)

"""The ledger of a function's forward and backward pass, from a trace: nothing runs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding

from jshard.errors import JShardError
from jshard.inspect.ledger.claimed import claimed
from jshard.inspect.ledger.entries import Unused
from jshard.inspect.ledger.jaxpr_walk import has_transposed, scopes_in
from jshard.inspect.ledger.ledger import Ledger, read
from jshard.inspect.ledger.memory import at_rest
from jshard.inspect.ledger.whole import unsplit
from jshard.layers.layer import model_arrays
from jshard.layers.linen import positional_names
from jshard.layers.sharded_call import programs_in
from jshard.layers.sharding import as_placed
from jshard.layers.user_code_errors import as_user_error
from jshard.layouts.mesh import is_explicit, present_mesh
from jshard.layouts.paths import keys_of, words_of
from jshard.programs.jaxprs import Shaped, equations
from jshard.signals.active_config import configuration
from jshard.signals.globs import below
from jshard.signals.keys import unused
from jshard.signals.scope import entering


def ledger_of(traced: Traced, nodes: Sequence[Any], *, backward: bool | None = None) -> Ledger:
    """Return the ledger of a traced function with the arrays of these modules and optimizers."""
    with as_user_error("it is traced"):
        lacks = traced.lacks_backward(backward)
        jaxpr = (jax.make_jaxpr(traced.call_with_gradients)(traced.arrays) if lacks else traced.forward()).jaxpr
    loaded, ledger = present_mesh(), read(jaxpr)
    models = [node for node in nodes if isinstance(node, nnx.Module)]
    modules = {tuple(map(str, path)): each for model in models for path, each in nnx.iter_modules(model)}
    programs = programs_in(jaxpr)
    placed = {path: each for program in programs for path, each in program.placed.items()}
    inner = {*map(below, placed)}
    names = [None if "/".join(name or ()) in inner else name for name in traced.parameters]
    by_path = zip(traced.paths, traced.arrays, strict=True)
    parameters_first = sorted(by_path, key=lambda each: not each[0].is_parameter)
    claiming = [each.use.claim for each in placed.values()]
    signals = [claim.signal for claim in claiming] + [claim.stage.signal for claim in claiming if claim.stage]
    under = {each.signal_path for each in model_arrays(nodes).values()} | {tuple(s.name.split("/")) for s in signals}
    return dataclasses.replace(
        ledger,
        unused=tuple(Unused(signal.place, signal.name) for signal in unused({*scopes_in(jaxpr), *under})),
        memory=at_rest(nodes) if any(isinstance(node, nnx.Optimizer) for node in nodes) else (),
        placed=placed,
        programs=tuple(programs),
        claims=claimed(
            ((traced.argument(each), each.words, array, each.annotation) for each, array in parameters_first), placed
        ),
        unsplit=unsplit(jaxpr, traced.arrays, names, modules),
        is_auto=bool(
            ledger.lines or traced.meshes or any(e.primitive.name == "sharding_constraint" for e in equations(jaxpr))
        )
        and not all(map(is_explicit, traced.meshes if loaded is None else [loaded])),
    )


class Traced:
    """A function and its arguments, traced with abstract arrays. Changes go to copies of the user's modules."""

    def __init__(self, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        placed = getattr(f, "at_rest", None)  # a function of jshard.jit moves its arguments before a call
        if placed is not None and configuration() is not None:
            args, kwargs = placed(*args, **kwargs)
        self.given = (f, args, kwargs)
        found, self.tree = jax.tree_util.tree_flatten_with_path(self.given, is_leaf=is_node)
        self.leaves = [leaf for _, leaf in found]
        self.nodes = [leaf for leaf in self.leaves if is_node(leaf)]
        self.graph, state = nnx.split(self.nodes)
        node_arrays, self.state_tree = jax.tree.flatten(state)
        others = [(path, leaf) for path, leaf in found if not is_node(leaf) and is_array(leaf)]
        self.arrays = [*node_arrays, *(leaf for _, leaf in others)]
        outer = [path for path, leaf in found if is_node(leaf)]
        boxed, _ = jax.tree_util.tree_flatten_with_path(self.given, is_leaf=lambda x: is_node(x) or is_boxed(x))
        names = {path: str(box.names) for path, box in boxed if is_boxed(box)}
        by_themselves = (ArrayPath(path, (), False, names.get(path[:-1], "")) for path, _ in others)
        self.positional = positional_names(f, len(args))
        self.paths = [*_paths_in(outer, state), *by_themselves]

    def argument(self, path: ArrayPath) -> str:
        """Return the name of the argument with an array in it, or "" for an array of the function itself."""
        place, *key = keys_of(path.outer)[:2]
        return (self.positional[key[0]] if place == 1 else key[0]) if key and place else ""

    @property
    def meshes(self) -> set[Any]:
        """The meshes of at least two devices in the shardings of its arrays."""
        shardings = (getattr(array, "sharding", None) for array in self.arrays)
        return {each.mesh for each in shardings if isinstance(each, NamedSharding) and each.mesh.size >= 2}

    @property
    def parameters(self) -> list[tuple[str, ...] | None]:
        """The path of each parameter in its model, without the model's position in a tuple; None for other arrays."""
        inside = [tuple(itertools.dropwhile(str.isdecimal, path.words)) for path in self.paths]
        return [words if path.is_parameter else None for words, path in zip(inside, self.paths, strict=True)]

    def with_arrays(self, arrays: list[Any]) -> Traced:
        """Return a copy of this call with other arrays."""
        other = copy.copy(self)
        other.arrays = arrays
        vars(other).pop("_once", None)
        return other

    def holding(self, arrays: list[Any]) -> tuple[list[Any], tuple[Any, ...]]:
        """Return the modules with these arrays in them, then the function and its arguments with the same arrays."""
        states = self.state_tree.num_leaves
        nodes = nnx.merge(self.graph, jax.tree.unflatten(self.state_tree, arrays[:states]))
        as_placed(nodes)
        modules, others = iter(nodes), iter(arrays[states:])
        leaves = [next(modules) if is_node(e) else next(others) if is_array(e) else e for e in self.leaves]
        return nodes, jax.tree.unflatten(self.tree, leaves)

    def call(self, arrays: list[Any]) -> tuple[list[Any], list[Any]]:
        """Call the function; return its arrays, and the state of the modules after the call."""
        nodes, (f, args, kwargs) = self.holding(arrays)
        with entering():  # the ledger lists layers that run whole
            results = jax.tree.leaves(f(*args, **kwargs))
        return [leaf for leaf in results if is_array(leaf)], jax.tree.leaves(nnx.split(nodes)[1])

    def lacks_backward(self, backward: bool | None) -> bool:
        """Return whether to add a backward pass: `backward` decides; None adds it where there is none and one can be."""
        if backward is False:
            return False
        _, (shapes, _) = self._once
        is_differentiable = any(map(is_inexact, self.arrays)) and any(map(is_inexact, shapes))
        if backward and not is_differentiable:
            raise JShardError(
                "backward=True, but the function has no floating-point argument or result",
                hint="use backward=False",
            )
        return backward or (is_differentiable and not has_transposed(self.forward()))

    def forward(self) -> Any:
        """Return the closed jaxpr of the call."""
        return self._once[0]

    @functools.cached_property
    def _once(self) -> Any:
        """The jaxpr of the call and the shapes of its results, from a single trace."""
        return jax.make_jaxpr(self.call, return_shape=True)(self.arrays)

    def call_with_gradients(
        self, arrays: list[Any], cotangent: Callable[[int, Any], Any] = lambda number, result: jnp.ones_like(result)
    ) -> Any:
        """Return the results and the gradients of all floating-point arrays.
        `cotangent(number, result)` returns the cotangent of a result."""

        def of_inexact(inexact: list[Any]) -> Any:
            supply = iter(inexact)
            result, changed = self.call([next(supply) if is_inexact(array) else array for array in arrays])
            return {number: leaf for number, leaf in enumerate(result) if is_inexact(leaf)}, (result, changed)

        smooth, pull, rest = jax.vjp(of_inexact, [a for a in arrays if is_inexact(a)], has_aux=True)
        return rest, pull({number: cotangent(number, leaf) for number, leaf in smooth.items()})[0]


@dataclasses.dataclass(frozen=True)
class ArrayPath:
    """The position of an array in a function and its arguments."""

    outer: tuple[Any, ...]  # the path of the array, or of its module
    inner: tuple[Any, ...]  # the module's number, then the keys in it; () for an array outside modules
    is_parameter: bool
    annotation: str = ""  # the mesh axes in the model's own annotation: ('data', None)

    @property
    def words(self) -> list[str]:
        """The keys from its argument to the array."""
        within = self.outer[2 if keys_of(self.outer)[0] else 1 :]  # the function itself may be the model
        return [*words_of(within), *map(str, self.inner[1:])]


def _paths_in(outer: Sequence[Any], state: object) -> Iterator[ArrayPath]:
    """Yield the path of each array of the modules at the paths `outer`."""
    is_variable = lambda each: isinstance(each, nnx.Variable)
    for path, variable in jax.tree_util.tree_flatten_with_path(state, is_leaf=is_variable)[0]:
        names = variable.get_metadata().get("out_sharding") if is_variable(variable) else None
        annotation = str(tuple(names)) if names else ""
        for inside, _ in jax.tree_util.tree_flatten_with_path(variable)[0]:
            keys = keys_of((*path, *inside))
            yield ArrayPath(outer[keys[0]], keys, isinstance(variable, nnx.Param), annotation)


def is_node(leaf: object) -> bool:
    """Return whether a leaf is a module or a variable of Flax NNX."""
    return isinstance(leaf, (nnx.Pytree, nnx.Variable))


def is_boxed(leaf: object) -> bool:
    """Return whether a leaf is an array of Linen with an annotation of mesh axes."""
    return isinstance(leaf, nn.Partitioned)


def is_array(leaf: object) -> bool:
    """Return whether a leaf has a shape and a dtype."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def is_inexact(leaf: Shaped) -> bool:
    """Return whether a leaf is an array of floating-point or complex numbers."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)

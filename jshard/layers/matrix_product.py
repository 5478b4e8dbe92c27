"""`jshard.matmul`: a product without a layer, by the active signal's strategy or else the cheapest."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax.nnx.nn.dtypes import promote_dtype
from jax._src.interpreters.ad import JVPTracer, LinearizeTracer
from jax._src.interpreters.batching import BatchTracer
from jax.core import Tracer
from jax.sharding import Mesh

from jshard.errors import JShardError
from jshard.kernels.collectives import COLLECTIVES
from jshard.layers.body import Arithmetic
from jshard.layers.sharded_matmul import multiply
from jshard.layers.strategy import Strategy
from jshard.layouts.layout import Layout
from jshard.layouts.mesh import is_explicit
from jshard.layouts.redistribution import as_array, plan_moves, replicated
from jshard.programs.provenance import scope
from jshard.runs import events
from jshard.signals.active_config import configuration, mesh, mesh_to_choose_for
from jshard.signals.scope import active, resolve
from jshard.signals.signal import Signal

# Multiplications of a chip in the time of a byte on the wire: 400 on v5p, 500 on v5e, 1,100 on v6e and H100 (chips.py).
MULTIPLICATIONS_A_BYTE = 500
NOBODY = Signal("jshard.matmul")
_promoted = functools.partial(promote_dtype, inexact=False)  # as jnp.matmul promotes: integers stay integers


def matmul(x: Any, w: Any, *, precision: object = None) -> jax.Array:
    """Compute `x[..., K] @ w[K, N]` by the strategy of the active signal.

    If the signal names no strategy, choose the cheapest in wire and arithmetic, given the layouts of x and w. The cost
    includes the backward pass if JAX traces a gradient here. `explain` and `JSHARD_LOG=collectives` show the choice with its
    cost. Without a configuration return `x @ w`.
    """
    signal, scope = resolve(())
    with scope:
        x, w = (jnp.asarray(as_array(operand, label="jshard.matmul")) for operand in (x, w))
        return _product(x, w, signal, precision)


def _product(x: jax.Array, w: jax.Array, signal: Signal | None, precision: Any) -> jax.Array:
    is_local = bool(jax.sharding.get_abstract_mesh().manual_axes)
    stored_part = is_local and signal is not None and bool(signal.store or signal.shard)  # the body gathers w
    if w.ndim != 2 or not x.ndim or (x.shape[-1] != w.shape[0] and not stored_part):
        raise JShardError(
            f"jshard.matmul of {x.shape} and {w.shape}: the last axis of x does not match the first of w",
            hint="use x[..., K] and w[K, N]",
        )
    governing = signal or NOBODY
    arithmetic = Arithmetic(dtype=governing.dtype.compute, precision=precision, promote_dtype=_promoted)
    if signal is not None and _names_a_strategy(signal):
        return multiply(x, w, None, signal, arithmetic)
    if configuration() is None or is_local:
        x, w = _promoted((x, w), dtype=governing.dtype.compute)
        return jnp.matmul(x, w, precision=precision)
    best = choose(x, w)[0]
    more = {"reduce_dtype": governing.dtype.reduce, "remat": governing.remat, "kernels": governing.kernel}
    strategy = dataclasses.replace(best.strategy, **more)
    unless_seen = ", if x and w are whole (an auto mesh does not tell)" if _is_hidden(x, w, strategy.mesh) else ""
    events.tell("chosen", x=x.shape, w=w.shape, words=f"{best}{unless_seen}")
    with scope(chosen=f"{best}{unless_seen}"):
        return multiply(x, w, None, governing, arithmetic, strategy=strategy)


def choose(x: jax.Array, w: jax.Array) -> list[Candidate]:
    """List all strategies of `matmul(x, w)` for the layouts of x and w with their costs, cheapest first."""
    on = _mesh_of(x, w)
    sizes = mesh_to_choose_for() if on == mesh() else on
    signal = active() or NOBODY
    summed = signal.dtype.reduce or signal.dtype.compute or jnp.result_type(x, w)
    left, right = (
        Operand(
            Layout(sizes, *(Layout.of(array) or replicated(on, jnp.ndim(array))).axes),
            jnp.shape(array),
            jnp.result_type(array).itemsize,
            _is_differentiated(array),
        )
        for array in (x, w)
    )
    candidates = choices(left, right, jnp.dtype(summed).itemsize, on)
    if _is_hidden(x, w, on):  # undivided work would gather operands that may be split
        candidates.sort(key=lambda choice: (choice.multiplications, choice.cost))
    return [
        dataclasses.replace(choice, strategy=dataclasses.replace(choice.strategy, mesh=on)) for choice in candidates
    ]


def _names_a_strategy(signal: Signal) -> bool:
    return bool(signal.row or signal.column or signal.reduction or signal.shard or signal.sequence or signal.store)


def _mesh_of(x: jax.Array, w: jax.Array) -> Mesh:
    """Return the mesh of the operands: the loaded mesh, or a slice on which they were placed."""
    meshes = [layout.mesh for layout in map(Layout.of, (x, w)) if layout is not None and isinstance(layout.mesh, Mesh)]
    if len(set(meshes)) >= 2:
        raise JShardError(
            f"jshard.matmul of arrays on different devices: x on {_devices(meshes[0])}, w on {_devices(meshes[1])}",
            hint="place both under one signal: jshard.signal.tensor(x, name=...)",
        )
    return meshes[0] if meshes else mesh()


def _devices(mesh: Mesh) -> str:
    return ", ".join(str(device.id) for device in mesh.devices.flat)


def _is_differentiated(x: object) -> bool:
    """Return True if JAX traces a derivative by `x`; inside a nested jit, scan or remat this is not known."""
    while isinstance(x, BatchTracer):
        x = x.val
    return isinstance(x, (JVPTracer, LinearizeTracer))


def _is_hidden(x: object, w: object, mesh: Mesh) -> bool:
    """Return True if an operand's sharding is unknown: inside jit on an auto mesh."""
    return not is_explicit(mesh) and (isinstance(x, Tracer) or isinstance(w, Tracer))


# -- the strategies of a product, and their costs in wire and arithmetic --


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of a product: its present layout, its shape and item size; `has_gradient` if a gradient is computed."""

    layout: Layout
    shape: tuple[int, ...]
    itemsize: int
    has_gradient: bool = True

    def moved(self, target: Layout) -> tuple[int, int, int]:
        """Return the cost of `redistribute` to `target`: wire bytes per device forward and backward, and collectives."""
        mesh, axes = target.mesh, [list(names) for names in self.layout.axes]
        forward = backward = collectives = 0
        for step in plan_moves(self.layout.axes, target.axes):
            group = mesh.shape[step.mesh_axis]
            part = self.itemsize * math.prod(
                size // _ways(mesh, names) for size, names in zip(self.shape, axes, strict=True)
            )
            match step.kind:
                case "slice":  # backward, the gradient is gathered
                    axes[step.axis].append(step.mesh_axis)
                    backward += COLLECTIVES["all_gather"].wire(part, group)
                case "all_gather":  # backward, the gradient is only sliced
                    axes[step.axis].pop()
                    forward += COLLECTIVES["all_gather"].wire(part * group, group)
                case _:
                    axes[step.axis].append(axes[step.source].pop())
                    forward += COLLECTIVES["all_to_all"].wire(part, group)
                    backward += COLLECTIVES["all_to_all"].wire(part, group)
            collectives += 1
        return forward, backward * self.has_gradient, collectives


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A strategy for a product with its costs: wire bytes per device forward and backward, and arithmetic."""

    strategy: Strategy
    wire: int
    backward: int
    collectives: int
    multiplications: int  # of one product, per device
    ways: int = 1  # the number of shares of the multiplications
    gradients: int = 2  # the number of computed gradients, each a product of equal size

    @property
    def cost(self) -> float:
        """The wire bytes per device, plus the arithmetic in bytes of equal time."""
        products = 1 + self.gradients
        return self.wire + self.backward + products * self.multiplications / MULTIPLICATIONS_A_BYTE

    def __str__(self) -> str:
        loops = ("row", "sequence", "column", "reduction")
        words = [f"{loop}={'+'.join(names)}" for loop in loops if (names := getattr(self.strategy, loop))]
        words += ["output=scatter"] if self.strategy.scattered else []
        priced = [
            " ".join(words) or "replicated",
            f"{self.wire:,} B on the wire per device forward",
            *([f"{self.backward:,} B backward"] if self.gradients else []),
            f"1/{self.ways} of the arithmetic" if self.ways > 1 else "all of the arithmetic",
        ]
        return ", ".join(priced)


def choices(x: Operand, w: Operand, itemsize: int, runs_on: Mesh) -> list[Candidate]:
    """List every strategy that divides the sizes, on `runs_on` too, cheapest first. They are
    ordered by cost, then forward's wire bytes, then the number of collectives, then row before
    column before reduction. `itemsize` is of the summed numbers."""
    mesh, rank = x.layout.mesh, len(x.shape)
    present = dict.fromkeys((*x.layout.mesh_axes, *w.layout.mesh_axes, *mesh.axis_names))  # in the layouts' order
    names = [name for name in present if mesh.shape[name] >= 2]
    loops = (*(["row"] if rank >= 2 else []), *(["sequence"] if rank >= 3 else []), "column", "reduction", "none")
    candidates: list[Candidate] = []
    split: dict[str, Any]
    # A split batch stays split if w is whole: a single product must not gather it for all later layers.
    batch = set(x.layout.axes[0] if rank >= 2 else ()) - set(w.layout.mesh_axes)
    for taken in itertools.product(*(["row"] if name in batch else loops for name in names)):
        split = {loop: tuple(n for n, its in zip(names, taken, strict=True) if its == loop) for loop in loops}
        split.pop("none")
        for output in (None, "scatter") if split["reduction"] and rank >= 2 else (None,):
            strategy = Strategy(mesh, **split, output=output)
            sizes = strategy.splits(x.shape, *w.shape)
            if not any(size % _ways(on, names) for _, size, names, _ in sizes for on in (mesh, runs_on)):
                candidates.append(_priced(x, w, strategy, itemsize))
    return sorted(candidates, key=lambda choice: (choice.cost, choice.wire, choice.collectives))


def _priced(x: Operand, w: Operand, strategy: Strategy, itemsize: int) -> Candidate:
    mesh, rank = strategy.mesh, len(x.shape)
    kernel = strategy.kernel()
    moves = x.moved(strategy.x(rank)), w.moved(kernel)
    forward, backward, collectives = map(sum, zip(*moves, strict=True))
    rows = math.prod(x.shape[:-1]) // _ways(mesh, strategy.batch)
    part = itemsize * rows * w.shape[1] // _ways(mesh, strategy.column)
    if strategy.scattered:  # one mesh axis after the other, of the remaining part; gathered again backward
        for name in strategy.scattered:
            forward += COLLECTIVES["reduce_scatter"].wire(part, mesh.shape[name])
            backward += COLLECTIVES["all_gather"].wire(part, mesh.shape[name]) * (x.has_gradient or w.has_gradient)
            part //= mesh.shape[name]
            collectives += 1
    elif strategy.reduction:
        forward += COLLECTIVES["all_reduce"].wire(part, _ways(mesh, strategy.reduction))
        collectives += 1
    # An operand's gradient is summed over the devices with different shards of the other operand.
    for operand, layout, summed in ((x, strategy.x(rank), strategy.column), (w, kernel, strategy.batch)):
        size = math.prod(layout.shard_shape(operand.shape)) * operand.has_gradient
        backward += COLLECTIVES["all_reduce"].wire(itemsize * size, _ways(mesh, summed))
    ways = _ways(mesh, (*strategy.batch, *strategy.column, *strategy.reduction))
    multiplications = math.prod((*x.shape, w.shape[1])) // ways
    return Candidate(strategy, forward, backward, collectives, multiplications, ways, x.has_gradient + w.has_gradient)


def _ways(mesh: Mesh, names: tuple[str, ...] | list[str]) -> int:
    return math.prod(mesh.shape[name] for name in names)

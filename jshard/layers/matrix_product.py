"""`jshard.matmul`: a product without a layer, as the active signal says, or the cheapest way when none says."""

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

# What a chip multiplies in the time that a byte takes to leave it: 400 on v5p, 500 on v5e, 1,100 on v6e and H100 (chips.py).
MULTIPLICATIONS_A_BYTE = 500
NOBODY = Signal("jshard.matmul")
_promoted = functools.partial(promote_dtype, inexact=False)  # as jnp.matmul promotes: integers stay integers


def matmul(x: Any, w: Any, *, precision: object = None) -> jax.Array:
    """Compute `x[..., K] @ w[K, N]` by the strategy of the active signal.

    If the signal names none, choose the strategy that costs the least wire and arithmetic, given the layouts of x and w. The
    backward pass counts where JAX traces a gradient here. `explain` and `JSHARD_LOG=collectives` show the choice with its
    price. With no configuration loaded return `x @ w`.
    """
    signal, scope = resolve(())
    with scope:
        x, w = (jnp.asarray(as_array(each, label="jshard.matmul")) for each in (x, w))
        return _product(x, w, signal, precision)


def _product(x: jax.Array, w: jax.Array, signal: Signal | None, precision: Any) -> jax.Array:
    is_local = bool(jax.sharding.get_abstract_mesh().manual_axes)
    stored_part = is_local and signal is not None and bool(signal.store or signal.shard)  # of w; the body gathers it
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
    """List every strategy of `matmul(x, w)` for the layouts of x and w, cheapest first, each with its price."""
    on = _mesh_of(x, w)
    sizes = mesh_to_choose_for() if on == mesh() else on
    signal = active() or NOBODY
    summed = signal.dtype.reduce or signal.dtype.compute or jnp.result_type(x, w)
    left, right = (
        Operand(
            Layout(sizes, *(Layout.of(each) or replicated(on, jnp.ndim(each))).axes),
            jnp.shape(each),
            jnp.result_type(each).itemsize,
            _is_differentiated(each),
        )
        for each in (x, w)
    )
    found = choices(left, right, jnp.dtype(summed).itemsize, on)
    if _is_hidden(x, w, on):  # work that is not divided would gather what may lie split
        found.sort(key=lambda choice: (choice.multiplications, choice.cost))
    return [dataclasses.replace(each, strategy=dataclasses.replace(each.strategy, mesh=on)) for each in found]


def _names_a_strategy(signal: Signal) -> bool:
    return bool(signal.row or signal.column or signal.reduction or signal.shard or signal.sequence or signal.store)


def _mesh_of(x: jax.Array, w: jax.Array) -> Mesh:
    """Return the mesh of the operands, which is the loaded one unless they were placed on some devices of it."""
    found = [layout.mesh for layout in map(Layout.of, (x, w)) if layout is not None and isinstance(layout.mesh, Mesh)]
    if len(set(found)) >= 2:
        raise JShardError(
            f"jshard.matmul of arrays on different devices: x on {_devices(found[0])}, w on {_devices(found[1])}",
            hint="place both under one signal: jshard.signal.tensor(x, name=...)",
        )
    return found[0] if found else mesh()


def _devices(mesh: Mesh) -> str:
    return ", ".join(str(device.id) for device in mesh.devices.flat)


def _is_differentiated(x: object) -> bool:
    """Return whether JAX traces a derivative by `x`: inside a jit, scan or remat of its own nothing tells."""
    while isinstance(x, BatchTracer):
        x = x.val
    return isinstance(x, (JVPTracer, LinearizeTracer))


def _is_hidden(x: object, w: object, mesh: Mesh) -> bool:
    """Return whether an operand does not tell how it is sharded: inside jit on an auto mesh."""
    return not is_explicit(mesh) and any(isinstance(each, Tracer) for each in (x, w))


# -- the strategies of a product, and what each costs in wire and arithmetic --


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array of a product: its layout now, its shape, the bytes of one number, and whether its gradient is computed."""

    layout: Layout
    shape: tuple[int, ...]
    itemsize: int
    has_gradient: bool = True

    def moved(self, target: Layout) -> tuple[int, int, int]:
        """Price `redistribute` to `target`: wire bytes per device forward and backward, and the number of steps."""
        mesh, axes = target.mesh, [list(names) for names in self.layout.axes]
        forward = backward = collectives = 0
        for step in plan_moves(self.layout.axes, target.axes):
            group = mesh.shape[step.mesh_axis]
            part = self.itemsize * math.prod(
                size // _ways(mesh, names) for size, names in zip(self.shape, axes, strict=True)
            )
            match step.kind:
                case "slice":  # a slice that every device has is of a gradient that must be gathered
                    axes[step.axis].append(step.mesh_axis)
                    backward += COLLECTIVES["all_gather"].wire(part, group)
                case "all_gather":  # and what all devices gather, of a gradient that is only sliced
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
    """One way to run a product: its strategy, its wire bytes per device forward and for the gradients, and its arithmetic."""

    strategy: Strategy
    wire: int
    backward: int
    collectives: int
    multiplications: int  # of one product, per device
    ways: int = 1  # that they are divided
    gradients: int = 2  # the number of gradients that are computed, each a product of the same size

    @property
    def cost(self) -> float:
        """Return the bytes on the wire per device, plus the arithmetic as the bytes that pass in its time."""
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
    """List every strategy that divides the sizes, cheapest first: by cost, then by forward's wire bytes, then by the number of
    steps, then row before column before reduction. `itemsize` is that of the numbers that are summed; sizes divide on
    `runs_on` too."""
    mesh, rank = x.layout.mesh, len(x.shape)
    present = dict.fromkeys((*x.layout.mesh_axes, *w.layout.mesh_axes, *mesh.axis_names))  # in the order they lie in
    names = [name for name in present if mesh.shape[name] >= 2]
    loops = (*(["row"] if rank >= 2 else []), *(["sequence"] if rank >= 3 else []), "column", "reduction", "none")
    found: list[Candidate] = []
    split: dict[str, Any]
    # A batch that is split stays so where w is whole: one product must not gather it for all that follow.
    batch = set(x.layout.axes[0] if rank >= 2 else ()) - set(w.layout.mesh_axes)
    for taken in itertools.product(*(["row"] if name in batch else loops for name in names)):
        split = {loop: tuple(n for n, its in zip(names, taken, strict=True) if its == loop) for loop in loops}
        split.pop("none")
        for output in (None, "scatter") if split["reduction"] and rank >= 2 else (None,):
            strategy = Strategy(mesh, **split, output=output)
            sizes = strategy.splits(x.shape, *w.shape)
            if not any(size % _ways(on, names) for _, size, names, _ in sizes for on in (mesh, runs_on)):
                found.append(_priced(x, w, strategy, itemsize))
    return sorted(found, key=lambda choice: (choice.cost, choice.wire, choice.collectives))


def _priced(x: Operand, w: Operand, strategy: Strategy, itemsize: int) -> Candidate:
    mesh, rank = strategy.mesh, len(x.shape)
    kernel = strategy.kernel()
    moves = x.moved(strategy.x(rank)), w.moved(kernel)
    forward, backward, collectives = map(sum, zip(*moves, strict=True))
    rows = math.prod(x.shape[:-1]) // _ways(mesh, strategy.batch)
    part = itemsize * rows * w.shape[1] // _ways(mesh, strategy.column)
    if strategy.scattered:  # one mesh axis at a time, each of what the one before has left; gathered again backward
        for name in strategy.scattered:
            forward += COLLECTIVES["reduce_scatter"].wire(part, mesh.shape[name])
            backward += COLLECTIVES["all_gather"].wire(part, mesh.shape[name]) * (x.has_gradient or w.has_gradient)
            part //= mesh.shape[name]
            collectives += 1
    elif strategy.reduction:
        forward += COLLECTIVES["all_reduce"].wire(part, _ways(mesh, strategy.reduction))
        collectives += 1
    # The gradient of an operand is summed over the devices that multiplied it by different parts of the other operand.
    for operand, layout, summed in ((x, strategy.x(rank), strategy.column), (w, kernel, strategy.batch)):
        size = math.prod(layout.shard_shape(operand.shape)) * operand.has_gradient
        backward += COLLECTIVES["all_reduce"].wire(itemsize * size, _ways(mesh, summed))
    ways = _ways(mesh, (*strategy.batch, *strategy.column, *strategy.reduction))
    multiplications = math.prod((*x.shape, w.shape[1])) // ways
    return Candidate(strategy, forward, backward, collectives, multiplications, ways, x.has_gradient + w.has_gradient)


def _ways(mesh: Mesh, names: tuple[str, ...] | list[str]) -> int:
    return math.prod(mesh.shape[name] for name in names)

"""`jshard.matmul`: a product without a layer, as the active signal says, or the cheapest way when none says."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax.nnx.nn.dtypes import promote_dtype
from jax._src.interpreters.ad import JVPTracer, LinearizeTracer
from jax._src.interpreters.batching import BatchTracer
from jax.core import Tracer
from jax.sharding import Mesh

from jshard.errors import JShardError
from jshard.layers.auto_strategy import Candidate, Operand, choices
from jshard.layers.body import Arithmetic
from jshard.layers.sharded_matmul import multiply
from jshard.layouts.layout import Layout
from jshard.layouts.mesh import is_explicit
from jshard.layouts.redistribution import as_array, replicated
from jshard.programs.provenance import scope
from jshard.runs import events
from jshard.signals.active_config import configuration, mesh, mesh_to_choose_for
from jshard.signals.scope import active, resolve
from jshard.signals.signal import Signal

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

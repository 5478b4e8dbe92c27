"""The one table of strategies: how a signal's words lay out the three arrays of `x[M,K] @ w[K,N] -> y[M,N]`.

`row` splits M, `column` N, `reduction` K; they combine. `sequence` splits axis 1 of activations (axis 0 when they have
two axes) between layers, and `store` splits parameters where the strategy leaves them whole.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh

from jshard.errors import JShardError
from jshard.kernels.all_reduction import all_reduce_coalesced
from jshard.kernels.collectives import check_vma_enabled
from jshard.kernels.select_algorithm import adds_in_order, default_algorithm
from jshard.layouts.layout import Layout, check_divides
from jshard.signals.active_config import mesh_for
from jshard.signals.signal import Signal

Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Strategy:
    """What a signal asks of a matrix product, on one mesh. Equal for signals that ask alike."""

    mesh: Mesh
    row: Names = ()
    column: Names = ()
    reduction: Names = ()
    sequence: Names = ()
    store: Names = ()
    output: str | None = None
    reduce_dtype: str | None = None
    remat: bool = False
    kernels: tuple[tuple[str, str], ...] = ()  # op -> algorithm

    def algorithm(self, op: str) -> Any:
        """How `op` is done, unless the signal says: by plain XLA, or in the order of devices between CPU processes."""
        return dict(self.kernels).get(op) or default_algorithm(op)

    @property
    def adds_in_order(self) -> bool:
        """Whether gradients too are summed in the order of devices: of what JAX differentiates, it adds them by a psum."""
        return adds_in_order(self.algorithm("all_reduce")) and check_vma_enabled()

    @property
    def scattered(self) -> Names:
        """The reduction axes that y is scattered to instead of being summed whole."""
        if self.output == "scatter":
            return tuple(name for name in self.reduction if name in self.sequence) or self.reduction
        if self.output == "sum":
            return ()
        return tuple(name for name in self.reduction if name in self.sequence)

    @property
    def gathered(self) -> Names:
        """The sequence axes that the columns lie over, so that x must be gathered first."""
        return tuple(name for name in self.sequence if name in self.column)

    @property
    def batch(self) -> Names:
        """The mesh axes over which devices see different rows, so that gradients of parameters are summed over them."""
        return (*self.row, *self.sequence)

    @property
    def bias_batch(self) -> Names:
        """The same for the bias, which is added to y."""
        return (*self.row, *self._kept, *self.scattered)

    @property
    def _kept(self) -> Names:
        """The sequence axes that neither columns nor reduction lie over: x comes in and y goes out split by them."""
        return tuple(name for name in self.sequence if name not in self.column and name not in self.reduction)

    def sequence_axis(self, rank: int) -> int:
        return 1 if rank > 2 else 0

    def x(self, rank: int) -> Layout:
        """Where the input must lie."""
        axes: list[Names] = [()] * rank
        axes[0] = self.row
        t = self.sequence_axis(rank)
        axes[t] = (*axes[t], *(name for name in self.sequence if name not in self.reduction))
        axes[-1] = (*axes[-1], *self.reduction)
        return Layout(self.mesh, *axes)

    def y(self, rank: int) -> Layout:
        """Where the output lies."""
        axes: list[Names] = [()] * rank
        axes[0] = self.row
        t = self.sequence_axis(rank)
        to = t if any(name in self.sequence for name in self.scattered) else 0
        axes[t] = (*axes[t], *self._kept)
        axes[to] = (*axes[to], *self.scattered)
        axes[-1] = (*axes[-1], *(() if self.output == "gather" else self.column))
        return Layout(self.mesh, *axes)

    def parameter(self, *words: str | None) -> Layout:
        """Where a parameter rests whose axes these loops run over, split over `store` as well."""
        return self._whole(*words).also_over(self.store)

    def kernel(self) -> Layout:
        """Where w rests."""
        return self.parameter("reduction", "column")

    def bias(self) -> Layout:
        """Where the bias rests: as the columns do."""
        return self.parameter("column")

    @property
    def kernel_store_axis(self) -> int:
        """The axis of the kernel that `store` splits."""
        return self._whole("reduction", "column").spare_axis

    def _whole(self, *words: str | None) -> Layout:
        return Layout(self.mesh, *(() if word is None else getattr(self, word) for word in words))


def strategy_of(signal: Signal) -> Strategy:
    """The strategy that a signal asks for. GT's `shard` on axis 0 is rows of x with w at rest by its rows; on the last
    axis it is columns."""
    mesh, shard_axes = mesh_for(signal)
    rest: dict[str, Any] = {
        "reduce_dtype": signal.dtype.reduce, "remat": signal.remat, "store": signal.store, "kernels": signal.kernel
    }  # fmt: skip
    shard = signal.shard
    if shard is None:
        return Strategy(
            mesh, signal.row, signal.column, signal.reduction, signal.sequence, output=signal.output, **rest
        )
    if shard.replicated or shard.axis is None:
        return Strategy(mesh, **rest)
    if shard.axis == 0:
        return Strategy(mesh, row=shard_axes, **{**rest, "store": shard_axes})
    if shard.axis in (1, -1):
        return Strategy(mesh, column=shard_axes, **rest)
    raise JShardError(
        f'signal "{signal.name}" ({signal.at("shard.axis")}) shards axis {shard.axis} of a rank-2 kernel',
        hint="use 0 or 1",
    )


def check_sizes(strategy: Strategy, signal: Signal, shape: Sequence[int], inputs: int, outputs: int) -> None:
    """An error that names the signal, its line, the size and the mesh axis when a product does not divide."""
    mesh, rank = strategy.mesh, len(shape)
    if rank < 2 and strategy.batch:
        key = "row" if strategy.row else "sequence"
        raise JShardError(
            f'signal "{signal.name}" ({signal.at(key)}) splits rows over mesh axis "{strategy.batch[0]}", but x has one axis',
            hint="give x a batch axis: x[None]",
        )
    x, y = strategy.x(rank), strategy.y(rank)
    words = _Words(signal, mesh)
    words.hold("row", shape[0], x.axes[0] if rank > 1 else (), "rows")
    if rank > 2:
        words.hold("sequence", shape[1], x.axes[1], "sequence positions")
        words.hold("sequence", shape[1], y.axes[1], "sequence positions")
    words.hold("reduction", inputs, strategy.reduction, "inputs")
    words.hold("column", outputs, strategy.column, "columns")
    if rank > 1:
        words.hold("output", shape[0], y.axes[0], "rows")


def check_parameters(strategy: Strategy, signal: Signal, inputs: int, outputs: int, *, use_bias: bool) -> None:
    """The same, for the parameters at rest."""
    words = _Words(signal, strategy.mesh)
    words.hold("reduction", inputs, strategy.reduction, "inputs")
    words.hold("column", outputs, strategy.column, "columns")
    kernel = strategy.kernel()
    words.hold("store", inputs, kernel.axes[0], "inputs of the kernel")
    words.hold("store", outputs, kernel.axes[1], "columns of the kernel")
    if use_bias:
        words.hold("store", outputs, strategy.bias().axes[0], "numbers of the bias")


@dataclasses.dataclass(frozen=True)
class _Words:
    signal: Signal
    mesh: Mesh

    def hold(self, key: str, size: int, names: Names, what: str) -> None:
        key = key if self.signal.shard is None else "shard.axis"
        said = f'signal "{self.signal.name}" ({self.signal.at(key)})'
        check_divides(size, names, self.mesh, label=said, what=f"{size} {what}")


def door(mesh: Mesh, names: Sequence[str], said: str) -> str:
    """`global` where arrays are whole and a shard_map is needed, `local` inside a shard_map over all these mesh axes."""
    manual = set(jax.sharding.get_abstract_mesh().manual_axes)
    if not manual:
        return "global"
    if not all(name in manual for name in names):
        missing = next(name for name in names if name not in manual)
        raise JShardError(
            f'{said} is over mesh axis "{missing}", inside a shard_map over {", ".join(sorted(manual))} only',
            hint="use jshard.step, or a shard_map over every mesh axis",
        )
    return "local"


def varying(x: jax.Array, names: Sequence[str]) -> jax.Array:
    """`x` marked as differing along `names`, so that its gradient is summed over them here and in this dtype."""
    present = jax.typeof(x).mat.varying
    missing = tuple(name for name in names if name not in present)
    return lax.pcast(x, missing, to="varying") if missing else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def spread(arrays: tuple[jax.Array, ...], names: Names) -> tuple[jax.Array, ...]:
    """`arrays`, alike along `names`, as something that differs along them; their gradients are added in the order of devices,
    small ones together."""
    return tuple(lax.pcast(array, names, to="varying") for array in arrays)


def _spread_keeps(arrays: tuple[jax.Array, ...], names: Names) -> tuple[tuple[jax.Array, ...], None]:
    return spread(arrays, names), None


def _spread_pulls(names: Names, _: None, cotangents: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...]]:
    return (all_reduce_coalesced(cotangents, names, algorithm="in_order"),)


spread.defvjp(_spread_keeps, _spread_pulls)


@functools.lru_cache(maxsize=4096)
def compiled(body: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """A per-device body as one program over global arrays; equal calls share it."""
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs))

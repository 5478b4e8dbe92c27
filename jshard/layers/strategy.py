"""The table of strategies: layouts of the three arrays of `x[M,K] @ w[K,N] -> y[M,N]`, from a signal's words.

`row` splits M, `column` N, `reduction` K; they combine. `sequence` splits axis 1 of activations (axis 0 if they have two
axes) between layers, and `store` splits parameters along axes left whole by the strategy. Kernels named in a signal are
checked here too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jshard.errors import JShardError
from jshard.kernels.chip import chip_called, interpretation, present_chip
from jshard.kernels.select_algorithm import GPUS, NO_KERNELS, default_algorithm
from jshard.layouts.layout import Layout, check_divides
from jshard.signals.active_config import mesh_for
from jshard.signals.signal import PRODUCT, Signal

NO_HINDRANCE = ("auto", "hierarchical", "in_order", "xla")
Names = tuple[str, ...]
Split = tuple[str, int, Names, str]  # a key of a signal, a size, the mesh axes that split it, what it counts


@dataclasses.dataclass(frozen=True)
class Strategy:
    """The words of a signal for a matrix product, on a mesh; equal for signals with equal words."""

    mesh: Mesh
    row: Names = ()
    column: Names = ()
    reduction: Names = ()
    sequence: Names = ()
    store: Names = ()
    keep: bool = False  # save gathered parameters for the backward pass
    output: str | None = None
    reduce_dtype: str | None = None
    remat: str | tuple[str, ...] = ""
    kernels: tuple[tuple[str, str], ...] = ()  # op -> algorithm

    def algorithm(self, op: str) -> Any:
        """Return the signal's algorithm for `op`, else the default."""
        return dict(self.kernels).get(op) or default_algorithm(op)

    @property
    def scattered(self) -> Names:
        """The reduction axes over which y is scattered, not summed on every device."""
        if self.output == "scatter":
            return tuple(name for name in self.reduction if name in self.sequence) or self.reduction
        if self.output == "sum":
            return ()
        return tuple(name for name in self.reduction if name in self.sequence)

    @property
    def gathered(self) -> Names:
        """The sequence axes that split the columns too; x is gathered over them first."""
        return tuple(name for name in self.sequence if name in self.column)

    @property
    def batch(self) -> Names:
        """The mesh axes with different rows on each device; gradients of parameters are summed over them."""
        return (*self.row, *self.sequence)

    @property
    def bias_batch(self) -> Names:
        """The mesh axes for the sums of the bias's gradients; the bias is added to y."""
        return (*self.row, *self._kept, *self.scattered)

    @property
    def _kept(self) -> Names:
        """The sequence axes that split neither columns nor the reduction; both x and y are split by them."""
        return tuple(name for name in self.sequence if name not in self.column and name not in self.reduction)

    def sequence_axis(self, rank: int) -> int:
        return 1 if rank > 2 else 0

    def scatter_axis(self, rank: int) -> int:
        """Return the axis of y split by `scattered`."""
        return self.sequence_axis(rank) if any(name in self.sequence for name in self.scattered) else 0

    def x(self, rank: int) -> Layout:
        """Return the layout of the input."""
        between = tuple(name for name in self.sequence if name not in self.reduction)
        return self._activation("x", rank, (self.sequence_axis(rank), between))

    def y(self, rank: int) -> Layout:
        """Return the layout of the output."""
        return self._activation(
            "y", rank, (self.sequence_axis(rank), self._kept), (self.scatter_axis(rank), self.scattered)
        )

    def _activation(self, array: str, rank: int, *between: tuple[int, Names]) -> Layout:
        first, last = (getattr(self, word) for word in PRODUCT[array])
        last = () if array == "y" and self.output == "gather" else last
        axes: list[Names] = [()] * rank
        for axis, names in ((0, first), *between, (-1, last)):
            axes[axis] = (*axes[axis], *names)
        return Layout(self.mesh, *axes)

    def splits(self, shape: Sequence[int], inputs: int, outputs: int) -> list[Split]:
        """List the divided sizes of a product of x[shape] and w[inputs, outputs], with their keys and mesh axes."""
        rank = len(shape)
        splits: list[Split] = [
            ("reduction", inputs, self.reduction, "inputs"),
            ("column", outputs, self.column, "columns"),
        ]
        if rank > 1:
            x, y = self.x(rank).axes, self.y(rank).axes
            rows: list[Split] = [("row", shape[0], x[0], "rows")]
            if rank >= 3:
                rows += [("sequence", shape[1], axes[1], "sequence positions") for axes in (x, y)]
            splits = [*rows, *splits, ("output", shape[0], y[0], "rows")]
        return splits

    def in_use(self, *words: str | None) -> Layout:
        """Return the layout in use of a parameter; `words` are the loops over its axes."""
        return Layout(self.mesh, *(() if word is None else getattr(self, word) for word in words))

    def parameter(self, *words: str | None) -> Layout:
        """Return the layout at rest of a parameter, split over `store` as well."""
        return self.in_use(*words).also_over(self.store)

    def kernel(self) -> Layout:
        """Return the layout of w at rest."""
        return self.parameter(*PRODUCT["w"])

    def bias(self) -> Layout:
        """Return the layout of the bias at rest."""
        return self.parameter(*PRODUCT["b"])

    @property
    def kernel_store_axis(self) -> int:
        """The axis of the kernel split by `store`."""
        return self.in_use(*PRODUCT["w"]).spare_axis()


def strategy_of(signal: Signal) -> Strategy:
    """Return the strategy of a signal. GT's `shard` means `row` on axis 0, with w stored by rows; else `column`."""
    mesh, shard_axes = mesh_for(signal)
    rest: dict[str, Any] = {
        "reduce_dtype": signal.dtype.reduce, "remat": signal.remat, "store": signal.store, "keep": signal.store_keep,
        "kernels": signal.kernel,
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
    raise JShardError(f"{signal.label('shard.axis')} shards axis {shard.axis} of a rank-2 kernel", hint="use 0 or 1")


def check_sizes(strategy: Strategy, signal: Signal, shape: Sequence[int], inputs: int, outputs: int) -> None:
    """Raise an error with the signal, its line, the size and the mesh axis if a product does not divide."""
    if len(shape) < 2 and strategy.batch:
        key = "row" if strategy.row else "sequence"
        raise JShardError(
            f'{signal.label(key)} splits rows over mesh axis "{strategy.batch[0]}", but x has one axis',
            hint="give x a batch axis: x[None]",
        )
    _check(strategy, signal, strategy.splits(shape, inputs, outputs))


def check_parameters(strategy: Strategy, signal: Signal, inputs: int, outputs: int, *, use_bias: bool) -> None:
    """Raise an error if the parameters at rest do not divide."""
    kernel, bias = strategy.kernel().axes, strategy.bias().axes[0]
    store: list[Split] = [
        ("store", inputs, kernel[0], "inputs of the kernel"),
        ("store", outputs, kernel[1], "columns of the kernel"),
        *([("store", outputs, bias, "numbers of the bias")] if use_bias else []),
    ]
    _check(strategy, signal, [*strategy.splits((), inputs, outputs), *store])


def _check(strategy: Strategy, signal: Signal, splits: Iterable[Split]) -> None:
    for key, size, names, what in splits:
        label = signal.label(key if signal.shard is None else "shard.axis")
        check_divides(size, names, strategy.mesh, label=label, what=f"{size} {what}")


def inside_shard_map(names: Sequence[str], label: str) -> bool:
    """Return True inside a shard_map, where arrays are a device's shards; it must be over all mesh axes `names`."""
    manual = set(jax.sharding.get_abstract_mesh().manual_axes)
    missing = next((name for name in names if name not in manual), None)
    if manual and missing is not None:
        raise JShardError(
            f'{label} is over mesh axis "{missing}", inside a shard_map over {", ".join(sorted(manual))} only',
            hint="use a shard_map over every mesh axis",
        )
    return bool(manual)


# -- kernels named in a signal --


def all_reduce_of(signal: Signal | None, mesh: Mesh, hindrance: str | None = None) -> Any:
    """Return the algorithm of an all-reduce under `signal`; `hindrance` is why no kernel can run it, if so."""
    if signal is None:
        return default_algorithm("all_reduce")
    check_kernels(signal, mesh, lambda op: hindrance, ops=("all_reduce",))
    return dict(signal.kernel).get("all_reduce") or default_algorithm("all_reduce")


def check_kernels(
    signal: Signal, mesh: Mesh, hindrance: Callable[[str], str | None], ops: Sequence[str] | None = None
) -> None:
    """Raise an error for a kernel of `signal` that can't run. The reason is the devices of `mesh`,
    or `hindrance(op)`, a sentence or None; `ops` limits the check."""
    named = [(op, word) for op, word in signal.kernel if word not in NO_HINDRANCE and (ops is None or op in ops)]
    for op, word in named:
        why = hindrance(op)
        if why is not None:
            raise JShardError(
                f"{signal.label(f'kernel.{op}')} takes {op} by {word}, which {why}",
                hint=f"write {op}: auto",
            )
    named = [(op, word) for op, word in named if word not in NO_KERNELS]
    if not named or interpretation() is not None:
        return
    on = mesh.abstract_mesh.abstract_device
    chip = present_chip() if on is None else chip_called(on.device_kind, on.platform)
    for op, word in named:
        gpus = GPUS if op == "matmul" else []
        if chip.platform != "tpu" and chip.name not in gpus:
            raise JShardError(
                f"{signal.label(f'kernel.{op}')} takes {op} by {word}, a kernel for {', '.join(['TPUs', *gpus])}, and this is "
                f"{chip.name}",
                hint=f"write {op}: auto",
            )

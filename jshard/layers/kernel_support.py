"""Check that the kernels that a signal names can run where it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from jshard.errors import JShardError
from jshard.kernels.chip import chip_called, interpretation, present_chip
from jshard.kernels.select_algorithm import GPUS, NO_KERNELS, default_algorithm
from jshard.signals.signal import Signal

NO_HINDRANCE = ("auto", "hierarchical", "in_order", "xla")


def all_reduce_of(signal: Signal | None, mesh: Mesh, hindrance: str | None = None) -> Any:
    """Return the algorithm of an all-reduce under `signal`. `hindrance` is why no kernel can take it."""
    if signal is None:
        return default_algorithm("all_reduce")
    check_kernels(signal, mesh, lambda op: hindrance, ops=("all_reduce",))
    return dict(signal.kernel).get("all_reduce") or default_algorithm("all_reduce")


def check_kernels(
    signal: Signal, mesh: Mesh, hindrance: Callable[[str], str | None], ops: Sequence[str] | None = None
) -> None:
    """Raise for a kernel that `signal` names, of these ops or of any, and that can't run on the devices of `mesh` or has a
    hindrance: what it does not do, in words."""
    named = [each for each in signal.kernel if each[1] not in NO_HINDRANCE and (ops is None or each[0] in ops)]
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

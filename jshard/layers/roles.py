"""The layout of a claimed parameter, from the words of its signal and the role of each of its axes.

The first use of the parameter gives each axis a role: "reduction" is summed over (also the rows of a lookup table), "column"
is kept, or added to a kept axis, and the word of the same name splits it. "batch" runs along both operands (`expert` splits
it). "scan" is the axis of a loop over layers, also of an unrolled loop; no word splits it, nor does `store`. None means no
use decides.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jshard.errors import JShardError, quoted
from jshard.layers.strategy import strategy_of
from jshard.layouts.layout import Layout, check_divides
from jshard.signals.claims import Claim, Stage
from jshard.signals.globs import LONGEST
from jshard.signals.scope import tensor_layout
from jshard.signals.signal import PRODUCT, Signal

Roles = tuple[str | None, ...]  # one for each axis


@dataclasses.dataclass(frozen=True)
class Use:
    """A parameter's path in the model, its claim, and the role of each of its axes."""

    path: str
    claim: Claim
    shape: tuple[int, ...]
    roles: Roles

    def __str__(self) -> str:
        return f"{quoted(self.path, LONGEST)} {self.shape}"


@dataclasses.dataclass(frozen=True)
class Rest:
    """The layouts of a parameter in use and at rest, where `store` splits it further."""

    in_use: Layout
    at_rest: Layout


@dataclasses.dataclass(frozen=True)
class Placed:
    """A parameter's use, its layouts, and the first product or lookup, which gave the roles.
    `unscattered` is the reason why no sum under its signal is scattered by `sequence`."""

    use: Use
    lies: Rest
    told_by: Any = None
    unscattered: str = ""


def layout_in_use(signal: Signal, roles: Sequence[str | None], label: str = "", stage: Stage | None = None) -> Layout:
    """Return a parameter's layout by the words of its signal: the first axis of each role is split.
    A `shard` applies whatever the roles; a stack on equal stages is also split over the stages."""
    layout = _by_words(signal, roles, label)
    if stage is not None and stage.is_equal and "scan" in roles:
        return layout.with_axis(roles.index("scan"), stage.mesh_axis)
    return layout


def _by_words(signal: Signal, roles: Sequence[str | None], label: str) -> Layout:
    if signal.shard is not None:
        return tensor_layout(signal, len(roles), label)
    words = (role if role in PRODUCT["w"] and role not in roles[:axis] else None for axis, role in enumerate(roles))
    layout = strategy_of(signal).in_use(*words)
    return layout.with_axis(roles.index("batch"), signal.expert) if signal.expert and "batch" in roles else layout


def parameter_layouts(uses: Iterable[Use]) -> dict[str, Rest]:
    """Return the layouts of each parameter, or raise an error with all faults, a sentence for equal parameters."""
    alike: dict[tuple[Claim, tuple[int, ...], Roles], list[Use]] = {}
    for use in uses:
        alike.setdefault((use.claim, use.shape, use.roles), []).append(use)
    layouts: dict[str, Rest] = {}
    faults: list[JShardError] = []
    for same in alike.values():
        try:
            layouts |= dict.fromkeys([use.path for use in same], _layout(same[0], len(same) - 1))
        except JShardError as fault:
            faults.append(fault)
    if faults:
        raise JShardError.of(faults)
    return layouts


def _layout(use: Use, more: int) -> Rest:
    signal, stage = use.claim.signal, use.claim.stage
    in_use = layout_in_use(signal, use.roles, str(use), stage)
    if stage is not None and stage.number is None and "scan" not in use.roles:
        raise JShardError(
            f"{stage.signal} says stage ({stage.signal.at('stage')}), and {_several(use, more)} is in no loop over layers",
            hint="build the layers with jshard.stack, or give stage to the stack alone",
        )
    for axis, role in enumerate(use.roles):
        key = "shard.axis" if signal.shard is not None else "expert" if role == "batch" else role or ""
        if role == "scan" and stage is not None and stage.is_equal:
            key = "stage"
            if layout_in_use(signal, use.roles, str(use)).axes[axis]:
                raise JShardError(
                    f"{signal.label('shard.axis')} shards axis {axis} of {_several(use, more)}, which {stage.signal} splits "
                    f"over stages ({stage.signal.at('stage')})",
                    hint="shard another axis",
                )
        _check(use, more, in_use, axis, key)
    for name in set(signal.store) & set(in_use.mesh_axes):  # the schema refuses a word and `store` over one mesh axis
        by_stage = stage if stage is not None and stage.mesh_axis == name else None
        whose, key = (by_stage.signal, "stage") if by_stage else (signal, "shard")
        raise JShardError(
            f'{signal.label("store")} names mesh axis "{name}" for store and '
            f"{f'{whose} for' if by_stage else 'for'} {key} ({whose.at(key)}), which would split {_several(use, more)} over it "
            "twice",
            hint="claim the layers apart from what all stages have"
            if by_stage
            else "use another mesh axis for one of them",
        )
    scanned = [at for at, role in enumerate(use.roles) if role == "scan"]
    at_rest = in_use.also_over(signal.store, use.shape, scanned)
    if stage is not None and not stage.is_equal and stage.mesh_axis not in at_rest.mesh_axes:
        at_rest = at_rest.also_over(stage.mesh_axis, use.shape, scanned)
    return Rest(in_use, at_rest)


def not_stored(use: Use, lies: Rest) -> str:
    """Return why `store` leaves a parameter, or its optimizer state, replicated over a mesh axis; "" if it does not."""
    signal, stored = use.claim.signal, lies.at_rest.also_over(use.claim.signal.store_optimizer, use.shape)
    names = [name for name in (*signal.store, *signal.store_optimizer) if name not in stored.mesh_axes]
    if not names:
        return ""
    ways = math.prod(stored.mesh.shape[name] for name in names)
    part = zip(stored.shard_shape(use.shape), use.roles, strict=True)
    sizes = " and ".join(str(size) for size, role in part if role != "scan")
    why = f"{sizes} {'do' if ' and ' in sizes else 'does'} not divide by {ways}" if sizes else "it is one number"
    key = "store" if signal.store else "store.optimizer"
    return f"{key}: replicated over {' x '.join(names)}, as {why}"


def _check(use: Use, more: int, layout: Layout, axis: int, key: str) -> None:
    """Raise an error if an axis does not divide; for too few heads, the hint proposes two mesh axes."""
    signal, size, ways, names = use.claim.signal, use.shape[axis], layout.ways(axis), layout.axes[axis]
    signal = use.claim.stage.signal if key == "stage" and use.claim.stage else signal
    label, what = signal.label(key), f"axis {axis} of {_several(use, more)}"
    fit = math.gcd(size, ways)
    if key == "column" and use.roles.count("column") >= 2 and fit >= 2 and size % ways and len(names) == 1:
        raise JShardError(
            f'{label} splits {what} over mesh axis "{names[0]}" of size {ways}',
            hint=f"write {{kv: {fit}, group: {ways // fit}}} for {names[0]}: {ways} in jshard.mesh, column: kv here, and "
            "column: [kv, group] where it divides",
        )
    check_divides(size, names, layout.mesh, label=label, what=what, otherwise=f"claim it without {key.split('.')[0]}")


def _several(use: Use, more: int) -> str:
    """Describe the parameter, the number of equal ones, and the place of the claim."""
    return f"{use}{f' and {more} more' if more else ''} claimed at {use.claim.place}"

"""Who asked: the line of the configuration behind a collective, and whether there is one."""

from __future__ import annotations

from collections.abc import Iterable

from jshard.errors import JShardError, Place
from jshard.inspect.ledger.jaxpr_walk import Asked, Chosen, Decided
from jshard.signals.active_config import configuration
from jshard.signals.config import Configuration
from jshard.signals.signal import Signal

LOOPS = ("row", "column", "reduction", "sequence", "store", "store_optimizer")
PARTS = (
    "store",
    "sequence",
    "column",
    "reduction",
    "row",
    "store_optimizer",
)  # whose parts a gather or a scatter moves
SUMS = ("reduction", "column", "row", "sequence", "store", "store_optimizer")
GRADIENTS = ("row", "column", "reduction", "sequence", "store", "store_optimizer")
UPDATES = ("store_optimizer", "store", "sequence", "column", "reduction", "row")


def place_of(asked: Asked | Chosen | Decided) -> Place | None:
    """The line of the configuration that asked: of the key that names the mesh axis, else of the whole signal."""
    present = configuration()
    if present is None:
        return None
    signal = present.lookup(asked.path)
    if asked.phase == "update":
        keys = UPDATES
    elif asked.collective in ("all_gather", "reduce_scatter", "all_to_all"):
        keys = PARTS
    else:
        keys = GRADIENTS if asked.phase == "backward" else SUMS
    for key in keys:
        if set(asked.mesh_axes) & set(getattr(signal, key)):
            return signal.at("store.optimizer" if key == "store_optimizer" else key)
    return signal.place


def is_asked_for(asked: Asked) -> bool:
    """Whether a signal asked for a collective: it stands under one that names its mesh axis, or jshard moves an array
    to where one wants it, or took a strategy by itself, which the ledger tells on a line of its own."""
    present = configuration()
    if present is None or any(word.startswith("chosen ") for word in asked.via.split(", ")):
        return True
    if not asked.path:
        return False
    if "redistribute" in asked.via.split(", "):
        return True
    signal = present.lookup(asked.path)
    return bool(set(asked.mesh_axes) & _named(signal, present))


def _named(signal: Signal, present: Configuration) -> set[str]:
    """The mesh axes that a signal names, and the signal where its cotangents lie."""
    names = {name for key in LOOPS for name in getattr(signal, key)}
    if signal.shard is not None:
        every = present.mesh.names if present.mesh is not None else ()
        names |= set(signal.shard.mesh or (*every, "workers"))
    if signal.backward is not None:
        other = present.lookup((signal.backward,))
        names |= _named(other, present) if other.backward is None else set()
    return names


def unused(scopes: Iterable[tuple[str, ...]]) -> tuple[Signal, ...]:
    """The signals of the configuration that no scope of these means, and no array has been placed under."""
    present = configuration()
    if present is None:
        return ()
    used: set[int] = set()  # a name that a glob matches gets a signal of its own, which keeps the glob's places
    for path in {whole[:end] for whole in (*scopes, *present.placed) for end in range(1, len(whole) + 1)}:
        try:
            signal = present.lookup(path)
        except JShardError:  # the scope "mlp/up" is entered at once, and there need be no signal "mlp"
            continue
        used.add(id(signal.places))
        if signal.backward is not None:
            used.add(id(present.lookup((signal.backward,)).places))
    return tuple(signal for signal in present.signals.values() if id(signal.places) not in used)

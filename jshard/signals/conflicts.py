"""Keys of one signal that contradict each other."""

from __future__ import annotations

from jshard.errors import Place, quoted
from jshard.signals.faults import Faults
from jshard.signals.signal import Signal

# Two keys that may not name one mesh axis: keys, and the array that would be split over it twice.
_ARRAYS = [
    ("row", "column", "y"),
    ("row", "reduction", "x"),
    ("column", "reduction", "w"),
    ("row", "sequence", "x"),
    ("column", "store", "w"),
    ("reduction", "store", "w"),
    ("column", "store.optimizer", "the optimizer's state of w"),
    ("reduction", "store.optimizer", "the optimizer's state of w"),
]


def check_axes(signal: Signal, faults: Faults) -> None:
    """No array is split twice over one mesh axis."""
    for first, second, array in _ARRAYS:
        both = set(signal.axes(first)) & set(signal.axes(second))
        for mesh_axis in sorted(both):
            early, late = sorted((first, second), key=lambda key: _line(signal.at(key)))
            keys = f"{late} and for {early} ({signal.at(early)})"
            fault = f"names mesh axis {quoted(mesh_axis)} for {keys}, which would split {array} over it twice"
            faults.add((signal.name,), signal.at(late), fault, "use another mesh axis for one of them")


def _line(place: Place) -> tuple[int, int]:
    return place.line or 0, place.column or 0


def check_output(signal: Signal, broken: set[str], faults: Faults) -> None:
    """What a layer hands on is something that its strategy makes. Keys in `broken` have a fault already told."""
    key, what = ("column", "gathered") if signal.output == "gather" else ("reduction", "summed")
    if signal.output == "keep" and signal.reduction:
        fault = f"with reduction ({signal.at('reduction')}), but partial sums can't be handed on"
        hint = "write output: sum or output: scatter"
    elif signal.output in ("gather", "sum", "scatter") and not signal.axes(key) and key not in broken:
        fault = f"without {key}, so nothing is {what}"
        hint = f"name a mesh axis for {key}, or remove output"
    else:
        return
    faults.add((signal.name,), signal.at("output"), f"has output: {signal.output} {fault}", hint)

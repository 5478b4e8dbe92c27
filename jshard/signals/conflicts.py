"""Keys of one signal that contradict each other."""

from __future__ import annotations

from jshard.errors import Place
from jshard.signals.faults import Faults, quoted, subject
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
            place = signal.at(late)
            fault = (
                f"{subject((signal.name,), place)} names mesh axis {quoted(mesh_axis)} for {late} and for {early} "
                f"({signal.at(early)}), which would split {array} over it twice"
            )
            faults.add(place, fault, "use another mesh axis for one of them")


def _line(place: Place) -> tuple[int, int]:
    return place.line or 0, place.column or 0


def check_output(signal: Signal, broken: set[str], faults: Faults) -> None:
    """What a layer hands on is something that its strategy makes. Keys in `broken` have a fault already told."""
    place = signal.at("output")
    said = f"{subject((signal.name,), place)} has output: {signal.output}"
    if signal.output in ("sum", "scatter") and not signal.reduction and "reduction" not in broken:
        hint = "name a mesh axis for reduction, or remove output"
        faults.add(place, f"{said} without reduction, so nothing is summed", hint)
    elif signal.output == "gather" and not signal.column and "column" not in broken:
        hint = "name a mesh axis for column, or remove output"
        faults.add(place, f"{said} without column, so nothing is gathered", hint)
    elif signal.output == "keep" and signal.reduction:
        fault = f"{said} with reduction ({signal.at('reduction')}), but partial sums can't be handed on"
        faults.add(place, fault, "write output: sum or output: scatter")

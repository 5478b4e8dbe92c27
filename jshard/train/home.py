"""The devices that the layers of a model lie on: those of one mesh, on which a step is one program, or several sets of them."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jshard.layers.layer import model_arrays
from jshard.signals.active_config import configuration, mesh_for
from jshard.signals.device_sets import apart, devices_in_words, differ


def home_of(model: nnx.Module, whole: Any) -> tuple[Any, str | None]:
    """The mesh of all layers. Where they, or the backward of one, lie on several sets of devices: none, and why; an error where
    a layer has no backward, as no gradient gets from one set to the other."""
    placed = [each for each in model_arrays(model).values() if each.layout is not None and each.signal is not None]
    named = {each.signal.name: each.signal for each in placed if each.signal is not None}
    signals = sorted(named.values(), key=lambda signal: signal.place.line or 0)
    present = configuration()
    if present is None or whole is None or not signals:
        return whole, None
    meshes = {signal.name: mesh_for(signal)[0] for signal in signals}
    first = signals[0]
    home = meshes[first.name]
    for signal in signals:
        there = meshes[signal.name]
        if differ(home, there) and not (first.backward and signal.backward):
            raise apart(signal, there, first, home)
    for signal in signals:
        back = present.lookup((signal.backward,)) if signal.backward is not None else signal
        if differ(home, there := mesh_for(back)[0]):
            why = f"{first} lies on {devices_in_words(home)} and {back} on {devices_in_words(there)}"
            return None, f"{why}, so a step is several programs, which are run and not explained"
    return (home if differ(home, whole) else whole), None

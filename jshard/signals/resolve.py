"""From what is written to what it means, with every fault that can be told without touching a device."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any

from jshard.errors import Place
from jshard.signals.conflicts import check_axes, check_output
from jshard.signals.faults import Faults, choose, quoted, subject
from jshard.signals.match import Matcher
from jshard.signals.nodes import DEEPEST, Node
from jshard.signals.schema import COLLECTIVES, JSHARD, JSHARD_TABLE, SIGNAL, SIGNAL_TABLE
from jshard.signals.signal import DTypes, Shard, Signal
from jshard.signals.value_types import Reading


@dataclasses.dataclass
class Written:
    """A signal or template as it stands in the file: values by key, and where each key path stands."""

    name: str
    place: Place
    values: dict[str, Any]
    places: dict[str, Place]
    broken: set[str]  # key paths with a fault already told

    def at(self, key: str) -> Place:
        return self.places.get(key, self.place)


@dataclasses.dataclass
class Resolved:
    """Everything that a configuration says."""

    jshard: dict[str, Any]
    places: Mapping[str, Place]  # of keys under jshard, "jshard." included
    signals: dict[str, Signal]


def resolve(root: Node, source: str, faults: Faults) -> Resolved:
    """All that `root` says, checked. What is faulty is left out; the caller raises the faults."""
    assert isinstance(root.value, dict)
    head, reading = _head(root, faults)
    written = {
        name: _written(name, node, root.keys[name], reading)
        for name, node in root.value.items()
        if name != "jshard" and _is_signal(name, node, root.keys[name], faults)
    }
    extends = _Extends(written, source, faults)
    whole = {name: extends.over(name) for name in written}
    signals = {
        name: _signal(each, head.get("kernel", {}), faults) for name, each in whole.items() if not is_template(name)
    }
    names = _Named(signals, written, source, faults)
    names.check_backward()
    if "default" in head:
        place = reading.places["jshard.default"]
        names.find(head["default"], place, f"jshard.default ({place}) names")
    return Resolved(head, reading.places, signals)


def is_template(name: str) -> bool:
    return name.startswith("_")


def _head(root: Node, faults: Faults) -> tuple[dict[str, Any], Reading]:
    """What stands under `jshard`, and what the signals are to be read against."""
    assert isinstance(root.value, dict)
    reading = Reading(faults)
    node = root.value.get("jshard")
    if node is None:
        return {}, reading
    values = JSHARD_TABLE.read(node, ("jshard",), reading) or {}
    mesh = node.value.get("mesh") if isinstance(node.value, dict) else None
    if mesh is not None:
        reading.mesh_place = reading.places["jshard.mesh"]
        reading.mesh_is_broken = not (isinstance(mesh.value, dict) and mesh.value)
        reading.mesh_axes = mesh.keys if isinstance(mesh.value, dict) else {}
        sizes = values.get("mesh", {}).values()
        reading.devices = math.prod(sizes) if sizes and -1 not in sizes else None
    return values, reading


def _is_signal(name: str, node: Node, place: Place, faults: Faults) -> bool:
    """Whether a name at the top can be a signal's."""
    if not all(name.split("/")):
        fault = f"{subject((name,), place)} has a name with an empty part"
        faults.add(place, fault, f"write {quoted('/'.join(filter(None, name.split('/'))) or 'layer1')}")
        return False
    keys = set(node.value) if isinstance(node.value, dict) else set()
    if difflib.get_close_matches(name, ["jshard"], cutoff=0.75) and keys & set(JSHARD) and not keys & set(SIGNAL):
        faults.add(place, f"{quoted(name)} ({place}) has the keys of jshard", 'did you mean "jshard"?')
        return False
    if name in JSHARD and not keys & set(SIGNAL) and node.value != {}:
        faults.add(place, f"{quoted(name)} ({place}) stands outside jshard", 'write it under "jshard:"')
        return False
    if node.value is None:
        hint = "write {} after it to replicate, or keys such as row: data"
        faults.add(place, f"{subject((name,), place)} says nothing", hint)
        return False
    return True


def _written(name: str, node: Node, place: Place, reading: Reading) -> Written:
    own = dataclasses.replace(reading, places={}, broken=set())
    values = SIGNAL_TABLE.read(node, (name,), own)
    cut = len(name) + 1
    places = {key[cut:]: at for key, at in own.places.items()}
    return Written(name, place, values or {}, places, {key[cut:] for key in own.broken})


class _Extends:
    """Signals over those they extend: the later of a list over the earlier, a signal's own keys over all."""

    def __init__(self, written: dict[str, Written], source: str, faults: Faults):
        self.written = written
        self.source = source
        self.faults = faults
        self.done: dict[str, Written] = {}

    def over(self, name: str, chain: tuple[str, ...] = ()) -> Written:
        if name in self.done:
            return self.done[name]
        own = self.written[name]
        whole = Written(name, own.place, {}, {}, set())
        for other in own.values.get("extends", ()):
            if self._can_extend(own, other, (*chain, name)):
                _lay(whole, self.over(other, (*chain, name)))
        _lay(whole, own)
        self.done[name] = whole
        return whole

    def _can_extend(self, own: Written, other: str, chain: tuple[str, ...]) -> bool:
        place = own.at("extends")
        said = subject((own.name,), place)
        if other not in self.written:
            hint = choose(
                other, [each for each in self.written if each != own.name], "write the name of a signal or template"
            )
            self.faults.add(place, f"{said} extends {quoted(other)}, which is not in {self.source}", hint)
        elif other in chain:
            begin = self.written[other].at("extends")
            way = "" if other == own.name else f" by way of {quoted(own.name)} ({place})"
            hint = "remove one extends" if way else "remove it"
            self.faults.add(begin, f"{subject((other,), begin)} extends itself{way}", hint)
        elif len(chain) >= DEEPEST:
            self.faults.add(place, f"{said} extends a chain of more than {DEEPEST} signals", "extend fewer")
        else:
            return True
        return False


def _lay(whole: Written, top: Written) -> None:
    """Put `top` over `whole`, key by key; what was inside a key goes with it."""
    for key in [key for key in whole.places if key.split(".")[0] in top.places]:
        del whole.places[key]
        whole.broken.discard(key)
        whole.values.pop(key, None)
    whole.values.update(top.values)
    whole.places.update(top.places)
    whole.broken.update(top.broken)


def _signal(written: Written, kernels: dict[str, str], faults: Faults) -> Signal:
    values = dict(written.values)
    store = values.pop("store", ())
    shard = values.get("shard")
    optimizer = store.get("optimizer", ()) if isinstance(store, dict) else ()
    signal = Signal(
        name=written.name, place=written.place, places=written.places,
        row=values.get("row", ()), column=values.get("column", ()), reduction=values.get("reduction", ()),
        sequence=values.get("sequence", ()), store=() if isinstance(store, dict) else store, store_optimizer=optimizer,
        output=values.get("output"), shard=_shard(written, shard, faults) if shard is not None else None,
        backward=values.get("backward"), compile=values.get("compile", False),
        dtype=DTypes(**values.get("dtype", {})), remat=values.get("remat", False),
        kernel=tuple(sorted({**kernels, **values.get("kernel", {})}.items())),
        expect=_expect(written, values.get("expect", {}), faults),
    )  # fmt: skip
    check_axes(signal, faults)
    check_output(signal, written.broken, faults)
    return signal


def _shard(written: Written, values: dict[str, Any], faults: Faults) -> Shard:
    place = written.at("shard")
    said = subject((written.name,), place)
    replicated = values.get("replicated", False)
    strategy = next((key for key in ("row", "column", "reduction") if written.values.get(key)), None)
    if strategy is not None:
        at = written.at(strategy)
        fault = f"{said} has shard beside {strategy} ({at}), which say in two ways how arrays are split"
        faults.add(place, fault, f"remove shard, or {strategy}")
    beside = next((key for key in ("workers", "replicated") if f"shard.{key}" in written.places), None)
    if "mesh" in values and beside is not None:
        at = written.at("shard.mesh")
        fault = f"{subject((written.name,), at)} has shard.mesh beside shard.{beside} ({written.at(f'shard.{beside}')})"
        faults.add(at, fault, "keep one of the two")
    if not replicated and "shard.axis" not in written.places and "shard" not in written.broken:
        faults.add(place, f"{said} has shard without an axis", "write axis: 0, or replicated: true")
    # GT writes an axis beside `replicated: true` and means nothing by it
    return Shard(
        None if replicated else values.get("axis"), values.get("workers") or None, values.get("mesh", ()), replicated
    )


def _expect(written: Written, values: dict[str, int], faults: Faults) -> tuple[tuple[str, int], ...]:
    found: dict[str, tuple[str, int]] = {}
    for word, count in values.items():
        name = COLLECTIVES.get(word, word)
        if name in found:
            place = written.at(f"expect.{word}")
            fault = (
                f"{subject((written.name,), place)} expects both {found[name][0]} and {word}, which are one collective"
            )
            faults.add(place, fault, "keep one")
        found[name] = (word, count)
    return tuple((name, count) for name, (_, count) in sorted(found.items()))


class _Named:
    """Signals that are named by a key of another place."""

    def __init__(self, signals: dict[str, Signal], written: dict[str, Written], source: str, faults: Faults):
        self.signals = signals
        self.written = written
        self.source = source
        self.faults = faults
        self.matcher = Matcher(signals.values())

    def find(self, name: str, place: Place, said: str) -> Signal | None:
        """The signal that `name` means; when none is meant, a fault that opens with `said`."""
        found = self.matcher.find(tuple(name.split("/")))
        if len(found) == 1:
            return found[0]
        fault = f"{said} {quoted(name)}"
        if found:
            both = " and ".join(f"{quoted(each.name)} ({each.place})" for each in found[:2])
            self.faults.add(place, f"{fault}, which both {both} match", "name one of the two")
        elif name in self.written:
            hint = f"name a signal, or call it {quoted(name.lstrip('_') or 'layer1')}"
            self.faults.add(place, f"{fault}, which is only a template", hint)
        else:
            hint = choose(name, self.signals, "write the name of a signal")
            self.faults.add(place, f"{fault}, which is not in {self.source}", hint)
        return None

    def check_backward(self) -> None:
        """Each `backward` names a signal, and none leads back to where it began."""
        follows: dict[str, str] = {}
        for name, signal in self.signals.items():
            if signal.backward is not None:
                place = signal.at("backward")
                other = self.find(signal.backward, place, f"{subject((name,), place)} names backward")
                if other is not None:
                    follows[name] = other.name
        seen: set[str] = set()
        for name in follows:
            way: list[str] = []
            while name in follows and name not in seen:
                seen.add(name)
                way.append(name)
                name = follows[name]
            if name in way:
                self._loops(way[way.index(name) :])

    def _loops(self, loop: list[str]) -> None:
        first, last = self.signals[loop[0]], self.signals[loop[-1]]
        place = first.at("backward")
        way = "" if len(loop) == 1 else f" by way of {quoted(last.name)} ({last.at('backward')})"
        hint = "remove one backward" if way else "remove backward"
        self.faults.add(place, f"{subject((first.name,), place)} is its own backward{way}", hint)

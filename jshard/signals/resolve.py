"""Resolution of a parsed configuration, and all its checks without a device."""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import Any

from jshard.errors import Location, did_you_mean, quoted
from jshard.signals.faults import Faults, Path
from jshard.signals.nodes import DEEPEST, Node
from jshard.signals.schema import JSHARD, JSHARD_TABLE, SIGNAL, SIGNAL_TABLE, TRAIN
from jshard.signals.signal import AXIS_KEYS, PRODUCT, DTypes, Matcher, Shard, Signal, is_glob
from jshard.signals.synonyms import meant
from jshard.signals.value_types import Reading

# Two keys without a common mesh axis, and the array that it would split twice.
_ARRAYS = [
    *((*reversed(words), array) for array, words in PRODUCT.items() if words[1:]),
    ("row", "sequence", "x"),
    *((word, "ring", "x") for word in ("row", "sequence", "column", "reduction")),
    *((word, "store", "w") for word in PRODUCT["w"]),
    *((word, "expert", "w") for word in ("column", "reduction", "store", "store.optimizer")),
    *((word, "store.optimizer", "the optimizer's state of w") for word in PRODUCT["w"]),
]


@dataclasses.dataclass
class Written:
    """A signal or template as written: values by key, and the place of each key path."""

    name: str
    place: Location
    values: dict[str, Any]
    places: dict[str, Location]
    broken: set[str]  # key paths with a noted fault

    def at(self, key: str) -> Location:
        return self.places.get(key, self.place)


def resolve(root: Node, source: str, faults: Faults) -> tuple[dict[str, Any], dict[str, Location], dict[str, Signal]]:
    """Read and check a parsed configuration. Return the values under `jshard`, the places of its keys
    ("jshard." included), and the signals. Faulty parts are left out; the caller raises the faults."""
    assert isinstance(root.value, dict)
    misspelt = _misspelt(root, faults)
    head, reading = _head(root.value.get("jshard") or misspelt, faults)
    written = {
        name: _written(name, node, root.keys[name], reading)
        for name, node in root.value.items()
        if name != "jshard" and node is not misspelt and _is_signal(name, node, root.keys[name], faults)
    }
    names = _Names(written, head, source, faults)
    names.check_backward()
    _check_pipeline(head, reading, names.signals, faults)
    if "default" in head:
        names.find(head["default"], reading.places["jshard.default"], ("jshard", "default"), "names")
    return head, reading.places, names.signals


def is_template(name: str) -> bool:
    return name.startswith("_")


def _misspelt(root: Node, faults: Faults) -> Node | None:
    """Report a misspelled "jshard" and return its node, for its faults to replace those of a missing "jshard"."""
    assert isinstance(root.value, dict)
    for name, node in root.value.items():
        keys = {*node.value} if isinstance(node.value, dict) else set()
        is_near = name != "jshard" and difflib.get_close_matches(name, ["jshard"], cutoff=0.75)
        if is_near and keys & JSHARD.keys() - SIGNAL.keys():
            place = root.keys[name]
            faults.add(f"{quoted(name)} ({place})", place, "has the keys of jshard", 'did you mean "jshard"?')
            if "include" in keys:  # signals of the included files are missing
                faults.stop()
            return node
    return None


def _head(node: Node | None, faults: Faults) -> tuple[dict[str, Any], Reading]:
    """Read the values under `jshard`, and return them with the context for reading signals."""
    reading = Reading(faults)
    if node is None:
        return {}, reading
    mesh = node.value.get("mesh") if isinstance(node.value, dict) else None
    if mesh is not None:
        reading.mesh_place = node.keys["mesh"]
        reading.mesh_is_broken = not (isinstance(mesh.value, dict) and mesh.value)
        reading.mesh_axes = mesh.keys if isinstance(mesh.value, dict) else {}
    values = JSHARD_TABLE.read(node, ("jshard",), reading) or {}
    if mesh is not None:
        sizes = values.get("mesh", {}).values()
        reading.devices = math.prod(sizes) if sizes and -1 not in sizes else None
    return values, reading


def _is_signal(name: str, node: Node, place: Location, faults: Faults) -> bool:
    """Return whether a name at the top can be a signal's; note a fault if not."""
    keys = set(node.value) if isinstance(node.value, dict) else set()
    about = f"{quoted(name)} ({place})"
    if not all(name.split("/")):
        hint = f"write {quoted('/'.join(filter(None, name.split('/'))) or 'layer1')}"
        faults.add((name,), place, "has a name with an empty part", hint)
    elif name in JSHARD and not keys & set(SIGNAL) and node.value != {}:
        faults.add(about, place, "is outside jshard", 'write it under "jshard:"')
    elif node.value != {} and not keys & SIGNAL.keys() and (ours := meant(name, JSHARD)):
        faults.add(about, place, "is outside jshard", f'write {" or ".join(ours)} under "jshard:"')
    elif not isinstance(node.value, dict) and (ours := [name] * (name in TRAIN) or meant(name, TRAIN)):
        faults.add(about, place, "is outside jshard", f"write {' or '.join(ours)} under jshard.train")
    elif node.value is None:
        faults.add((name,), place, "has no value", "write {} after it to replicate, or keys such as row: data")
    else:
        return True
    return False


def _written(name: str, node: Node, place: Location, reading: Reading) -> Written:
    own = dataclasses.replace(reading, places={}, broken=set())
    values = SIGNAL_TABLE.read(node, (name,), own)
    cut = len(name) + 1
    places = {key[cut:]: at for key, at in own.places.items()}
    return Written(name, place, values or {}, places, {key[cut:] for key in own.broken})


class _Names:
    """The signals with `extends` applied, and the lookup of the signals named by other keys. In a
    list of `extends` a later signal overrides an earlier, and a signal's own keys override all."""

    def __init__(self, written: dict[str, Written], head: dict[str, Any], source: str, faults: Faults):
        self.written = written
        self.source = source
        self.faults = faults
        self.done: dict[str, Written] = {}
        full = {name: self.over(name) for name in written}
        self.signals = {name: _signal(each, head, faults) for name, each in full.items() if not is_template(name)}
        self.matcher = Matcher(self.signals.values())

    def over(self, name: str, chain: tuple[str, ...] = ()) -> Written:
        if name in self.done:
            return self.done[name]
        own = self.written[name]
        full = Written(name, own.place, {}, {}, set())
        for other in own.values.get("extends", ()):
            if self._can_extend(own, other, (*chain, name)):
                _lay(full, self.over(other, (*chain, name)))
        _lay(full, own)
        self.done[name] = full
        return full

    def _can_extend(self, own: Written, other: str, chain: tuple[str, ...]) -> bool:
        place, about = own.at("extends"), (own.name,)
        if other not in self.written:
            others = [each for each in self.written if each != own.name]
            hint = did_you_mean(other, others, "write the name of a signal or template")
            self.faults.add(about, place, f"extends {quoted(other)}, which is not in {self.source}", hint)
        elif other in chain:
            via = "" if other == own.name else f" by way of {quoted(own.name)} ({place})"
            hint = "remove one extends" if via else "remove it"
            self.faults.add((other,), self.written[other].at("extends"), f"extends itself{via}", hint)
        elif len(chain) >= DEEPEST:
            self.faults.add(about, place, f"extends a chain of more than {DEEPEST} signals", "extend fewer")
        else:
            return True
        return False

    def find(self, name: str, place: Location, about: Path, verb: str) -> Signal | None:
        """Return the signal named `name`. If none or several match, note a fault of `about`."""
        _, found = self.matcher.find(tuple(name.split("/")))
        if len(found) == 1:
            return found[0]
        if found:
            both = " and ".join(f"{quoted(each.name)} ({each.place})" for each in found[:2])
            which, hint = f"which both {both} match", "name one of the two"
        elif name in self.written:
            which = "which is only a template"
            hint = f"name a signal, or call it {quoted(name.lstrip('_') or 'layer1')}"
        else:
            which = f"which is not in {self.source}"
            hint = did_you_mean(name, self.signals, "write the name of a signal")
        return self.faults.add(about, place, f"{verb} {quoted(name)}, {which}", hint)

    def check_backward(self) -> None:
        """Note a fault for each `backward` without a signal, and for each cycle of them."""
        follows: dict[str, str] = {}
        for name, signal in self.signals.items():
            if signal.backward is not None:
                other = self.find(signal.backward, signal.at("backward"), (name,), "names backward")
                if other is not None:
                    follows[name] = other.name
        seen: set[str] = set()
        for name in follows:
            chain: list[str] = []
            while name in follows and name not in seen:
                seen.add(name)
                chain.append(name)
                name = follows[name]
            if name in chain:  # a cycle: the last signal leads back to `name`
                first, last = self.signals[name], self.signals[chain[-1]]
                via = "" if first is last else f" by way of {quoted(last.name)} ({last.at('backward')})"
                hint = "remove one backward" if via else "remove backward"
                self.faults.add((name,), first.at("backward"), f"is its own backward{via}", hint)


def _lay(base: Written, top: Written) -> None:
    """Put `top` over `base`, key by key; a replaced key loses its nested keys."""
    for key in [key for key in base.places if key.split(".")[0] in top.places]:
        del base.places[key]
        base.broken.discard(key)
        base.values.pop(key, None)
    base.values.update(top.values)
    base.places.update(top.places)
    base.broken.update(top.broken)


def _signal(written: Written, head: dict[str, Any], faults: Faults) -> Signal:
    values = {key: value for key, value in written.values.items() if key != "extends"}
    if isinstance(values.get("store"), dict):
        values |= _store(written, values.pop("store"), faults)
    if isinstance(values.get("remat"), dict):
        values["remat"] = values["remat"].get("save", ())
    if "shard" in values:
        values["shard"] = _shard(written, values["shard"], faults)
    values["dtype"] = DTypes(**values.get("dtype", {}))
    values["kernel"] = tuple(sorted({**head.get("kernel", {}), **values.get("kernel", {})}.items()))
    values["expect"] = tuple(sorted(values.get("expect", {}).items()))
    signal = Signal(written.name, written.place, written.places, **values)
    _check_axes(signal, faults)
    _check_output(signal, written.broken, faults)
    _check_match(signal, "mesh" in head, faults)
    if set(signal.expert) & set(signal.row) and signal.row[-len(signal.expert) :] != signal.expert:
        wrong = f"names mesh axis {quoted(signal.expert[0])} for expert, which is not last"
        row = [*(name for name in signal.row if name not in signal.expert), *signal.expert]
        _add(faults, signal, "expert", f"{wrong} in row ({signal.at('row')})", f"write row: [{', '.join(row)}]")
    if signal.attention is not None and not signal.ring and "ring" not in written.broken:
        wrong = f"has attention: {signal.attention} without ring, so the sequence is not split"
        _add(faults, signal, "attention", wrong, "name a mesh axis for ring, or remove attention")
    return signal


def _add(faults: Faults, of: Written | Signal, key: str, says: str, hint: str) -> None:
    """Note a fault at a key of a signal."""
    faults.add((of.name,), of.at(key), says, hint)


def _store(written: Written, values: dict[str, Any], faults: Faults) -> dict[str, Any]:
    """Check the mapping form of `store`, and return the fields of the signal."""
    others = [key for key in values if key != "optimizer"]
    if others and "optimizer" in values:
        wrong = f"has store.{others[0]} beside store.optimizer"
        _add(faults, written, f"store.{others[0]}", wrong, f"remove {others[0]}")
    elif values.get("keep") and values.get("prefetch"):
        _add(faults, written, "store.keep", "has store.keep beside store.prefetch, which keeps nothing", "remove one")
    elif not (values.keys() & {"parameters", "optimizer"} or values.get("prefetch")) and "store" not in written.broken:
        _add(faults, written, "store", "has store without parameters", "write parameters: data")
    return {{"parameters": "store"}.get(key, f"store_{key}"): value for key, value in values.items()}


def _check_pipeline(head: dict[str, Any], reading: Reading, signals: dict[str, Signal], faults: Faults) -> None:
    """Note the faults of `jshard.pipeline`: it needs layers, and its mesh axis may split only storage."""
    staged = [signal for signal in signals.values() if signal.stage]
    asked, about, place = head.get("pipeline"), ("jshard", "pipeline"), reading.places.get("jshard.pipeline")
    if place is None:
        none = "but there is no jshard.pipeline"
        for signal in staged:
            hint = "write jshard: {pipeline: {axis: stage}, train: {microbatches: 8}}"
            _add(faults, signal, "stage", f"has stage, {none}", hint)
        for signal in (each for each in signals.values() if each.remat == "chunk"):
            wrong = f"has remat: chunk for layers on stages, {none}"
            _add(faults, signal, "remat", wrong, "write remat: full")
        return
    if asked is None or "jshard.pipeline" in reading.broken:
        return
    if "axis" not in asked:
        faults.add(about, place, "has no axis", "write axis: stage")
    if "microbatches" not in head.get("train", {}) and "jshard.train.microbatches" not in reading.broken:
        faults.add(about, place, "has no jshard.train.microbatches", "write train: {microbatches: 8} beside it")
    if not staged and ("mesh" in head or not any(signal.shard and signal.shard.workers for signal in signals.values())):
        hint = 'write layers: {stage: equal, match: ["blocks/**"]}, with the path of a jshard.stack'
        faults.add(about, place, "has no layers: no signal has stage", hint)
    if head.get("axis_types") == "auto":
        fault = f"is beside axis_types: auto ({reading.places['jshard.axis_types']}), which leaves the program to XLA"
        faults.add(about, place, fault, "write axis_types: explicit")
    for signal in signals.values():
        over = {key: signal.axes(key) for key in AXIS_KEYS if not key.startswith("store")}
        over["shard.mesh"] = signal.shard.mesh if signal.shard else ()
        for key in (key for key, names in over.items() if asked.get("axis") in names):
            has = f"which is the axis of jshard.pipeline ({place})"
            wrong = f"names mesh axis {quoted(asked['axis'])} for {key}, {has}"
            _add(faults, signal, key, wrong, "use another mesh axis")


def _check_match(signal: Signal, has_mesh: bool, faults: Faults) -> None:
    """Note the faults of `match`: it needs a plain name, and a layout on the mesh of the model.
    GT's form has no mesh: lists of workers are its stages."""
    if signal.match and is_glob(signal.name):
        wrong = "has match, but its name is a glob, which means many places"
        _add(faults, signal, "match", wrong, "give it a name of its own")
    if signal.match and signal.shard is not None and signal.shard.workers and has_mesh:
        wrong = f"has match beside shard.workers ({signal.at('shard.workers')}), which are a mesh of their own"
        _add(faults, signal, "match", wrong, "write shard: {axis: 0, mesh: data}")


def _shard(written: Written, values: dict[str, Any], faults: Faults) -> Shard:
    replicated = values.get("replicated", False)
    strategy = next((key for key in ("row", "column", "reduction") if written.values.get(key)), None)
    if strategy is not None:
        wrong = f"has shard beside {strategy} ({written.at(strategy)}), and both split arrays"
        _add(faults, written, "shard", wrong, f"remove shard, or {strategy}")
    beside = next((key for key in ("workers", "replicated") if f"shard.{key}" in written.places), None)
    if "mesh" in values and beside is not None:
        wrong = f"has shard.mesh beside shard.{beside} ({written.at(f'shard.{beside}')})"
        _add(faults, written, "shard.mesh", wrong, "keep one of the two")
    if not replicated and "shard.axis" not in written.places and "shard" not in written.broken:
        _add(faults, written, "shard", "has shard without an axis", "write axis: 0, or replicated: true")
    # GT writes an axis beside `replicated: true`, without effect
    axis = None if replicated else values.get("axis")
    return Shard(axis, values.get("workers") or None, values.get("mesh", ()), replicated)


def _check_axes(signal: Signal, faults: Faults) -> None:
    """Note a fault for each array split twice over a mesh axis."""
    for first, second, array in _ARRAYS:
        both = set(signal.axes(first)) & set(signal.axes(second))
        for mesh_axis in sorted(both):
            early, late = sorted((first, second), key=lambda key: _line(signal.at(key)))
            keys = f"{late} and for {early} ({signal.at(early)})"
            wrong = f"names mesh axis {quoted(mesh_axis)} for {keys}, which would split {array} over it twice"
            _add(faults, signal, late, wrong, "use another mesh axis for one of them")


def _line(place: Location) -> tuple[int, int]:
    return place.line or 0, place.column or 0


def _check_output(signal: Signal, broken: set[str], faults: Faults) -> None:
    """Note a fault if the strategy does not produce `output`. Keys in `broken` have a fault already."""
    key, what = ("column", "gathered") if signal.output == "gather" else ("reduction", "summed")
    if signal.output == "keep" and signal.reduction:
        fault = f"with reduction ({signal.at('reduction')}), but partial sums can't be returned"
        hint = "write output: sum or output: scatter"
    elif signal.output in ("gather", "sum", "scatter") and not signal.axes(key) and key not in broken:
        fault = f"without {key}, so nothing is {what}"
        hint = f"name a mesh axis for {key}, or remove output"
    else:
        return
    _add(faults, signal, "output", f"has output: {signal.output} {fault}", hint)

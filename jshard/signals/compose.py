"""One mapping from a file, the files it includes and the words of the command line; every piece keeps its place."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from jshard.errors import Place, nearest
from jshard.signals.faults import COMMAND_LINE, Faults, choose, quoted, subject
from jshard.signals.nodes import DEEPEST, Node, mapping, read_mapping
from jshard.signals.schema import JSHARD_TABLE, SIGNAL_TABLE, TRAIN
from jshard.signals.source import read_text, read_word
from jshard.signals.value_types import Key, Table

# Arguments of optimizers that are looked for beside `optimizer`.
OF_OPTIMIZER = {"lr": "learning_rate"} | {name: name for name in ("learning_rate", "weight_decay", "momentum")}


def compose(source: Any, overrides: Sequence[str], faults: Faults) -> tuple[str, Node | None]:
    """The name to call `source` by, and all that it says with its includes and the overrides laid over it."""
    if isinstance(source, Mapping):
        name = "<dict>"
        faults.opens(name)
        root = read_mapping(source, name, faults)
    elif isinstance(source, (str, os.PathLike)) and isinstance(os.fspath(source), str):
        name = os.fspath(source)
        root = _file(name, faults)
    else:
        name = "jshard.load"
        what = "nothing" if source is None else f"something of type {type(source).__name__}"
        faults.add(Place(name), f"jshard.load is given {what}", 'give it a path or a mapping, as in "configs/mlp.yaml"')
        return name, None
    if root is not None:
        root = _Includes(faults).laid_under(root, name)
        for word in [overrides] if isinstance(overrides, str) else overrides:
            root = _override(root, word, faults)
    return name, root


def _file(name: str, faults: Faults, said: str | None = None, asked: Place | None = None) -> Node | None:
    """What a file says. `said` opens the faults of one that can't be read, `asked` is where it was asked for."""
    faults.opens(name)
    place, said = asked or Place(name), said or quoted(name)[1:-1]
    try:
        with open(name, "rb") as file:
            return read_text(file.read(), name, faults)
    except FileNotFoundError:
        faults.add(place, f"{said} is not there", _nearest_file(name, asked))
    except (IsADirectoryError, NotADirectoryError):
        what = "is a folder" if os.path.isdir(name) else "is inside a file"
        faults.add(place, f"{said} {what}", "give the path of a YAML file")
    except ValueError:
        faults.add(place, f"{said} holds a character that no path can", "give the path of a file")
    except OSError as error:
        reason = (error.strerror or "unknown reason").lower()
        faults.add(place, f"{said} can't be read: {reason}", "name a file that can be read")
    return None


def _nearest_file(name: str, asked: Place | None) -> str:
    """The hint for a file that isn't there, spelled as it is to be written: an include's from the file it stands in."""
    folder, word = os.path.split(name)
    try:
        there = sorted(each for each in os.listdir(folder or ".") if each.endswith((".yaml", ".yml")))
    except (OSError, ValueError):
        return f"is the folder {quoted(folder)} spelled right?"
    spelled = {each: os.path.join(folder, each) for each in there}
    if asked is not None:
        start = os.path.dirname(asked.source)
        own = os.path.basename(asked.source)
        spelled = {each: os.path.relpath(path, start or ".") for each, path in spelled.items() if each != own}
    near = nearest(word, spelled)
    if near is not None:
        return f"did you mean {quoted(spelled[near])}?"
    return "give the path of a YAML file"


class _Includes:
    """`jshard.include`: each file is read once, from the folder of the file that asks for it."""

    def __init__(self, faults: Faults):
        self.faults = faults
        self.read: dict[str, Node | None] = {}
        self.reading: list[tuple[str, str]] = []

    def laid_under(self, root: Node, name: str) -> Node:
        """`root` over all that it includes."""
        node = _at(root, "jshard", "include")
        if node is None:
            return root
        base: Node | None = None
        self.reading.append((os.path.realpath(name), name))
        for each in node.value if isinstance(node.value, list) else [node]:
            if isinstance(each.value, str) and each.value:  # the table of keys tells of any other
                included = self.included(each, name)
                if included is not None:
                    base = included if base is None else self.beside(base, included, name)
        self.reading.pop()
        return root if base is None else overlay(base, root)

    def included(self, node: Node, name: str) -> Node | None:
        asked = str(node.value)
        path = os.path.normpath(os.path.join(os.path.dirname(name) if name != "<dict>" else "", asked))
        said = subject(("jshard", "include"), node.place)
        if "\0" in path:
            self.faults.add(node.place, f"{said} names {quoted(asked)}, which no file can be called", "give a path")
            return None
        real = os.path.realpath(path)
        if real in [open_file for open_file, _ in self.reading]:
            if real == self.reading[-1][0]:
                fault, hint = f"{said} includes {quoted(asked)}, the file it stands in", "remove it"
            else:
                fault, hint = f"{said} includes {quoted(asked)}, which includes this file", "remove one of the includes"
            self.faults.add(node.place, fault, hint)
            return None
        if len(self.reading) >= DEEPEST:
            self.faults.add(node.place, f"{said} nests deeper than {DEEPEST} files", "include them from one file")
            return None
        if real not in self.read:
            found = _file(path, self.faults, f"{said} names {quoted(path)}, which", node.place)
            self.read[real] = None if found is None else _without_include(self.laid_under(found, path))
        return self.read[real]

    def beside(self, first: Node, second: Node, name: str) -> Node:
        """Two files included by one: neither may say what the other says."""
        both = dict(first.value) if isinstance(first.value, dict) else {}
        keys = dict(first.keys)
        for key, node in second.value.items() if isinstance(second.value, dict) else ():
            if key not in both:
                both[key], keys[key] = node, second.keys[key]
            elif key == "jshard" and isinstance(node.value, dict) and isinstance(both[key].value, dict):
                both[key] = self._keys_beside(both[key], node, name)
            else:
                self._same((key,), keys[key], second.keys[key], name)
        return mapping(both, first.place, keys)

    def _keys_beside(self, first: Node, second: Node, name: str) -> Node:
        assert isinstance(first.value, dict) and isinstance(second.value, dict)
        for key in second.value:
            if key in first.value:
                self._same(("jshard", key), first.keys[key], second.keys[key], name)
        return mapping({**second.value, **first.value}, first.place, {**second.keys, **first.keys})

    def _same(self, path: tuple[str, ...], first: Place, second: Place, name: str) -> None:
        if first != second:  # the same place is one file reached by two ways
            fault = f"{subject(path, second)} is already at {first}, and {quoted(name)[1:-1]} includes both"
            self.faults.add(second, fault, "keep one of the two")


def _at(node: Node | None, *path: str) -> Node | None:
    for key in path:
        node = node.value.get(key) if node is not None and isinstance(node.value, dict) else None
    return node


def _without_include(root: Node) -> Node:
    inside = _at(root, "jshard")
    if inside is None or not isinstance(inside.value, dict) or not isinstance(root.value, dict):
        return root
    rest = {key: node for key, node in inside.value.items() if key != "include"}
    return mapping({**root.value, "jshard": mapping(rest, inside.place, inside.keys)}, root.place, root.keys)


def overlay(base: Node, top: Node, levels: int = 2) -> Node:
    """`top` over `base`, key by key: a signal's keys, and the keys of what is under `jshard`."""
    if levels == 0 or not isinstance(base.value, dict) or not isinstance(top.value, dict):
        return top
    both = dict(base.value)
    for key, node in top.value.items():
        deeper = levels if key == "jshard" else levels - 1
        both[key] = overlay(both[key], node, deeper) if key in both else node
    return mapping(both, top.place, {**base.keys, **top.keys})


def _override(root: Node, word: str, faults: Faults) -> Node:
    """One `path=value` of the command line laid over the file."""
    place = Place(COMMAND_LINE)
    said = f"{quoted(str(word))} ({COMMAND_LINE})"
    key, equals, text = str(word).partition("=")
    if not equals or not key:
        faults.add(place, f"{said} is not key=value", "write it like steps=20 or layer1.column=tensor")
        return root
    assert isinstance(root.value, dict)
    names = [*root.value, "jshard"]
    owner = max((name for name in names if key == name or key.startswith(f"{name}.")), key=len, default=None)
    if owner is not None:
        path = [owner, *key[len(owner) + 1 :].split(".")] if key != owner else [owner]
    elif key.split(".")[0] in TRAIN:
        path = ["jshard", "train", *key.split(".")]
    else:
        known = [*root.value, *TRAIN, "jshard"]
        first = key.split(".")[0]
        near = difflib.get_close_matches(first, known, n=1) or difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {quoted(near[0])}?" if near else choose("", [*Table(TRAIN).known, "a signal"])
        whole = whole_key(key)
        hint = hint if whole is None else f"write {whole}={text}"
        faults.add(place, f"{said} names no signal and no key of jshard.train", hint)
        return root
    if len(path) >= DEEPEST:
        faults.add(place, f"{said} nests deeper than {DEEPEST} levels", "write it flatter")
        return root
    own = Faults()
    value = read_word(text, COMMAND_LINE, own)
    if value is None or own:
        for _, fault, hint in own:
            faults.add(place, said + fault.removeprefix(COMMAND_LINE), hint)
        return root
    if path[0] == "jshard" and "include" in (path[1:2] or (value.value if isinstance(value.value, dict) else ())):
        faults.add(place, f"{said} can't include a file", "write jshard.include in the file")
        return root
    mesh = _at(root, "jshard", "mesh")
    if path[:2] == ["jshard", "mesh"] and len(path) == 3 and mesh is not None and isinstance(mesh.value, dict):
        name = path[2]
        if name not in mesh.value:  # a new axis would be a mesh that nothing uses, of more devices
            near = nearest(name, mesh.value)
            hint = f"did you mean {quoted(near)}?" if near else "give the whole mesh: jshard.mesh={...}"
            faults.add(place, f"{said} sets mesh axis {quoted(name)}, which is not in jshard.mesh ({mesh.place})", hint)
            return root
    table = JSHARD_TABLE if path[0] == "jshard" else SIGNAL_TABLE
    return _placed(root, path, value, place, Table({path[0]: Key(table, "")}))


def whole_key(key: str) -> str | None:
    """`jshard.mesh.data` for `mesh.data`, `optimizer.learning_rate` for `lr`, a key of the experiment for itself; None for what
    may be a signal's."""
    first = key.split(".")[0]
    if first in TRAIN:
        return key
    if first in JSHARD_TABLE.keys:
        return f"jshard.{key}"
    return f"optimizer.{OF_OPTIMIZER[key]}" if key in OF_OPTIMIZER else None


def _placed(node: Node | None, path: list[str], value: Node, place: Place, table: Any) -> Node:
    """`node` with `value` at `path`. A short form (`optimizer: adamw`) becomes the mapping it stands for."""
    if not path:
        return value
    inside: dict[str, Node] = {}
    keys: dict[str, Place] = {}
    if node is not None and isinstance(node.value, dict):
        inside, keys = dict(node.value), dict(node.keys)
    elif node is not None and isinstance(table, Table) and table.stands_for is not None:
        inside, keys = {table.stands_for: node}, {table.stands_for: node.place}
    row = table.keys.get(path[0]) if isinstance(table, Table) else None
    inside[path[0]] = _placed(inside.get(path[0]), path[1:], value, place, row.kind if row is not None else None)
    keys[path[0]] = keys.get(path[0], place) if len(path) > 1 else place
    return mapping(inside, node.place if node is not None else place, keys)

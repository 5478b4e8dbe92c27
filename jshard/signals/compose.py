"""The mapping composed of a file, its includes and the command line; every piece keeps its place."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from jshard.errors import Location, did_you_mean, nearest, quoted, reason
from jshard.signals.faults import COMMAND_LINE, Faults, Path, dotted, listed, subject
from jshard.signals.nodes import DEEPEST, Node, collection, read_mapping
from jshard.signals.schema import JSHARD_TABLE, TRAIN
from jshard.signals.source import MOST_BYTES, read_text, read_word
from jshard.signals.synonyms import suggest
from jshard.signals.value_types import Key, Keys

# Optimizer arguments that users may write without `optimizer.`.
OF_OPTIMIZER = {"lr": "learning_rate"} | {name: name for name in ("learning_rate", "weight_decay", "momentum")}


def compose(source: object, overrides: Sequence[str], faults: Faults) -> tuple[str, Node | None]:
    """Return the name of `source`, and its mapping with includes and overrides applied."""
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
        faults.add(name, Location(name), f"is given {what}", 'give it a path or a mapping, as in "configs/mlp.yaml"')
        return name, None
    if root is not None:
        root = _Includes(faults).laid_under(root, name)
        for word in [overrides] if isinstance(overrides, str) else overrides:
            root = _override(root, word, faults)
    return name, root


def _file(name: str, faults: Faults, about: str | None = None, asked: Location | None = None) -> Node | None:
    """Read a YAML file. Faults of an unreadable file have the subject `about` and the place `asked`."""
    faults.opens(name)
    try:
        if os.path.exists(name) and not os.path.isdir(name) and not os.path.isfile(name):
            return faults.add(
                about or dotted([name]), asked or Location(name), "is a pipe or a device", "give it as a file"
            )
        with open(name, "rb") as file:
            return read_text(file.read(MOST_BYTES + 1), name, faults)
    except FileNotFoundError:
        says, hint = "is not there", _nearest_file(name, asked)
    except (IsADirectoryError, NotADirectoryError):
        says = "is a folder" if os.path.isdir(name) else "is inside a file"
        hint = "give the path of a YAML file"
    except ValueError:
        says, hint = "has a character that is not allowed in a path", "give the path of a file"
    except OSError as error:
        says, hint = f"can't be read: {reason(error)}", "name a file that can be read"
    return faults.add(about or dotted([name]), asked or Location(name), says, hint)


def _nearest_file(name: str, asked: Location | None) -> str:
    """Return a hint for a missing file: the nearest name, relative to the including file."""
    folder, word = os.path.split(name)
    try:
        there = sorted(each for each in os.listdir(folder or ".") if each.endswith((".yaml", ".yml")))
    except (OSError, ValueError):
        return f"is the folder {quoted(folder)} spelled right?"
    spelled = {each: os.path.join(folder, each) for each in there}
    if asked is not None:
        start, own = os.path.split(asked.source)
        spelled = {each: os.path.relpath(path, start or ".") for each, path in spelled.items() if each != own}
    near = nearest(word, spelled)
    return "give the path of a YAML file" if near is None else f"did you mean {quoted(spelled[near])}?"


class _Includes:
    """The files of `jshard.include`, each read once, relative to the including file."""

    def __init__(self, faults: Faults):
        self.faults = faults
        self.read: dict[str, Node | None] = {}
        self.reading: list[str] = []  # real paths of the open files, each included by its predecessor

    def laid_under(self, root: Node, name: str) -> Node:
        """Return `root` laid over its includes."""
        node = _at(root, "jshard", "include")
        if node is None:
            return root
        base: Node | None = None
        self.reading.append(os.path.realpath(name))
        for each in node.value if isinstance(node.value, list) else [node]:
            if isinstance(each.value, str) and each.value:  # the table of keys reports others
                included = self.included(each, name)
                if included is not None:
                    base = included if base is None else self.beside(base, included, name)
        self.reading.pop()
        return root if base is None else overlay(base, root)

    def included(self, node: Node, name: str) -> Node | None:
        asked = str(node.value)
        path = os.path.normpath(os.path.join(os.path.dirname(name) if name != "<dict>" else "", asked))
        about, place = subject(("jshard", "include"), node.place), node.place
        if "\0" in path:
            return self.faults.add(about, place, f"names {quoted(asked)}, which no file can be called", "give a path")
        real = os.path.realpath(path)
        if real == self.reading[-1]:
            return self.faults.add(about, place, f"includes {quoted(asked)}, which is this file", "remove it")
        if real in self.reading:
            fault = f"includes {quoted(asked)}, which includes this file"
            return self.faults.add(about, place, fault, "remove one of the includes")
        if len(self.reading) >= DEEPEST:
            return self.faults.add(about, place, f"nests deeper than {DEEPEST} files", "include them from one file")
        if real not in self.read:
            found = _file(path, self.faults, f"{about} names {quoted(path)}, which", place)
            self.read[real] = None if found is None else self.laid_under(found, path)
        return self.read[real]

    def beside(self, first: Node, second: Node, name: str, path: Path = ()) -> Node:
        """Merge two files included by the same file; a key in both is a fault."""
        assert isinstance(first.value, dict) and isinstance(second.value, dict)
        both, keys = dict(first.value), dict(first.keys)
        for key, node in second.value.items():
            at, place = (*path, key), second.keys[key]
            if key not in both:
                both[key], keys[key] = node, place
            elif at == ("jshard",) and isinstance(node.value, dict) and isinstance(both[key].value, dict):
                both[key] = self.beside(both[key], node, name, at)
            elif keys[key] != place and at != ("jshard", "include"):  # an equal place: one file, included twice
                fault = f"is already at {keys[key]}, and {dotted([name])} includes both"
                self.faults.add(at, place, fault, "keep one of the two")
        return collection(both, first.place, keys)


def _at(node: Node | None, *path: str) -> Node | None:
    for key in path:
        node = node.value.get(key) if node is not None and isinstance(node.value, dict) else None
    return node


def overlay(base: Node, top: Node, levels: int = 2) -> Node:
    """Lay `top` over `base`: by keys of signals, by keys under `jshard`, and by arguments of an
    equal model or data. If `top` has all keys of `base`, the keys have the order of `top`: in a
    mesh, it is the order of the devices."""
    if not levels or not isinstance(base.value, dict) or not isinstance(top.value, dict):
        return top
    both = dict(base.value)
    for key, node in top.value.items():
        further = levels == 1 and key in ("model", "data") and _names_no_other(both.get(key), node)
        deeper = levels if key == "jshard" or further else levels - 1
        both[key] = overlay(both[key], node, deeper) if key in both else node
    if both.keys() == top.value.keys():
        both = {key: both[key] for key in top.value}
    return collection(both, top.place, {**base.keys, **top.keys})


def _names_no_other(base: Node | None, top: Node) -> bool:
    """Return whether `top` keeps the included model or data, and thereby the included arguments."""
    if base is None or not isinstance(base.value, dict) or not isinstance(top.value, dict):
        return False
    if "path" in top.value:
        return "path" in base.value and top.value["path"].value == base.value["path"].value
    return "text" not in top.value or "text" in base.value


def _override(root: Node, word: str, faults: Faults) -> Node:
    """Apply a `path=value` of the command line to the file."""
    place = Location(COMMAND_LINE)
    about = f"{quoted(str(word))} ({COMMAND_LINE})"

    def wrong(says: str, hint: str) -> Node:
        faults.add(about, place, says, hint)
        return root

    key, equals, text = str(word).partition("=")
    if not equals or not key:
        return wrong("is not key=value", "write it like steps=20 or layer1.column=tensor")
    assert isinstance(root.value, dict)
    names = [*root.value, "jshard"]
    owner = max((name for name in names if key == name or key.startswith(f"{name}.")), key=len, default=None)
    if owner is not None:
        path = [owner, *key.removeprefix(owner).split(".")[1:]]
    elif key.split(".")[0] in TRAIN:
        path = ["jshard", "train", *key.split(".")]
    else:
        known = [*root.value, *TRAIN, "jshard"]
        otherwise = did_you_mean(key, known, f"write {listed([*TRAIN, 'a signal'])}")
        hint = suggest(key.split(".")[0], known, otherwise)
        if full := full_key(key):
            hint = f"write {dotted([f'{full}={text}'])}"
        return wrong("names no signal and no key of jshard.train", hint)
    if len(path) >= DEEPEST:
        return wrong(f"nests deeper than {DEEPEST} levels", "write it flatter")
    value = read_word(text, COMMAND_LINE, faults, about)
    if value is None:
        return root
    if path[0] == "jshard" and "include" in (path[1:2] or (value.value if isinstance(value.value, dict) else ())):
        return wrong("can't include a file", "write jshard.include in the file")
    mesh = _at(root, "jshard", "mesh")
    if path[:2] == ["jshard", "mesh"] and path[2:] and mesh is not None and isinstance(mesh.value, dict):
        name = path[2]
        if name not in mesh.value:  # no signal would use a new axis
            hint = did_you_mean(name, mesh.value, "give the whole mesh: jshard.mesh={...}")
            return wrong(f"sets mesh axis {quoted(name)}, which is not in jshard.mesh ({mesh.place})", hint)
    return _placed(root, path, value, place, Keys({"jshard": Key(JSHARD_TABLE, "")}))  # signals have no short forms


def full_key(key: str) -> str | None:
    """Return the full key: `jshard.mesh.data` for `mesh.data`, `optimizer.learning_rate` for `lr`.
    Return a key of the experiment unchanged, and None for a possible key of a signal."""
    first = key.split(".")[0]
    if first in TRAIN:
        return key
    if first in JSHARD_TABLE.keys:
        return f"jshard.{key}"
    return f"optimizer.{OF_OPTIMIZER[key]}" if key in OF_OPTIMIZER else None


def _placed(node: Node | None, path: list[str], value: Node, place: Location, table: object) -> Node:
    """Return `node` with `value` at `path`. A short form (`optimizer: adamw`) becomes a mapping."""
    if not path:
        return value
    inside: dict[str, Node] = {}
    keys: dict[str, Location] = {}
    if node is not None and isinstance(node.value, dict):
        inside, keys = dict(node.value), dict(node.keys)
    elif node is not None and isinstance(table, Keys) and table.stands_for is not None:
        inside, keys = {table.stands_for: node}, {table.stands_for: node.place}
    row = table.keys.get(path[0]) if isinstance(table, Keys) else None
    inside[path[0]] = _placed(inside.get(path[0]), path[1:], value, place, row.kind if row is not None else None)
    keys[path[0]] = keys.get(path[0], place) if path[1:] else place
    return collection(inside, node.place if node is not None else place, keys)

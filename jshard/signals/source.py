"""YAML text as nodes that keep their line for ever.

Read from PyYAML's events and not by its constructors: no tag is ever obeyed, keys that repeat are found, words mean
what people expect (`1e-4` is a number, `no` is a word, `017` is 17), and what aliases expand to is bounded.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml

from jshard.errors import Place
from jshard.signals.faults import Faults, choose, quoted, shown, subject
from jshard.signals.nodes import DEEPEST, MOST_VALUES, Node, Stop, mapping, scalar, sequence, whole

MOST_BYTES = 4_000_000


@dataclasses.dataclass(slots=True)
class _Open:
    """A mapping or list that is being read."""

    place: Place
    anchor: str | None
    is_mapping: bool
    items: list[Node] = dataclasses.field(default_factory=list)
    value: dict[str, Node] = dataclasses.field(default_factory=dict)
    keys: dict[str, Place] = dataclasses.field(default_factory=dict)
    merged: list[Node] = dataclasses.field(default_factory=list)
    key: tuple[str | None, Place] | None = None  # read, its value is awaited; None: a key that can't be one
    is_merge: bool = False


class _Reader:
    def __init__(self, source: str, faults: Faults, has_lines: bool = True):
        self.source = source
        self.has_lines = has_lines
        self.faults = faults
        self.open: list[_Open] = []
        self.anchors: dict[str, Node] = {}
        self.count = 0
        self.root: Node | None = None
        self.here: Any = None  # where the scanner stands

    def place(self, mark: Any) -> Place:
        return Place(self.source, mark.line + 1, mark.column + 1) if self.has_lines else Place(self.source)

    def stop(self, place: Place, fault: str, hint: str) -> Stop:
        self.faults.add(place, f"{place} {fault}", hint)
        return Stop()

    def path(self) -> tuple[str, ...]:
        return tuple(o.key[0] for o in self.open if o.is_mapping and o.key is not None and o.key[0] is not None)

    def read(self, text: str) -> None:
        documents = 0
        loader = yaml.SafeLoader(text)
        self.here = loader.get_mark
        while loader.check_event():
            event = loader.get_event()
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self.stop(self.place(event.start_mark), "starts a second document", "keep one in each file")
            elif isinstance(event, yaml.AliasEvent):
                self.alias(event)
            elif isinstance(event, yaml.NodeEvent):
                self.begin(event)
            elif isinstance(event, yaml.CollectionEndEvent):
                self.end()

    def begin(self, event: Any) -> None:
        place = self.place(event.start_mark)
        if event.tag is not None:
            tag = quoted(event.tag.replace("tag:yaml.org,2002:", "!!"))
            hint = "remove it, and quote the value if it is text"
            raise self.stop(place, f"has the tag {tag}, and tags are never obeyed here", hint)
        self.grow(place, 1)
        if isinstance(event, yaml.ScalarEvent):
            plain = event.style is None
            self.place_node(
                Node(scalar(event.value) if plain else event.value, place), event.anchor, plain and event.value == "<<"
            )
            return
        if len(self.open) + 1 >= DEEPEST:
            raise self.stop(place, f"nests deeper than {DEEPEST} levels", "write it flatter")
        if event.anchor is not None:
            self.anchors.pop(event.anchor, None)
        self.open.append(_Open(place, event.anchor, isinstance(event, yaml.MappingStartEvent)))

    def alias(self, event: Any) -> None:
        place = self.place(event.start_mark)
        node = self.anchors.get(event.anchor)
        if node is None:
            if any(o.anchor == event.anchor for o in self.open):
                raise self.stop(place, f'has "*{event.anchor}" inside "&{event.anchor}" itself', "remove it")
            otherwise = f'write "&{event.anchor}" at what it should stand for'
            hint = choose(f"*{event.anchor}", [f"*{anchor}" for anchor in self.anchors], otherwise)
            raise self.stop(place, f'has "*{event.anchor}", but no "&{event.anchor}" stands above it', hint)
        self.grow(place, node.size)
        if len(self.open) + node.depth >= DEEPEST:
            raise self.stop(place, f"nests deeper than {DEEPEST} levels", "write it flatter")
        self.place_node(node, None, False)

    def grow(self, place: Place, size: int) -> None:
        self.count += size
        if self.count > MOST_VALUES:
            raise self.stop(
                place, f"makes more than {MOST_VALUES:,} values of the file", "write fewer aliases or split it"
            )

    def end(self) -> None:
        done = self.open.pop()
        if not done.is_mapping:
            self.place_node(sequence(done.items, done.place), done.anchor, False)
            return
        for node in done.merged:  # what the mapping says itself wins, then the earlier merge
            for key, value in (node.value if isinstance(node.value, dict) else {}).items():
                if key not in done.value:
                    done.value[key] = value
                    done.keys[key] = node.keys[key]
        self.place_node(mapping(done.value, done.place, done.keys), done.anchor, False)

    def place_node(self, node: Node, anchor: str | None, is_merge: bool) -> None:
        """Put a finished node where it belongs: as the document, an item, a key or a value."""
        if anchor is not None:
            self.anchors[anchor] = node
        if not self.open:
            self.root = node
            return
        inside = self.open[-1]
        if not inside.is_mapping:
            inside.items.append(node)
        elif inside.key is None:
            inside.key, inside.is_merge = (self.key(node), node.place), is_merge
        else:
            (key, place), inside.key = inside.key, None
            if inside.is_merge:
                self.merge(inside, node)
            elif key is not None:
                if key in inside.value:
                    self.repeated((*self.path(), key), place, inside.keys[key])
                else:
                    inside.value[key], inside.keys[key] = node, place

    def key(self, node: Node) -> str | None:
        if isinstance(node.value, str):
            return node.value
        if isinstance(node.value, (dict, list)):
            self.faults.add(
                node.place, f"{node.place} has {shown(node.value)} for a key", "write a name before the colon"
            )
        else:
            word = shown(node.value)
            hint = "write a name before the colon" if node.value is None else f'write "{word}" in quotes'
            self.faults.add(node.place, f"{node.place} has {word} for a key, which is not a name", hint)
        return None

    def merge(self, inside: _Open, node: Node) -> None:
        nodes = node.value if isinstance(node.value, list) else [node]
        for each in nodes:
            if isinstance(each.value, dict):
                inside.merged.append(each)
            else:
                fault = f'{each.place} merges {shown(each.value)} by "<<", which takes a mapping'
                self.faults.add(each.place, fault, 'write "<<: *name" with &name at a mapping')

    def repeated(self, path: tuple[str, ...], place: Place, first: Place) -> None:
        if len(path) == 1:
            self.faults.add(place, f"{subject(path, place)} is already at {first}", "keep one of the two")
        else:
            key = quoted(path[-1] if path[0] == "jshard" else ".".join(path[1:]))
            owner = subject(path[:-1], place)
            self.faults.add(place, f"{owner} has the key {key} again, after {first}", "keep one of the two")


def read_text(data: bytes, source: str, faults: Faults) -> Node | None:
    """The one mapping that a YAML file is; None, and its faults noted, when it isn't one."""
    place = Place(source, 1)
    if len(data) > MOST_BYTES:
        faults.add(place, f"{source} has {len(data):,} bytes, more than a configuration's {MOST_BYTES:,}", "split it")
        return None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        faults.add(Place(source, line), f"{source}:{line} is not UTF-8 text", "save the file as UTF-8")
        return None
    return whole(_read(text, _Reader(source, faults)), source, faults)


def read_word(text: str, source: str, faults: Faults) -> Node | None:
    """A value given outside a file, by the rules of a file. It has a source and no line."""
    root = _read(text, _Reader(source, faults, has_lines=False))
    return Node(None, Place(source)) if root is None and not faults else root


def _read(text: str, reader: _Reader) -> Node | None:
    try:
        reader.read(text)
        return reader.root
    except Stop:
        return None
    except yaml.MarkedYAMLError as error:
        _not_yaml(error, reader)
    except yaml.reader.ReaderError as error:
        place = Place(reader.source, text.count("\n", 0, error.position) + 1 if reader.has_lines else None)
        character = error.character if isinstance(error.character, int) else ord(error.character[:1])
        reader.faults.add(place, f"{place} has the character U+{character:04X}, which YAML does not allow", "remove it")
    except (ValueError, OverflowError):  # PyYAML's own, for numbers in escapes and directives that no one can mean
        place = reader.place(reader.here())
        reader.faults.add(place, f"{place} has an escape or a % line with an impossible number", "remove it")
    return None


# What the scanner and parser say, by a piece of it, in our words.
_STAR = ('starts a word with "*" or "&", which mean aliases in YAML', 'quote it, as in "*/mlp": {row: data}')
_ESCAPE = ("has a backslash in double quotes that YAML does not know", "use single quotes")
_PROBLEMS = [
    ("character '\\t' that cannot start", "is indented by a tab", "indent by spaces"),
    ("cannot start any token", "starts a value with a character that means something else in YAML", "quote the value"),
    ("mapping values are not allowed", 'has a second ":" where none can stand', "quote the text, or start a new line"),
    ("expected ',' or '}'", 'has a "{" that is not closed', 'write "}" at its end, and commas between'),
    ("expected ',' or ']'", 'has a "[" that is not closed', 'write "]" at its end, and commas between'),
    ("could not find expected ':'", 'has a line without ":"', "write it as key: value"),
    ("found unexpected end of stream", "opens a quote that is never closed", "close it"),
    ("expected alphabetic or numeric", *_STAR),
    ("did not find expected alphabetic", *_STAR),
    ("expected <block end>", "is indented unlike the lines above it", "indent keys of one mapping alike"),
    ("sequence entries are not allowed", 'has a "- " where no list can start', "start the list on a line of its own"),
    ("mapping keys are not allowed", 'has a "? " where no key can start', "write it as key: value"),
    ("unknown escape character", *_ESCAPE),
    ("escape sequence", *_ESCAPE),
    ("tag", "has a tag that can't be read", "remove it"),
    ("directive", "has a % line that YAML does not know", "remove it"),
]


def _not_yaml(error: yaml.MarkedYAMLError, reader: _Reader) -> None:
    problem = str(error.problem)
    unknown = ("is not YAML from here on", "look for an unclosed quote or bracket, or a wrong indent")
    fault, hint = next((words for piece, *words in _PROBLEMS if piece in problem), unknown)
    opened = "not closed" in fault or "never closed" in fault or "without" in fault
    mark = (error.context_mark if opened else None) or error.problem_mark or error.context_mark
    place = reader.place(mark)
    reader.faults.add(place, f"{place} {fault}", hint)

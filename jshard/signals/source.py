"""YAML text parsed to nodes, each with its line. The parser reads PyYAML's events and calls none of
its constructors. It refuses tags, finds repeated keys, and bounds the expansion of aliases. An
unquoted word has its usual meaning: `1e-4` is a number, `no` is a word, `017` is 17."""

from __future__ import annotations

from typing import Any

import yaml

from jshard.errors import JShardError, Location, did_you_mean, quoted
from jshard.signals.faults import Faults, Path, shown
from jshard.signals.nodes import DEEPEST, MOST_VALUES, Node, Stop, collection, document, scalar

MOST_BYTES = 1_000_000


class _EventReader:
    """A recursive reader of a text's PyYAML events. In a path, None is a list item or an invalid key."""

    def __init__(self, source: str, faults: Faults, about: Path | str = ()):
        self.source = source
        self.faults = faults
        self.about = about  # for a text without lines
        self.anchors: dict[str, Node | None] = {}  # None: still being read
        self.count = 0
        self.loader: Any = None

    def place(self, mark: Any) -> Location:
        return Location(self.source) if self.about else Location(self.source, mark.line + 1, mark.column + 1)

    def add(self, place: Location, says: str, hint: str) -> None:
        self.faults.add(self.about, place, says, hint)

    def stop(self, place: Location, says: str, hint: str) -> Stop:
        self.add(place, says, hint)
        return Stop()

    def read(self, text: str) -> Node | None:
        root = None
        self.loader = yaml.SafeLoader(text)
        self.loader.get_event()
        while not self.loader.check_event(yaml.StreamEndEvent):
            start = self.loader.get_event()
            if root is not None:
                raise self.stop(self.place(start.start_mark), "starts a second document", "keep one in each file")
            root = self.node(())
            self.loader.get_event()
        return root

    def node(self, path: tuple[str | None, ...]) -> Node:
        """Return the value at `path`."""
        event = self.loader.get_event()
        place = self.place(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event.anchor, place, path)
        if event.tag is not None:
            tag = quoted(event.tag.replace("tag:yaml.org,2002:", "!!"))
            hint = f'quote it: "{event.tag}"' if "match" in path else "remove it, and quote the value if it is text"
            raise self.stop(place, f"has the tag {tag}, but tags are not allowed", hint)
        self.grow(place, 1, len(path) + (not isinstance(event, yaml.ScalarEvent)))
        if isinstance(event, yaml.ScalarEvent):
            if "\0" in event.value:
                raise self.stop(place, 'has the character "\\0", which no name or path can hold', "remove it")
            node = Node(scalar(event.value) if event.style is None else event.value, place)
        else:
            if event.anchor is not None:
                self.anchors[event.anchor] = None
            node = (self.mapping if isinstance(event, yaml.MappingStartEvent) else self.sequence)(place, path)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def alias(self, anchor: str, place: Location, path: tuple[str | None, ...]) -> Node:
        node = self.anchors.get(anchor)
        if node is None:
            if anchor in self.anchors:
                raise self.stop(place, f'has "*{anchor}" inside "&{anchor}" itself', "remove it")
            known = [f"*{name}" for name, named in self.anchors.items() if named is not None]
            mend = f'write "&{anchor}" before the value to repeat'
            hint = f'quote it: "*{anchor}"' if "match" in path else did_you_mean(f"*{anchor}", known, mend)
            raise self.stop(place, f'has "*{anchor}", but no "&{anchor}" is above it', hint)
        self.grow(place, node.size, len(path) + node.depth)
        return node

    def grow(self, place: Location, size: int, depth: int) -> None:
        self.count += size
        if self.count > MOST_VALUES:
            hint = "write fewer aliases or split it"
            raise self.stop(place, f"expands to more than {MOST_VALUES:,} values", hint)
        if depth >= DEEPEST:
            raise self.stop(place, f"nests deeper than {DEEPEST} levels", "write it flatter")

    def sequence(self, place: Location, path: tuple[str | None, ...]) -> Node:
        items: list[Node] = []
        while not self.loader.check_event(yaml.SequenceEndEvent):
            items.append(self.node((*path, None)))
        self.loader.get_event()
        return collection(items, place, {})

    def mapping(self, place: Location, path: tuple[str | None, ...]) -> Node:
        value: dict[str, Node] = {}
        keys: dict[str, Location] = {}
        while not self.loader.check_event(yaml.MappingEndEvent):
            ahead = self.loader.peek_event()
            key = self.node((*path, None))
            if isinstance(ahead, yaml.ScalarEvent) and ahead.style is None and ahead.value == "<<":
                hint = "write extends: with the name of a signal"
                raise self.stop(key.place, 'has "<<", but nothing is merged here', hint)
            name = self.name(key)
            node = self.node((*path, name))
            if name is not None and name in value:
                self.repeated((*(each for each in path if each is not None), name), key.place, keys[name])
            elif name is not None:
                value[name], keys[name] = node, key.place
        self.loader.get_event()
        return collection(value, place, keys)

    def name(self, key: Node) -> str | None:
        if isinstance(key.value, str):
            return key.value
        word, is_collection = shown(key.value), isinstance(key.value, (dict, list))
        plain = is_collection or key.value is None
        hint = "write a name before the colon" if plain else f'write "{word}" in quotes'
        self.add(key.place, f"has {word} for a key{'' if is_collection else ', which is not a name'}", hint)
        return None

    def repeated(self, path: Path, place: Location, first: Location) -> None:
        if self.about:
            self.add(place, f"has the key {quoted('.'.join(path))} again", "keep one of the two")
        elif not path[1:]:
            self.faults.add(path, place, f"is already at {first}", "keep one of the two")
        else:
            key = quoted(path[-1] if path[0] == "jshard" else ".".join(path[1:]))
            self.faults.add(path[:-1], place, f"has the key {key} again, after {first}", "keep one of the two")


def read_text(data: bytes, source: str, faults: Faults) -> Node | None:
    """Parse a YAML file to its mapping. Return None, after noting faults, if it is not a mapping."""
    if len(data) > MOST_BYTES:
        faults.add(source, Location(source), f"has more than {MOST_BYTES:,} bytes", "split it")
        return None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        place = Location(source, data.count(b"\n", 0, error.start) + 1)
        faults.add((), place, "is not UTF-8 text", "save the file as UTF-8")
        return None
    return document(_read(text, _EventReader(source, faults)), source, faults)


def read_word(text: str, source: str, faults: Faults, about: str = "a word") -> Node | None:
    """Parse a value from outside a file by the same rules. Its place has no line; faults are `about` it."""
    root = _read(text, _EventReader(source, faults, about))
    return Node(None, Location(source)) if root is None and not faults else root


def _read(text: str, reader: _EventReader) -> Node | None:
    try:
        return reader.read(text)
    except Stop:
        return None
    except JShardError:  # raised by too many faults
        raise
    except yaml.MarkedYAMLError as error:
        _not_yaml(error, reader)
    except yaml.reader.ReaderError as error:
        place = Location(reader.source, None if reader.about else text.count("\n", 0, error.position) + 1)
        reader.add(place, f"has the character U+{error.character:04X}, which YAML does not allow", "remove it")
    except (ValueError, OverflowError):  # from PyYAML, for impossible numbers
        place = reader.place(reader.loader.get_mark())
        reader.add(place, "has an escape or a % line with an impossible number", "remove it")
    return None


# A piece of PyYAML's message -> our fault and hint.
_STAR = ('starts a word with "*" or "&", which mean aliases in YAML', 'quote it, as in "*/mlp": {row: data}')
_INSIDE = (
    'has a "%s" inside a word of a list, where it means something else in YAML',
    'quote the word: ["layer?/{q,k}"]',
)
_ESCAPE = ("has a backslash in double quotes that YAML does not know", "use single quotes")
_PROBLEMS = [
    ("character '\\t' that cannot start", "is indented by a tab", "indent by spaces"),
    ("cannot start any token", "starts a value with a character that means something else in YAML", "quote the value"),
    ("mapping values are not allowed", 'has a second ":" out of place', "quote the text, or start a new line"),
    ("expected ',' or '}'", 'has a "{" that is not closed', 'write "}" at its end, and commas between'),
    ("or ']', but got '{'", _INSIDE[0] % "{", _INSIDE[1]),
    ("or ']', but got '?'", _INSIDE[0] % "?", _INSIDE[1]),
    ("expected ',' or ']'", 'has a "[" that is not closed', 'write "]" at its end, and commas between'),
    ("could not find expected ':'", 'has a line without ":"', "write it as key: value"),
    ("found unexpected end of stream", "opens a quote that is never closed", "close it"),
    ("expected alphabetic or numeric", *_STAR),
    ("did not find expected alphabetic", *_STAR),
    ("<block end>, but found '<scalar>'", 'has more text after a "}", "]" or quote', "quote the whole value"),
    ("expected <block end>", "is indented unlike the lines above it", "indent keys of one mapping alike"),
    ("sequence entries are not allowed", 'has a "- " where no list can start', "start the list on a line of its own"),
    ("mapping keys are not allowed", 'has a "? " where no key can start', "write it as key: value"),
    ("unknown escape character", *_ESCAPE),
    ("escape sequence", *_ESCAPE),
    ("tag", "has a tag that can't be read", "remove it"),
    ("directive", "has a % line that YAML does not know", "remove it"),
]


def _not_yaml(error: yaml.MarkedYAMLError, reader: _EventReader) -> None:
    problem = str(error.problem)
    unknown = ("is not YAML from here on", "look for an unclosed quote or bracket, or a wrong indent")
    fault, hint = next((words for piece, *words in _PROBLEMS if piece in problem), unknown)
    opened = "not closed" in fault or "never closed" in fault or "without" in fault
    mark = (error.context_mark if opened else None) or error.problem_mark or error.context_mark
    reader.add(reader.place(mark), fault, hint)

"""Reading and editing of protocol buffers without a schema: fields by number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping


class Unreadable(ValueError):
    """An error for bytes without a valid message."""


class Message(dict[int, list[int | memoryview]]):
    """The values of each field, in order: unsigned numbers, or bytes for all else."""

    def __init__(self, content: bytes | memoryview = b""):
        for field, value, _ in fields(content):
            self.setdefault(field, []).append(value)

    def number(self, field: int) -> int:
        """Return a number, or 0 for a missing field."""
        value = self.get(field, [0])[-1]
        if not isinstance(value, int):
            raise Unreadable("bytes where a number is due")
        return value

    def contents(self, field: int) -> list[memoryview]:
        """Return the messages of a repeated field, unread."""
        values = self.get(field, [])
        found = [value for value in values if isinstance(value, memoryview)]
        if len(found) < len(values):
            raise Unreadable("a number where a message is due")
        return found

    def messages(self, field: int) -> list[Message]:
        return [Message(content) for content in self.contents(field)]

    def message(self, field: int) -> Message:
        return Message(*self.contents(field)[-1:])

    def text(self, field: int) -> str:
        return b"".join(self.contents(field)[-1:]).decode("utf-8", "replace")

    def numbers(self, field: int) -> list[int]:
        """Return the numbers of a repeated field, packed or one by one."""
        values = self.get(field, [])
        return [number for each in values for number in ([each] if isinstance(each, int) else _unpacked(each))]


def fields(content: bytes | memoryview) -> Iterator[tuple[int, int | memoryview, memoryview]]:
    """Read a message: the number of each field, its value, and the bytes of both."""
    content, place, end = memoryview(content), 0, len(content)
    while place < end:
        begin = place
        key, place = _varint(content, place)
        kind = key & 7
        if kind not in (0, 1, 2, 5):
            raise Unreadable(f"a field of kind {kind}")
        value, place = _varint(content, place) if kind in (0, 2) else ({1: 8, 5: 4}[kind], place)
        if kind:  # bytes of this length
            value, place = content[place : place + value], place + value
        if place > end:
            raise Unreadable("a field that is cut off")
        yield key >> 3, value, content[begin:place]


def split_delimited(content: bytes) -> tuple[bytes, bytes]:
    """Split a message with its length in front from the bytes after it."""
    size, begin = _varint(memoryview(content), 0)
    return content[: begin + size], content[begin + size :]


def written(field: int, content: bytes | memoryview) -> bytes:
    """Return a field of bytes: a text, a message, or packed numbers."""
    return packed([field << 3 | 2, len(content)]) + bytes(content)


def packed(numbers: Iterable[int]) -> bytes:
    found = bytearray()
    for number in numbers:
        while number > 127:
            found.append(number & 127 | 128)
            number >>= 7
        found.append(number)
    return bytes(found)


def edited(content: bytes | memoryview, changes: Mapping[int, Callable[[memoryview], bytes]]) -> bytes:
    """Return a message with the bytes of its fields changed by functions. All these fields must exist."""
    found, left = [], set(changes)
    for field, value, as_it_was in fields(content):
        if field in changes and isinstance(value, memoryview):
            left.discard(field)
            found.append(written(field, changes[field](value)))
        else:
            found.append(bytes(as_it_was))
    if left:
        raise Unreadable(f"a message without field {min(left)}")
    return b"".join(found)


def _unpacked(content: memoryview) -> Iterator[int]:
    place = 0
    while place < len(content):
        number, place = _varint(content, place)
        yield number


def _varint(content: memoryview, place: int) -> tuple[int, int]:
    """Read a number in base 128, lowest digit first; also return the place after it."""
    number = shift = 0
    while place < len(content):
        digit = content[place]
        place += 1
        number |= (digit & 127) << shift
        if digit < 128:
            return number, place
        shift += 7
    raise Unreadable("a number that is cut off")

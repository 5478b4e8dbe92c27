"""Read protocol buffers: the fields of a message by their numbers, with no schema at hand."""

from __future__ import annotations


class Unreadable(ValueError):
    """These bytes are no message."""


class Message(dict[int, list[int | memoryview]]):
    """The values of each field, in order: numbers without their sign, all else as bytes."""

    def __init__(self, content: bytes | memoryview = b""):
        content, place, end = memoryview(content), 0, len(content)
        while place < end:
            key, place = _varint(content, place)
            kind = key & 7
            if kind not in (0, 1, 2, 5):
                raise Unreadable(f"a field of kind {kind}")
            value, place = _varint(content, place) if kind in (0, 2) else ({1: 8, 5: 4}[kind], place)
            if kind:  # not a number: so many bytes
                value, place = content[place : place + value], place + value
            if place > end:
                raise Unreadable("a field that is cut off")
            self.setdefault(key >> 3, []).append(value)

    def number(self, field: int) -> int:
        """Return a number; 0 where it is left out."""
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
        found = []
        for value in self.get(field, []):
            place = 0
            while not isinstance(value, int) and place < len(value):
                number, place = _varint(value, place)
                found.append(number)
            found += [value] if isinstance(value, int) else []
        return found


def _varint(content: memoryview, place: int) -> tuple[int, int]:
    """Read a number in base 128, the lowest digit first; also return the place behind it."""
    number = shift = 0
    while place < len(content):
        digit = content[place]
        place += 1
        number |= (digit & 127) << shift
        if digit < 128:
            return number, place
        shift += 7
    raise Unreadable("a number that is cut off")

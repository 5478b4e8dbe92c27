"""Protocol buffers as they lie in a file: the fields of a message by their numbers, with no schema at hand."""

from __future__ import annotations

from collections.abc import Iterator

Value = int | memoryview


class Unreadable(ValueError):
    """These bytes are no message."""


def fields(message: memoryview) -> Iterator[tuple[int, Value]]:
    """The number and the value of each field: a number as it is, without its sign, all else as bytes."""
    place, end = 0, len(message)
    while place < end:
        key, place = _number(message, place)
        kind = key & 7
        if kind == 0:
            value, place = _number(message, place)
            yield key >> 3, value
            continue
        if kind == 2:
            size, place = _number(message, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise Unreadable(f"a field of kind {kind}")
        if place + size > end:
            raise Unreadable("a field that is cut off")
        yield key >> 3, message[place : place + size]
        place += size


def _number(message: memoryview, place: int) -> tuple[int, int]:
    """A number in base 128, the lowest digit first, and the place behind it."""
    number = shift = 0
    try:
        while True:
            digit = message[place]
            place += 1
            number |= (digit & 127) << shift
            if digit < 128:
                return number, place
            shift += 7
    except IndexError:
        raise Unreadable("a number that is cut off") from None


def inside(value: Value) -> memoryview:
    """A field that is a message or a text."""
    if isinstance(value, int):
        raise Unreadable("a number where a message is due")
    return value


def whole(value: Value) -> int:
    """A field that is a number."""
    if not isinstance(value, int):
        raise Unreadable("bytes where a number is due")
    return value


def text(value: Value) -> str:
    return bytes(inside(value)).decode("utf-8", "replace")


def numbers(value: Value) -> list[int]:
    """A field of several numbers, packed or one of them alone."""
    if isinstance(value, int):
        return [value]
    found, place = [], 0
    while place < len(value):
        number, place = _number(value, place)
        found.append(number)
    return found

"""The order of collectives in a CPU program, kept through JAX's compilation cache.

XLA for CPUs compiles a program to thunks. A thunk runs after the earlier thunks with the same buffers or the same
resource. All collectives use one resource, so they run in the same order on every device. But each sequence of
thunks is serialized by itself: in a program read from the cache, the collectives of a loop's body and those around
the loop have different resources (docs/design/0003-pretend-devices.md). So a thunk is inserted between them: it
copies a buffer of each onto itself. XLA skips the copy, but runs the thunk after the first and before the second.
"""

from __future__ import annotations

import dataclasses

from jshard.programs.protobuf import Message, Unreadable, edited, fields, packed, split_delimited, written

# Fields in XLA's service/cpu/executable.proto and backends/cpu/runtime/thunk.proto.
EXECUTABLE, SEQUENCE = 1, 6  # of what JAX writes, and of the executable
THUNK, USERS = 1, 2  # of a sequence
INDICES = 1  # of the users of a resource: indices of thunks
KIND, INFO, CALL, CONDITIONAL, WHILE, COPY, COLLECTIVE, LAST = 1, 2, 3, 4, 10, 12, 18, 22  # of a thunk
SEQUENCES = {CALL: (1,), CONDITIONAL: (1,), WHILE: (1, 2)}  # of those that run others
BUFFERS, WRITTEN = 2, 2  # of a collective, and of its buffers


def in_order(program: bytes) -> bytes:
    """Return a serialized CPU program with its collectives in order."""
    header, rest = split_delimited(program)
    executable = {SEQUENCE: lambda content: _sequence(content)[0]}
    return header + edited(rest, {EXECUTABLE: lambda content: edited(content, executable)})


@dataclasses.dataclass(frozen=True)
class _Thunk:
    content: bytes
    buffer: bytes | None = None  # written by a collective in it
    runs_others: bool = False


def _sequence(content: memoryview) -> tuple[bytes, bytes | None]:
    """Return a sequence with its collectives in order, and a buffer written by a collective."""
    thunks, places, rest = list[bytes](), list[int](), list[bytes]()
    last = None
    for field, value, as_written in fields(content):
        if field != THUNK or isinstance(value, int):
            rest.append(bytes(as_written))
            continue
        thunk = _thunk(value)
        if thunk.buffer is not None:
            if last is not None and last.buffer is not None and (last.runs_others or thunk.runs_others):
                thunks.append(_behind(last.buffer, thunk.buffer))
            last = thunk
        places.append(len(thunks))
        thunks.append(thunk.content)

    def users(content: memoryview) -> bytes:
        return edited(content, {INDICES: lambda _: packed(places[each] for each in Message(content).numbers(INDICES))})

    rest = [edited(each, {USERS: users}) for each in rest]
    return b"".join([*(written(THUNK, each) for each in thunks), *rest]), last and last.buffer


def _thunk(content: memoryview) -> _Thunk:
    message = Message(content)
    (what,) = message.keys() - {KIND, INFO}
    if what == COLLECTIVE:
        return _Thunk(bytes(content), bytes(message.message(what).message(BUFFERS).contents(WRITTEN)[0]))
    if what not in SEQUENCES:
        if what > LAST:
            raise Unreadable(
                f"a thunk of kind {message.text(KIND)}, of which jshard can't tell whether it holds collectives"
            )
        return _Thunk(bytes(content))
    buffers = list[bytes]()

    def ordered(content: memoryview) -> bytes:
        found, buffer = _sequence(content)
        buffers.extend([] if buffer is None else [buffer])
        return found

    held = message.message(what).keys() & SEQUENCES[what]
    changed = edited(content, {what: lambda content: edited(content, dict.fromkeys(held, ordered))})
    return _Thunk(changed, buffers[0] if buffers else None, runs_others=True)


def _behind(first: bytes, second: bytes) -> bytes:
    """Return a call of two copies, each of a buffer onto itself."""
    copies = [written(COPY, written(1, buffer) + written(2, buffer)) for buffer in (first, second)]
    thunks = [written(THUNK, written(KIND, b"copy") + written(INFO, b"") + each) for each in copies]
    return written(KIND, b"call") + written(INFO, b"") + written(CALL, written(1, b"".join(thunks)))

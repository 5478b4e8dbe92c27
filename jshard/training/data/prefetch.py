"""Reading ahead: what an iterator makes is made in the background while the step before it runs."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")
FAREWELL = 5.0  # seconds to wait for a reader that is still inside the user's own code


@contextlib.contextmanager
def read_ahead(made: Iterator[T], depth: int) -> Iterator[Iterator[T]]:
    """Yield what `made` yields, up to `depth` of it ready before it is asked for; 0 makes each when it is asked for. What goes
    wrong there is raised here, with the traceback that it had there."""
    if depth == 0:
        yield made
        return
    ready, room, over = queue.SimpleQueue[Any](), threading.Semaphore(depth), threading.Event()

    def read() -> None:
        try:
            for value in made:
                room.acquire()
                if over.is_set():
                    return
                ready.put((value, None))
            ready.put((None, StopIteration()))
        except BaseException as error:  # all of them: it is raised where the values are wanted
            ready.put((None, error))

    def values() -> Iterator[T]:
        while True:
            value, error = ready.get()
            room.release()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield value

    thread = threading.Thread(target=read, name="jshard reads ahead", daemon=True)
    thread.start()
    try:
        yield values()
    finally:
        over.set()
        room.release()
        thread.join(FAREWELL)

"""Reading ahead: what an iterator makes is made in the background while the step before it runs."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
NOTICE = 0.1  # seconds after which a reader that waits for room sees that nobody wants more
FAREWELL = 5.0  # seconds to wait for a reader that is still inside the user's own code


@contextlib.contextmanager
def read_ahead(made: Iterator[T], depth: int) -> Iterator[Iterator[T]]:
    """Yield what `made` yields, up to `depth` of it ready before it is asked for; 0 makes each when it is asked for. What goes
    wrong there is raised here, with the traceback that it had there."""
    if depth == 0:
        yield made
        return
    reader = _BackgroundReader(made, depth)
    try:
        yield iter(reader)
    finally:
        reader.stop()


class _BackgroundReader(Generic[T]):
    def __init__(self, made: Iterator[T], depth: int):
        self.made, self.ready = made, queue.Queue[Any](depth)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name="jshard reads ahead", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            for value in self.made:
                if not self._put((value, None)):
                    return
            self._put((None, StopIteration()))
        except BaseException as error:  # all of them: it is raised where the values are wanted
            self._put((None, error))

    def _put(self, item: object) -> bool:
        while not self.stopped.is_set():
            with contextlib.suppress(queue.Full):
                self.ready.put(item, timeout=NOTICE)
                return True
        return False

    def __iter__(self) -> Iterator[T]:
        while True:
            value, error = self.ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield value

    def stop(self) -> None:
        self.stopped.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self.ready.get_nowait()
        self.thread.join(FAREWELL)

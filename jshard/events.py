"""What happens, told once to whoever listens: the log of a run, and stderr where `JSHARD_LOG` asks for it.

    if events.tell is not None:
        events.tell("saved", step=100, folder="runs/mine/checkpoints/100")

Where nobody listens `tell` is None, and an event costs that question. `WORDS` is the one list of events: which word of
`JSHARD_LOG` shows it, and how it reads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jshard.errors import JShardError, did_you_mean

Fields = Mapping[str, Any]
INFO, CONFIG, COLLECTIVES = ASKED = ("info", "config", "collectives")

WORDS: dict[str, tuple[str | None, Callable[[Fields], str]]] = {
    "config": (CONFIG, lambda told: f"{told['place']}  {told['key']}: {told['value']}"),
    "begin": (INFO, lambda told: f"rank {told['rank']} of {told['of']} begins{_about(told)}"),
    "program": (INFO, lambda told: f"{told['program']} asks for {_collectives(told)}"),
    "collective": (COLLECTIVES, lambda told: f"{told['program']}: {_collective(told)}"),
    "moved": (COLLECTIVES, lambda told: _moved(told)),
    "compiled": (INFO, lambda told: f"{told['program']} is compiled: its first call took {told['seconds']:.1f} s"),
    "resumed": (INFO, lambda told: f"goes on behind step {told['step']}, from {told['folder']}"),
    "step": (None, lambda told: f"step {told['step']}"),
    "waits": (None, lambda told: f"waits for step {told['step']} for {told['seconds']:.0f} s"),
    "evaluated": (INFO, lambda told: f"step {told['step']}: test accuracy {100 * told['accuracy']:.1f} %"),
    "saving": (INFO, lambda told: f"begins to save step {told['step']} in {told['folder']}"),
    "saved": (INFO, lambda told: f"has saved step {told['step']} in {told['folder']}"),
    "ended": (INFO, lambda told: f"ended behind step {told['step']}: {told['how']}"),
}


class Tell:
    """Hands an event on to all listeners."""

    def __init__(self, *listeners: Callable[[str, Fields], None]):
        self.listeners = listeners

    def __call__(self, what: str, /, **told: Any) -> None:
        for listener in self.listeners:
            listener(what, told)


tell: Tell | None = None


def listen(listener: Callable[[str, Fields], None]) -> Callable[[], None]:
    """From now on `listener` hears every event; returns what ends that."""
    _become(*_listeners(), listener)
    return lambda: _become(*(each for each in _listeners() if each is not listener))


def _listeners() -> tuple[Callable[[str, Fields], None], ...]:
    return () if tell is None else tell.listeners


def _become(*listeners: Callable[[str, Fields], None]) -> None:
    global tell
    tell = Tell(*listeners) if listeners else None


# -- stderr --


def listener(environment: Mapping[str, str]) -> Callable[[str, Fields], None] | None:
    """What prints the events that `JSHARD_LOG` asks for on stderr; None where it asks for none, or another rank speaks."""
    asked = [word.strip() for word in environment.get("JSHARD_LOG", "").split(",") if word.strip()]
    for word in asked:
        if word not in ASKED:
            raise JShardError(
                f'JSHARD_LOG is "{environment["JSHARD_LOG"]}", and "{word}" is none of {", ".join(ASKED)}',
                hint=did_you_mean(word, ASKED, f"write JSHARD_LOG={','.join(ASKED)}, or some of them"),
            )
    if not asked or not _speaks(environment):
        return None

    def show(what: str, told: Fields) -> None:
        word, words = WORDS[what]
        if word in asked:
            print(f"{word}: {words(told)}", file=sys.stderr, flush=True)

    return show


RANKS = ("JAX_PROCESS_ID", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX", "TPU_WORKER_ID")


def _speaks(environment: Mapping[str, str]) -> bool:
    """The first process does; under `jshard launch`, which puts ranks before the lines, all of them."""
    if "JSHARD_LAUNCH_STATUS" in environment:
        return True
    return next((environment[name].strip() == "0" for name in RANKS if name in environment), True)


def _about(told: Fields) -> str:
    mesh = "".join(f", mesh {{{', '.join(f'{k}: {v}' for k, v in told['mesh'].items())}}}" for _ in "x" if told["mesh"])
    devices = f"{told['devices']} {told['device']} device{'' if told['devices'] == 1 else 's'}"
    return (
        f": {told['source']}{mesh}, {devices} on {told['host']}, process {told['pid']}, jax {told['versions']['jax']}"
    )


def _collectives(told: Fields) -> str:
    plural = "" if told["collectives"] == 1 else "s"
    return f"{told['collectives']} collective{plural}, {told['wire']:,} B on the wire per device"


def _collective(told: Fields) -> str:
    return "  ".join(
        filter(
            None,
            [
                told["place"] or "-",
                told["signal"],
                told["phase"],
                told["collective"],
                f"over {', '.join(told['mesh_axes'])} ({told['group']})",
                f"{'' if told['count_known'] else '? x '}{told['count']:,} x {told['payload']:,} B",
                told["dtype"],
                f"({told['via']})" if told["via"] else "",
            ],
        )
    )


def _moved(told: Fields) -> str:
    by = f"  {told['by']}" if told["by"] else ""
    steps = f" by {', '.join(told['moves'])}" if told["moves"] else ""
    shape = ", ".join(map(str, told["shape"]))
    return f"{told['op_name']}{by}  {told['dtype']}[{shape}], {told['bytes']:,} B, from {told['from']} to {told['to']}{steps}"


if (_show := listener(os.environ)) is not None:
    listen(_show)

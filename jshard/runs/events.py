"""Events of a run for its listeners: its log, and stderr with `JSHARD_LOG`.

    events.tell("saved", step=100, folder="runs/mine/checkpoints/100")

If the fields cost time, guard it by `if events.listeners:`. `WORDS` is the only list of events,
with the word of `JSHARD_LOG` and the text of each.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jshard.errors import JShardError, did_you_mean, printable

Fields = Mapping[str, Any]
INFO, CONFIG, COLLECTIVES = ASKED = ("info", "config", "collectives")

WORDS: dict[str, tuple[str | None, Callable[[Fields], str]]] = {
    "config": (CONFIG, "{place}  {key}: {value}".format_map),
    "stages": (INFO, "workers {workers} are the stages of {mesh}, one after the other: one microbatch".format_map),
    "begin": (INFO, lambda fields: f"rank {fields['rank']} of {fields['of']} begins{_about(fields)}"),
    "program": (INFO, lambda fields: f"{fields['program']} asks for {_collectives(fields)}"),
    "collective": (COLLECTIVES, lambda fields: f"{fields['program']}: {_collective(fields)}"),
    "chosen": (COLLECTIVES, "jshard.matmul of {x} and {w}: {words}".format_map),
    "moved": (COLLECTIVES, lambda fields: _moved(fields)),
    "compiled": (INFO, "{program} is compiled: its first call took {seconds:.1f} s".format_map),
    "compiles_again": (INFO, "{program} compiles again, for arguments {shapes}".format_map),
    "resumed": (INFO, "continues after step {step}, from {folder}".format_map),
    "step": (None, "step {step}".format_map),
    "waits": (None, "waits for step {step} for {seconds:.0f} s".format_map),
    "evaluated": (INFO, lambda fields: f"step {fields['step']}: {_figures(fields)}"),
    "saving": (INFO, "begins to save step {step} in {folder}".format_map),
    "saved": (INFO, "has saved step {step} in {folder}".format_map),
    "weights_read": (
        INFO,
        "read {read:,} of the {of:,} B of {file} into {parameters} parameters in {seconds:.1f} s".format_map,
    ),
    "weights_written": (INFO, "wrote {parameters} parameters, {of:,} B, to {file} in {seconds:.1f} s".format_map),
    "ended": (INFO, "ended after step {step}: {how}".format_map),
}


def _figures(fields: Fields) -> str:
    named = {name: each for name, each in fields.items() if name.startswith("test_")}
    return ", ".join(f"{name.replace('_', ' ')} {figure:.4g}" for name, figure in named.items())


Listener = Callable[[str, Fields], None]
listeners: tuple[Listener, ...] = ()


def tell(what: str, /, **fields: object) -> None:
    """Send an event to all listeners."""
    for listener in listeners:
        listener(what, fields)


def listen(listener: Listener) -> Callable[[], None]:
    """Add a listener to all events; return a function to remove it."""
    global listeners
    listeners = (*listeners, listener)

    def stop() -> None:
        global listeners
        listeners = tuple(each for each in listeners if each is not listener)

    return stop


def listener(environment: Mapping[str, str]) -> Listener | None:
    """Return a printer of the events in `JSHARD_LOG` to stderr, or None without any or on a silent rank."""
    asked = [word.strip() for word in environment.get("JSHARD_LOG", "").split(",") if word.strip()]
    for word in asked:
        if word not in ASKED:
            raise JShardError(
                f'JSHARD_LOG is "{environment["JSHARD_LOG"]}", and "{word}" is none of {", ".join(ASKED)}',
                hint=did_you_mean(word, ASKED, f"write JSHARD_LOG={','.join(ASKED)}, or some of them"),
            )
    if not asked or not _speaks(environment):
        return None

    def show(what: str, fields: Fields) -> None:
        word, words = WORDS[what]
        if word in asked:
            print(printable(f"{word}: {words(fields)}", keep="\n"), file=sys.stderr, flush=True)

    return show


RANKS = ("JAX_PROCESS_ID", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX", "TPU_WORKER_ID")


def _speaks(environment: Mapping[str, str]) -> bool:
    """Return whether this process prints: the first, or under `jshard launch`, which marks ranks, all."""
    if "JSHARD_LAUNCH_STATUS" in environment:
        return True
    return next((environment[name].strip() == "0" for name in RANKS if name in environment), True)


def _about(fields: Fields) -> str:
    sizes = ", ".join(f"{name}: {size}" for name, size in (fields["mesh"] or {}).items())
    mesh = f", mesh {{{sizes}}}" if sizes else ""
    devices = f"{fields['devices']} {fields['device']} device{'' if fields['devices'] == 1 else 's'}"
    where = "{source}{0}, {1} on {host}, process {pid}, jax {versions[jax]}"
    return f": {where.format(mesh, devices, **fields)}"


def _collectives(fields: Fields) -> str:
    plural = "" if fields["collectives"] == 1 else "s"
    return f"{fields['collectives']} collective{plural}, {fields['wire']:,} B on the wire per device"


def _collective(fields: Fields) -> str:
    words = [fields["place"] or "-", *map(fields.get, ("signal", "phase", "collective"))]
    words += [f"over {', '.join(fields['mesh_axes'])} ({fields['group']})"]
    words += [
        f"{'' if fields['count_known'] else '? x '}{fields['count']:,} x {fields['payload']:,} B",
        fields["dtype"],
    ]
    return "  ".join(filter(None, [*words, f"({fields['via']})" if fields["via"] else ""]))


def _moved(fields: Fields) -> str:
    by = f"  {fields['by']}" if fields["by"] else ""
    steps = f" by {', '.join(fields['moves'])}" if fields["moves"] else ""
    what = f"{fields['dtype']}[{', '.join(map(str, fields['shape']))}], {fields['bytes']:,} B"
    return f"{fields['op_name']}{by}  {what}, from {fields['from']} to {fields['to']}{steps}"


if (_show := listener(os.environ)) is not None:
    listen(_show)

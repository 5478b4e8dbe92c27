"""Tell who watches this process which operation of a pipeline's table its devices begin and end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.buffer_callback import buffer_callback

from jshard import events
from jshard.layers.partition.part import vary
from jshard.schedules import Key, Table

PASSED = ("microbatch", "chunk", "input", "kept")  # what an operation works on, none of which it has before it is told


def begins(table: Table, slot: str, stage: Array, now: dict[str, Array]) -> dict[str, Array]:
    """Tell that `slot` begins, and return its numbers in `now` as the host returns them: what needs them runs after that."""
    if (hears := _listener(table, slot)) is None:
        return now
    names = [f"{slot}_{each}" for each in PASSED]
    numbers = jnp.stack([stage, *(now[name] for name in names)])

    def hear(_: Any, out: Any, numbers: Any) -> None:
        np.asarray(out)[...] = numbers = np.asarray(numbers)
        hears(*numbers[:3], ended=False)

    same = jax.ShapeDtypeStruct(numbers.shape, numbers.dtype)
    back = vary(buffer_callback(hear, same, has_side_effect=True)(numbers), jax.typeof(numbers).mat.varying)
    return now | dict(zip(names, back[1:], strict=True))


def ended(table: Table, slot: str, stage: Array, now: dict[str, Array], made: Any) -> Any:
    """Tell that `slot` has made `made`, once that is there, and return it."""
    if (hears := _listener(table, slot)) is not None:
        numbers = jnp.stack([stage, now[f"{slot}_microbatch"], now[f"{slot}_chunk"]])
        hear = lambda _, __, numbers, made: hears(*np.asarray(numbers), ended=True)
        buffer_callback(hear, (), has_side_effect=True)(numbers, jax.tree.leaves(made)[:1])
    return made


def _listener(table: Table, slot: str) -> Callable[..., None] | None:
    """Who hears of an operation by its stage, microbatch and chunk; None where nobody does. On CPUs alone: a GPU calls the host
    when a program is queued, not when it runs, and a TPU can't."""
    hears = events.operation
    if hears is None or jax.default_backend() != "cpu":
        return None

    def tell(stage: int, microbatch: int, chunk: int, *, ended: bool) -> None:
        hears(table.where(Key(slot, int(microbatch), int(chunk * table.stages + stage))), ended)

    return tell

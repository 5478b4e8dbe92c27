"""Who watches a process hears which operation of a table a device begins and ends; who does not has nothing of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jshard import events
from jshard.jaxprs import equations
from jshard.layers.partition.watched import PASSED, begins, ended
from jshard.schedules import Key, generate

TABLE = generate("interleaved", 2, 4)  # of two chunks on each stage


def step(stage, numbers, *, reads=True):
    """Slot F of a stage, which makes two arrays, of what comes back from who hears of it or of what there was before."""
    before = {**{f"F_{name}": number for name, number in zip(PASSED, numbers, strict=True)}, "B_chunk": stage}
    now = begins(TABLE, "F", stage, before)
    now = now if reads else before
    return now, ended(TABLE, "F", stage, now, [jnp.sin(numbers), jnp.cos(numbers)])


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("stage", [0, 1])
def test_who_watches_hears_of_an_operation_by_stage_microbatch_and_chunk(stage, reads, monkeypatch):
    heard, numbers = [], np.array([3, 1, 5, 7], np.int32)
    monkeypatch.setattr(events, "operation", lambda where, ended: heard.append((where, ended)))
    now, made = jax.jit(lambda *xs: step(*xs, reads=reads))(np.int32(stage), numbers)
    jax.block_until_ready((now, made))
    where = TABLE.where(Key("F", 3, 2 + stage))
    assert (heard if reads else sorted(heard)) == [(where, False), (where, True)]  # it begins before what reads of it
    assert now == {"F_microbatch": 3, "F_chunk": 1, "F_input": 5, "F_kept": 7, "B_chunk": stage}
    np.testing.assert_allclose(made, [np.sin(numbers), np.cos(numbers)], rtol=1e-6)


def callbacks():
    program = jax.make_jaxpr(lambda *xs: step(*xs))(np.int32(0), np.zeros(4, np.int32))
    return [[v.aval.shape for v in eqn.invars] for eqn in equations(program) if "callback" in eqn.primitive.name]


def test_an_end_waits_for_the_first_array_that_is_made(monkeypatch):
    monkeypatch.setattr(events, "operation", lambda where, ended: None)
    assert callbacks() == [[(5,)], [(3,), (4,)]]


@pytest.mark.parametrize("backend", ["gpu", "tpu", "METAL"])
def test_nobody_is_told_on_accelerators_or_where_nobody_watches(backend, monkeypatch):
    assert callbacks() == []
    monkeypatch.setattr(events, "operation", lambda where, ended: None)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert callbacks() == []

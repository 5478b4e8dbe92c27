"""Random programs, sharded by random signals, equal one device or are refused in a sentence (`make fuzz-programs` runs more)."""

from __future__ import annotations

import pytest

from tests.support.fuzz_programs import outcome
from tests.support.random_programs import Array, Program, Statement, program


def small(
    source: str, x: tuple[int, ...], mesh: dict[str, int], *, w: tuple[int, ...] | None = None, **what
) -> Program:
    """A program of one statement, as shrinking leaves it."""
    words = what.pop("words", {})
    signals = {"s": {**words, "match": ["**"]}} if w else {}
    return Program(
        0, True, {"l0": {"w": Array(w)}} if w else {}, {"x": Array(x)}, (Statement(("v0",), source),), ("v0",), ("v0",),
        {"jshard": {"mesh": mesh, "axis_types": what.pop("axis_types", "explicit")}, **signals}, **what,
    )  # fmt: skip


TWO, THREE = {"data": 2, "tensor": 4}, {"data": 2, "tensor": 2, "pipe": 2}
# Programs that were wrong once, shrunk: each by the seed that found it, and what was wrong.
FAULTS = {
    "1008: a reshape by `dimensions` was one without": small(
        "lax.reshape(x, (2, 256), dimensions=(1, 2, 0))", (8, 8, 8), TWO, placed={"x": (("data", "tensor"), (), ())}
    ),
    "1132: a window of one element that leaves places out was taken for none": small(
        'lax.reduce_window(x, jnp.inf, lax.min, (1, 1), (2, 1), "SAME")',
        (6, 8),
        THREE,
        placed={"x": (("pipe",), ("data",))},
    ),
    "10066: the gradient of a maximum was shared among devices, whatever each had of it": small(
        "jnp.ones(4) * x.max() - x.min()", (16, 4), {"data": 8}, placed={"x": (("data",), ())}
    ),
    "20213: a factor of an axis stayed split below one that no longer was": small(
        "x.reshape(6, 8, 2)", (12, 8), {"data": 4, "tensor": 2}, placed={"x": ((), ("data", "tensor"))}
    ),
    "20356: a product by a stored parameter beside a checkpoint, where rows are not split as it is": small(
        'jax.checkpoint(lambda t: t * t)(x).sum() + x @ params["l0"]["w"]', (16, 12), THREE, w=(12, 8),
        words={"row": ["data"], "store": ["pipe"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_random_programs_that_were_wrong_once_equal_one_device(fault):
    found = outcome(FAULTS[fault])
    assert found.kind == "equal", found.text


@pytest.mark.quick("40")
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_random_programs_equal_one_device_or_are_refused(first):
    for seed in range(first, first + 10):
        found = outcome(said := program(seed))
        assert found.kind in ("equal", "refused", "rounding"), f"{found.text}\n{said}"


def test_random_programs_are_the_same_for_a_seed():
    assert str(program(5)) == str(program(5)) != str(program(6))

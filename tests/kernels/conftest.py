"""Kernels run interpreted, with the race detector on; a race or a semaphore left over fails the test."""

from __future__ import annotations

import jax
import pytest
from jax._src import dispatch
from jax.experimental.pallas import tpu as pltpu

from jshard import kernels
from tests.support import compiled_before


@pytest.fixture(params=["on_wait", "eager"])
def copies(request):
    """When an interpreted copy happens: as late as possible, or at once."""
    return request.param


@pytest.fixture
def interpreted(capsys):
    """Runs kernels on pretend TPUs, and looks at what the interpreter found."""
    with kernels.interpret(), compiled_before.interpreting():
        yield
    clean(capsys)


def clean(capsys) -> None:
    try:
        jax.effects_barrier()  # a kernel still running would lose its memory with the reset
    finally:
        dispatch.runtime_tokens.clear()  # one that failed fails no later test
        out = capsys.readouterr().out
        pltpu.reset_tpu_interpret_mode_state()
    assert "RACE DETECTED" not in out and "non-zero count" not in out, out[:2000]

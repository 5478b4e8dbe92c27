"""What a test borrows from outside its own process: a user's environment, and a compiler that may not be installed."""

from __future__ import annotations

import os

import pytest

from jshard.errors import JShardError
from jshard.inspect.plan.aot import check_installed
from jshard.inspect.plan.topology import Topology

OURS = ("JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS", "PJRT_NPROC")


def users_environment(*without: str, **more: str) -> dict[str, str]:
    """The environment of a user: without what the tests set for themselves."""
    return {name: value for name, value in os.environ.items() if name not in (*OURS, *without)} | more


def needs_compiler(topology: str) -> None:
    """Skips a test that compiles for chips that are not here where their compiler is not installed."""
    try:
        check_installed(Topology.of(topology))
    except JShardError as error:
        pytest.skip(f"an extra: {error}")

"""What a test borrows from outside its own process: a user's environment, and a compiler that may not be installed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jshard.errors import JShardError
from jshard.inspect.plan.aot import check_installed
from jshard.inspect.plan.topology import Topology
from tests.support import compiled_before

OURS = ("JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS", "PJRT_NPROC")


def users_environment(*without: str, **more: str) -> dict[str, str]:
    """The environment of a user: without what the tests set for themselves."""
    return {name: value for name, value in os.environ.items() if name not in (*OURS, *without)} | more


@pytest.fixture
def kept_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that an earlier run of the tests has compiled are looked up. Not where the suite runs as users compile."""
    plans = tmp_path / "plans" if "JSHARD_TESTS_FRESH" in os.environ else compiled_before.PLANS
    monkeypatch.setenv("JSHARD_CACHE", str(plans))


@pytest.fixture
def extra(pytestconfig: pytest.Config) -> Callable[[str], Any]:
    """`extra("grain")` is the module, `extra("v5e:4x4")` asks for the compiler of a topology. Where it is not installed the
    test is skipped; `make all` installs all, and there it fails."""
    ends = pytest.fail if pytestconfig.getoption("--with-extras") else pytest.skip

    def needed(name: str) -> Any:
        try:
            return check_installed(Topology.of(name)) if ":" in name else importlib.import_module(name)
        except (ImportError, JShardError) as error:
            ends(f"an extra: {error}")

    return needed

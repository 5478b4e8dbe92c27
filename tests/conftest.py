"""Eight pretend devices for every test, asked for before JAX starts, and got."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("PJRT_NPROC", "32")  # at the default, pretend devices on few cores can wait for ever

from tests.support import compiled_before, forked  # the first tells JAX how to compile

# isort: split
import jax
import pytest
from _pytest import runner

from jshard.signals.active_config import unload

pytest_plugins = tuple(f"tests.support.{name}" for name in ("browser", "hung", "outside", "slow"))


STARTED = time.time()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # Hypothesis, where it is imported now, asks the collector who else has a generator of random numbers


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported by now stays: each full collection would visit a million objects of it
    gc.enable()
    gc.set_threshold(1_000_000, 10, 20)  # what is traced lives until its file ends, and each collection visits it


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    return runner.pytest_runtest_protocol(item, nextitem)


# Python keeps frames in pieces of 16 KiB, and a loop that calls across the end of one asks the system for the next, and gives
# it back, each time: a tenth of the suite. A frame that may need half a megabyte comes in a piece of one, whose rest is its
# callees'. By a file's name that JAX leaves out, as no line of a program is here.
pytest_runtest_protocol.__code__ = pytest_runtest_protocol.__code__.replace(
    co_stacksize=2**16, co_filename=jax.jit.__code__.co_filename
)


@pytest.fixture(autouse=True, scope="module")
def _forgotten():
    """What a file's tests have compiled goes with them: a process else holds four gigabytes in the end, and the suite takes a
    tenth longer. So does the configuration that they loaded last."""
    yield
    unload()
    jax.clear_caches()


@pytest.fixture
def nothing_loaded():
    """Each test of the file begins without the configuration that another has loaded."""
    yield
    unload()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")
    gc.disable()  # until tests are imported, nearly all of which stays
    if len(jax.devices()) != 8:
        raise pytest.UsageError(
            f"the tests need eight CPU devices and got {len(jax.devices())}; run them by `make test`"
        )
    compiled_before.as_tests_do()
    compiled_before.compile_quickest()
    if sys.platform == "linux":
        subprocess.Popen = forked.Popen


def pytest_terminal_summary(terminalreporter: Any) -> None:
    before, now = compiled_before.count_and_sweep(STARTED)
    terminalreporter.write_line(f"{before:,} programs were compiled before and {now:,} now")


@pytest.fixture
def fresh(monkeypatch):
    """Processes that the test starts are new ones, and not forked from one that has imported JAX."""
    monkeypatch.setattr(forked, "fresh", True)


@pytest.fixture
def in_the_root(monkeypatch):
    """The test runs in the repository's root, from where models are found, and leaves nothing loaded and nobody listening."""
    from jshard import unload
    from jshard.runs import events

    root = Path(__file__).parents[1]
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "path", [str(root), *sys.path])
    yield
    unload()
    assert not events.listeners


@pytest.fixture
def mesh():
    """`mesh(data=2, tensor=4)`: a mesh of the first devices, Explicit unless `axis_types="auto"`."""

    def made(*, axis_types: str = "explicit", **sizes: int) -> jax.sharding.Mesh:
        kind = {"explicit": jax.sharding.AxisType.Explicit, "auto": jax.sharding.AxisType.Auto}[axis_types]
        devices = jax.devices()[: math.prod(sizes.values())]
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices)

    return made

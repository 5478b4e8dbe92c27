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

import compiled_before
import forked
import jax
import pytest
from _pytest import runner
from browser import browser as browser  # a fixture of those that open a page
from hung import pytest_handlecrashitem as pytest_handlecrashitem
from hung import pytest_terminal_summary as pytest_terminal_summary
from outside import extra as extra
from outside import kept_kernels as kept_kernels
from outside import kept_plans as kept_plans
from slow import pytest_generate_tests as pytest_generate_tests
from slow import pytest_itemcollected as pytest_itemcollected
from slow import spread

from jshard.signals.active_config import unload


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--few", type=int, metavar="N", help="of the cases of each test only N, from the first to the last"
    )
    parser.addoption(
        "--with-extras",
        action="store_true",
        help="no test that needs one of jshard's extras may be skipped",
    )
    parser.addoption(
        "--within", type=float, metavar="SECONDS", help="two cases of each test first; none starts after this time"
    )


RUNNING = {"room": ""}
STARTED = pytest.StashKey[float]()
BEGAN = pytest.StashKey[tuple[float, int]]()
LEFT_OUT = pytest.StashKey[int]()  # tests that were not asked for: the slow ones, in `make test`


@pytest.hookimpl(trylast=True)  # of those that `-m` has left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    few = config.getoption("--few")
    within = config.getoption("--within")
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {item for each in cases.values() for item in spread(each, few or 2)}
    if few is not None:
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    elif within is not None:
        items.sort(key=lambda item: item not in kept)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.skipped and "extra" in item.keywords and item.config.getoption("--with-extras"):
        report.outcome, report.longrepr = "failed", f"skipped where every extra is installed: {report.longrepr[2]}"
    return report


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items[:1]:
        item.config.stash[LEFT_OUT] = item.config.stash.get(LEFT_OUT, 0) + len(items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()  # Hypothesis, where it is imported now, asks the collector who else has a generator of random numbers
    if (told := getattr(session.config, "workeroutput", None)) is not None:
        told["left out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist has ended, which collected as all do; one that died tells nothing."""
    if "left out" in (told := getattr(node, "workeroutput", {})):
        node.config.stash[LEFT_OUT] = told["left out"]


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # what is imported by now stays: each full collection would visit a million objects of it
    gc.enable()
    gc.set_threshold(1_000_000, 10, 20)  # what is traced lives until its file ends, and each collection visits it
    session.config.stash[STARTED] = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    return runner.pytest_runtest_protocol(item, nextitem)


# Python keeps frames in pieces of 16 KiB, and a loop that calls across the end of one asks the system for the next, and gives
# it back, each time: a tenth of the suite. A frame that may need half a megabyte comes in a piece of one, whose rest is its
# callees'. By a file's name that JAX leaves out, as no line of a program is here.
pytest_runtest_protocol.__code__ = pytest_runtest_protocol.__code__.replace(
    co_stacksize=2**16, co_filename=jax.jit.__code__.co_filename
)


def pytest_runtest_setup(item: pytest.Item) -> None:
    within = item.config.getoption("--within")
    if within is not None and time.monotonic() - item.config.stash[STARTED] > within:
        pytest.skip(f"{within:g} seconds were over; make test runs it")


@pytest.fixture(autouse=True, scope="module")
def _forgotten(request):
    """What a file's tests have compiled goes with them: a process else holds four gigabytes in the end, and the suite takes a
    tenth longer. So does the configuration that they loaded last."""
    RUNNING["room"] = request.path.relative_to(Path(__file__).parent).parts[0]
    yield
    unload()
    jax.clear_caches()
    compiled_before.forget_traces()


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
    compiled_before.compile_quickest(lambda: RUNNING["room"])
    compiled_before.name_what_is_read()
    compiled_before.write_in_one_move()
    compiled_before.keep_what_calls_python()
    compiled_before.reuse_contexts()
    compiled_before.share_what_asks_for_no_configuration()
    if sys.platform == "linux":
        subprocess.Popen = forked.Popen
    if not hasattr(config, "workerinput"):  # once, not in each worker
        config.stash[BEGAN] = time.monotonic(), compiled_before.sweep()


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last line."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or BEGAN not in config.stash:
        return
    began, before = config.stash[BEGAN]
    cases = sum(len(reporter.getreports(outcome)) for outcome in ("passed", "failed", "skipped", "error"))
    compiled, minutes = compiled_before.programs() - before, (time.monotonic() - began) / 60
    state = (
        f"warm: {before:,} programs were compiled before, {compiled:,} now"
        if before
        else f"cold: {compiled:,} programs compiled"
    )
    left_out = f"{count:,} others left out; " if (count := config.stash.get(LEFT_OUT, 0)) else ""
    reporter.write_line(f"{cases:,} cases in {minutes:.1f} minutes, {left_out}{state}")


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

"""Which cases run: those that `make test` leaves to `make slow`, those that need an extra, and a few or the first of all."""

from __future__ import annotations

import time
from typing import Any

import pytest

STARTED = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.addoption
    add("--few", type=int, metavar="N", help="of the cases of each test only N, from the first to the last")
    add("--with-extras", action="store_true", help="no test that needs one of jshard's extras may be skipped")
    add("--within", type=float, metavar="SECONDS", help="two cases of each test first; none starts after this time")


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Any:
    """Of a test marked `quick` the cases that the mark does not name are slow; a number says how many it names, in even steps."""
    yield
    if (quick := metafunc.definition.get_closest_marker("quick")) is None:
        return
    cases = {case.id: case for case in metafunc._calls}
    names = spread(list(cases), *quick.args) if isinstance(quick.args[0], int) else quick.args
    if missing := set(names) - set(cases):
        raise pytest.UsageError(
            f"{metafunc.function.__name__} has no cases {sorted(missing)}, which its mark `quick` names"
        )
    for name in set(cases) - set(names):
        cases[name].marks.append(pytest.mark.slow.mark)


def spread(items: list[Any], count: int) -> list[Any]:
    """`count` of them in even steps, the first and the last among them."""
    return [items[round(at * (len(items) - 1) / max(count - 1, 1))] for at in range(count)]


def pytest_itemcollected(item: pytest.Item) -> None:
    """All that opens a page in a browser is slow, and what takes seconds."""
    fixtures = getattr(item, "fixturenames", ())
    if "browser" in fixtures or item.get_closest_marker("seconds"):
        item.add_marker("slow")
    if "extra" in fixtures:
        item.add_marker("extra")


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


def pytest_runtest_setup(item: pytest.Item) -> None:
    within = item.config.getoption("--within")
    if within is not None and time.monotonic() - STARTED > within:
        pytest.skip(f"{within:g} seconds were over; make test runs it")

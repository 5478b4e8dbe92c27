"""Which cases `make test` leaves to `make slow`, and which need one of jshard's extras."""

from __future__ import annotations

from typing import Any

import pytest


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

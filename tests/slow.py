"""Which cases `make test` leaves to `make slow`."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Any:
    """Of a test marked `quick` the cases that the mark does not name are slow."""
    yield
    if (quick := metafunc.definition.get_closest_marker("quick")) is None:
        return
    cases = {case.id: case for case in metafunc._calls}
    if missing := set(quick.args) - set(cases):
        raise pytest.UsageError(
            f"{metafunc.function.__name__} has no cases {sorted(missing)}, which its mark `quick` names"
        )
    for name in set(cases) - set(quick.args):
        cases[name].marks.append(pytest.mark.slow.mark)


def pytest_itemcollected(item: pytest.Item) -> None:
    """All that opens a page in a browser is slow."""
    if "browser" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.slow)

"""A test whose process hung or died: `make test` ends red, or says that the test ran again."""

from __future__ import annotations

from typing import Any

import pytest

ONCE = ("tests/kernels/", "tests/launch/")  # here a hang is what is looked for
AGAIN: list[str] = []  # tests that ran again in a new process


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: Any) -> None:
    """Once: after thousands of programs in one process XLA for CPU may lose one, and wait for it with all threads idle
    (docs/design/0003-pretend-devices.md). The time limit ends such a process; a test that fails is not tried again."""
    if crashitem not in AGAIN and not crashitem.startswith(ONCE):
        AGAIN.append(crashitem)
        sched.mark_test_pending(crashitem)
        report.outcome = "rerun"  # the word that xdist has for it


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for test in AGAIN:
        terminalreporter.write_line(f"ran again, as its process hung or died: {test}", yellow=True)

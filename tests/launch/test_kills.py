"""Kills in their short form: two in a save of rank 0 and one in a step; `make kills` is the long one."""

from __future__ import annotations

import pytest

from tests.launch.kills import kills

PLANS = ("0 touch 60", "1 step 8 0.01", "0 touch 70")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_processes_lose_bitwise_what_an_undisturbed_run_loses():
    assert kills(len(PLANS), seed=0, plans=PLANS) >= len(PLANS)

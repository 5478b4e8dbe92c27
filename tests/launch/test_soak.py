"""The soak in its short form; `make soak` is the long one."""

from __future__ import annotations

import os

import pytest

from tests.launch.soak import soak

MINUTES = float(os.environ.get("JSHARD_SOAK_MINUTES", "2"))


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 900)
def test_soak_loses_bitwise_what_an_undisturbed_run_loses_and_nothing_grows():
    found = soak(MINUTES, seed=0, alone=MINUTES < 5)
    print(found)
    found.check()

"""The soak in its short form: one fault of each kind; `make soak` is the long one, and JSHARD_SOAK_MINUTES one of so many."""

from __future__ import annotations

import os

import pytest

from tests.launch.soak import KINDS, SHORT, Form, soak

MINUTES = float(os.environ.get("JSHARD_SOAK_MINUTES", "0"))


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 900)
def test_soak_loses_bitwise_what_an_undisturbed_run_loses_and_nothing_grows():
    found = soak(Form(MINUTES, alone=MINUTES < 5) if MINUTES else SHORT)
    print(found)
    found.check()
    kinds = {kind.partition(" rank")[0] for kind in KINDS}
    assert MINUTES or {fault.partition(" of ")[0] for fault in found.faults} == kinds, found.faults

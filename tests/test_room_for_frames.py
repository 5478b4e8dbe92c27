"""A test runs where calls need no memory of the system."""

from __future__ import annotations

import resource
import sys

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the page faults of a thread")
def test_calls_across_the_end_of_a_piece_of_frames_ask_for_no_memory():
    def leaf() -> None: ...

    def down(depth: int) -> None:
        for _ in range(1000):
            leaf()
        if depth:
            down(depth - 1)

    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    down(500)  # what it needs is there from now on
    before = faults()
    down(500)  # frames of several times 16 KiB
    assert faults() - before < 500

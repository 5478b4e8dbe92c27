"""Runs a command that ends when its launcher does: `python parent_death.py LAUNCHER command...`, and becomes that command.

Linux alone can promise this. It stands by itself, imports no JShard and is started without `site`, to cost nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def become(launcher: int, command: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == launcher:  # else it has ended already
        os.execvp(command[0], command)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])

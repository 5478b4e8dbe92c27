"""A command that ends with its launcher: `python parent_death.py LAUNCHER command...` becomes the command.
Only Linux can guarantee this. The file imports nothing of jshard and runs without `site`, to start fast."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def become(launcher: int, command: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == launcher:  # else the launcher has ended
        os.execvp(command[0], command)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])

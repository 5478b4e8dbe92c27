"""`jshard train`, of which a process kills itself when the file `KILLS_HERE/plan.N` of this attempt N tells it to.

`1 touch 17` kills rank 1 at the 17th time that it opens, makes, renames or removes something in the run's folder, which is
most often in a save; `0 step 5 0.01` 10 ms after step 5 begins; `2 second 1.5` so long after Python has started. A process
that ends leaves the number of its touches in `KILLS_HERE/touches.RANK`.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from jshard.cli import main
from jshard.launch.heartbeat import Pulse
from jshard.runs.names import restarts

TOUCHES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")


class Touches:
    """Counts what the process does in the folder, and kills it at the number `last`."""

    def __init__(self, folder: str, last: int):
        self.folder, self.last, self.count = folder, last, 0
        sys.addaudithook(self.hear)

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event in TOUCHES and isinstance(args[0], (str, Path)) and str(args[0]).startswith(self.folder):
            self.count += 1
            if self.count == self.last:
                kill()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_step(step: int, seconds: float) -> None:
    at = Pulse.at

    def begins(pulse: Pulse, phase: str, number: int | None = None) -> None:
        at(pulse, phase, number)
        if (phase, number) == ("step", step):
            threading.Timer(seconds, kill).start()

    Pulse.at = begins


def prepare(folder: str) -> None:
    here, rank = Path(os.environ["KILLS_HERE"]), os.environ["JAX_PROCESS_ID"]
    plan = here / f"plan.{restarts()}"
    whose, kind, *numbers = plan.read_text().split() if plan.exists() else ("", "")
    last = 0
    if whose == rank:
        match kind:
            case "touch":
                last = int(numbers[0])
            case "step":
                kill_in_step(int(numbers[0]), float(numbers[1]))
            case "second":
                timer = threading.Timer(float(numbers[0]), kill)
                timer.daemon = True
                timer.start()
    touches = Touches(folder, last)
    atexit.register(lambda: (here / f"touches.{rank}").write_text(str(touches.count)))


if __name__ == "__main__":
    prepare(sys.argv[1])
    sys.exit(main(["train", *sys.argv[2:], f"output={sys.argv[1]}"]))

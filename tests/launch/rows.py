"""The digits by number, from a process 1 that is killed once, when it reads for step 14 or so."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

from examples.digits import data as digits


class Rows:
    def __init__(self, x: np.ndarray, y: np.ndarray):
        self.x, self.y, self.read = x, y, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        self.read += 1
        self.reads()
        return self.x[number], self.y[number]

    def reads(self) -> None:
        if self.read > 14 * 32 and os.environ["JAX_PROCESS_ID"] == "1" and "JSHARD_RESTART" not in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)


def data() -> dict[str, Any]:
    read = digits()
    return {"train": Rows(*read["train"]), "test": read["test"]}

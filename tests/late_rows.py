"""XOR by number; process 1 takes 30 ms for each batch, and is killed when it reads for step 30 or so."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from examples.xor import data as xor
from tests.launch.rows import Rows


class Late(Rows):
    def reads(self) -> None:
        if os.environ["JAX_PROCESS_ID"] == "1" and self.read > 8:
            time.sleep(0.03 / 4)
            if self.read > 4 * 30:
                os.kill(os.getpid(), signal.SIGKILL)


def data() -> dict[str, Any]:
    read = xor()
    return {"train": Late(*read["train"]), "test": read["test"]}

"""What the processes of a run and the commands about it call the same things by."""

from __future__ import annotations

import os
from collections.abc import Mapping

RESTART = "JSHARD_RESTART"  # in the environment: how often the launcher has started all again
# In the folder of a run:
CONFIGURATION = "configuration.yaml"
CHECKPOINTS = "checkpoints"  # unless the configuration names another folder
MANIFEST = "checkpoint.json"  # in each checkpoint: what it holds
LOCK = "run.lock"  # locked by the first process as long as it writes there
LOG = "log"
TRACE = "trace"
CAPTURED = "trace.json"  # in TRACE, beside each process's capture
WANTED = "wanted.json"  # in TRACE of a run that goes on: someone asks for a capture


def restarts(environment: Mapping[str, str] = os.environ) -> int:
    """Return how often the launcher, or else Slurm, has started this run again."""
    return int(environment.get(RESTART) or environment.get("SLURM_RESTART_COUNT") or 0)

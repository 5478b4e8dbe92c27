"""Names of files and variables shared by a run's processes and the commands on it."""

from __future__ import annotations

import os
from collections.abc import Mapping

RESTART = "JSHARD_RESTART"  # in the environment: the number of restarts by the launcher
# In the folder of a run:
CONFIGURATION = "configuration.yaml"
CHECKPOINTS = "checkpoints"  # unless the configuration names another folder
MANIFEST = "checkpoint.json"  # in each checkpoint: its contents
LOCK = "run.lock"  # locked by the first process while it writes
LOG = "log"
TRACE = "trace"
CAPTURED = "trace.json"  # in TRACE, beside each process's capture
WANTED = "wanted.json"  # in TRACE of a run in progress: the request for a capture


def restarts(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of restarts of this run by the launcher, or else by Slurm."""
    return int(environment.get(RESTART) or environment.get("SLURM_RESTART_COUNT") or 0)

"""What the processes of a run and the commands about it call the same things by."""

from __future__ import annotations

RESTART = "JSHARD_RESTART"  # in the environment: how often the launcher has started all again
# In the folder of a run:
CONFIGURATION = "configuration.yaml"
CHECKPOINTS = "checkpoints"  # unless the configuration names another folder
MANIFEST = "checkpoint.json"  # in each checkpoint: what it holds
LOG = "log"
TRACE = "trace"
CAPTURED = "trace.json"  # in TRACE, beside each process's capture
WANTED = "wanted.json"  # in TRACE of a run that goes on: someone asks for a capture

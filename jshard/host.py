"""What this host has to compute with, told without starting JAX."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def nvidia_cards(environment: Mapping[str, str] = os.environ) -> int:
    """The NVIDIA GPUs that a process sees."""
    said = environment.get("CUDA_VISIBLE_DEVICES")
    return (
        len(list(Path("/dev").glob("nvidia[0-9]*")))
        if said is None
        else len([each for each in said.split(",") if each])
    )


def computes_on_cpus(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a process of this host will compute on CPUs: it is told to, or there is neither a GPU nor a TPU."""
    if platforms := environment.get("JAX_PLATFORMS"):
        return platforms.startswith("cpu")
    return not nvidia_cards(environment) and not any(
        [*Path("/dev").glob(name)] for name in ("accel[0-9]*", "vfio/[0-9]*")
    )

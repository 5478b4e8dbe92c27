"""What this host has to compute with, told without starting JAX."""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Mapping
from pathlib import Path

PORTS = range(20_000, 32_768)  # below those that Linux and others give to connections, which another run has many of


def nvidia_cards(environment: Mapping[str, str] = os.environ) -> int:
    """The NVIDIA GPUs that a process sees."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return len([*(Path("/dev").glob("nvidia[0-9]*") if visible is None else filter(None, visible.split(",")))])


def computes_on_cpus(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a process of this host will compute on CPUs: it is told to, or there is neither a GPU nor a TPU."""
    if platforms := environment.get("JAX_PLATFORMS"):
        return platforms.startswith("cpu")
    return not nvidia_cards(environment) and not any(
        [*Path("/dev").glob(name)]
        for name in ("accel[0-9]*", "vfio/[0-9]*", "kfd")  # two of TPUs, and AMD's
    )


def memory_of_host() -> int:
    """The bytes of memory that this host has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    """A port of loopback that nobody has now, nor is likely to have before a process listens there."""
    for port in random.SystemRandom().sample(PORTS, 64):
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
    raise OSError(errno.EADDRINUSE, f"64 ports of loopback between {PORTS.start} and {PORTS.stop - 1} are all in use")

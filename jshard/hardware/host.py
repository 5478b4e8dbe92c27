"""The computing devices of this host, found without starting JAX."""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Mapping
from pathlib import Path

PORTS = range(20_000, 32_768)  # below the ports of outgoing connections on Linux and others


def nvidia_cards(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of NVIDIA GPUs visible to a process."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return len([*(Path("/dev").glob("nvidia[0-9]*") if visible is None else filter(None, visible.split(",")))])


def computes_on_cpus(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a process of this host computes on CPUs: by JAX_PLATFORMS, or without a GPU or TPU."""
    if platforms := environment.get("JAX_PLATFORMS"):
        return platforms.startswith("cpu")
    return not nvidia_cards(environment) and not any(
        [*Path("/dev").glob(name)]
        for name in ("accel[0-9]*", "vfio/[0-9]*", "kfd")  # two for TPUs, and AMD's
    )


def memory_of_host() -> int:
    """Return the bytes of memory of this host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    """Return a port of loopback that is free, and likely to stay free until a process listens there."""
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

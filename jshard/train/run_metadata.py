"""What a process says of itself when its log begins."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from importlib import metadata
from typing import Any

import jax

from jshard.signals import active_config as current
from jshard.train.metrics import written
from jshard.version import __version__

SCHEMA = "jshard.log/1"


def facts(**more: Any) -> dict[str, Any]:
    """Rank, host, process, versions, devices and the configuration that is loaded, with its digest."""
    present = current.configuration()
    mesh = current.mesh().shape if present is not None and present.mesh is not None else {}
    devices = jax.devices()
    return {
        "schema": SCHEMA,
        "rank": jax.process_index(),
        "of": jax.process_count(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "versions": {
            "Python": platform.python_version(),
            **{name: metadata.version(name) for name in ("jax", "jaxlib", "flax")},
            "jshard": __version__,
        },
        "devices": len(devices),
        "device": devices[0].device_kind,
        "mesh": dict(mesh),
        "source": "no configuration" if present is None else present.source,
        "digest": "" if present is None else hashlib.sha256(written(present).encode()).hexdigest()[:16],
        **more,
    }

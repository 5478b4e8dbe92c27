"""Which NVIDIA GPUs of a host each of its processes takes: JAX would give all of them to each."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from jshard.errors import JShardError
from jshard.hardware.host import nvidia_cards


def cards_of(
    local: int, count: int, environment: Mapping[str, str] = os.environ, *, strict: bool = False
) -> dict[str, str]:
    """Return the variable by which process `local` of `count` on this host takes its even part; none where there is nothing to
    share out. A part that is not even is an error if `strict`, else a scheduler has shared them out itself."""
    if "JAX_LOCAL_DEVICE_IDS" in environment or environment.get("JAX_PLATFORMS") == "cpu":
        return {}
    cards = nvidia_cards(environment)
    if cards % count and strict:
        raise JShardError(
            f"{cards} GPUs can't be shared out evenly to {count} processes",
            hint="start a number of processes that divides them, or set JAX_PLATFORMS=cpu",
        )
    if not cards or cards % count:
        return {}
    each = cards // count
    return {"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(local * each, (local + 1) * each)))}


def place_on_host(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Find which process of how many on this host a scheduler says that this one is; None where it is the only one."""
    if "OMPI_COMM_WORLD_LOCAL_RANK" in environment:
        local, count = environment["OMPI_COMM_WORLD_LOCAL_RANK"], environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    elif "SLURM_LOCALID" in environment and "SLURM_STEP_TASKS_PER_NODE" in environment:
        local, node = environment["SLURM_LOCALID"], int(environment.get("SLURM_NODEID", "0"))
        count = str(_expanded(environment["SLURM_STEP_TASKS_PER_NODE"])[node])
    else:
        return None
    return None if count == "1" else (int(local), int(count))


def _expanded(tasks: str) -> list[int]:
    """Expand Slurm's `2(x3),1` to 2, 2, 2, 1."""
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in tasks.split(",")]
    return [int(part[1]) for part in parts if part is not None for _ in range(int(part[2] or 1))]

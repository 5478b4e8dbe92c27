"""Topologies: chips and their number, as `v5e:4x4`, and slices of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from jax.sharding import AbstractDevice

from jshard.errors import Location
from jshard.hardware.chips import CHIPS, Chip
from jshard.signals.config import Configuration
from jshard.signals.topologies import read_name, written


@dataclasses.dataclass(frozen=True)
class Topology:
    """A number of chips of a kind, in a shape, in one or several slices."""

    name: str  # v5e:4x4
    chip: Chip
    shape: tuple[int, ...]
    place: Location | None = dataclasses.field(default=None, compare=False)  # its line in a configuration
    slices: int = 1

    @classmethod
    def of(cls, name: str, place: Location | None = None, slices: int = 1) -> Topology:
        """Read a name like `v5e:4x4` or `h100:8`; raise an error with near names if it is unknown."""
        chip, shape = read_name(name)
        return cls(written(name), CHIPS[chip], shape, place, slices)

    @classmethod
    def chosen(cls, name: str | None, present: Configuration | None) -> Topology | None:
        """Return the topology of this name, or the configuration's, with the slices of the configuration's mesh."""
        slices = 1 if present is None or present.mesh is None else present.mesh.slices
        if present is not None and present.topology is not None and name in (None, present.topology):
            return cls.of(present.topology, present.topology_place, slices)
        return None if name is None else cls.of(name, slices=slices)

    @property
    def devices(self) -> int:
        """The number of JAX devices, in all slices."""
        return self.slices * self.slice_devices

    @property
    def slice_devices(self) -> int:
        return math.prod(self.shape) * self.chip.devices

    def spans_slices(self, members: Iterable[int]) -> bool:
        """Return True if these devices are in several slices."""
        return len({member // self.slice_devices for member in members}) > 1

    def __str__(self) -> str:
        many = f"{self.devices:,} device{'' if self.devices == 1 else 's'}"
        name = f"{self.slices} x {self.name}" if self.slices > 1 else self.name
        if self.chip.platform == "cpu":
            return f"{name} ({many}, pretended)"
        two = f", {self.chip.devices} to a chip" if self.chip.devices > 1 else ""
        return f"{name} ({many} of {self.chip.kind}{two})"

    @property
    def platform(self) -> str:
        """The compiler's name for its target platform."""
        return "cuda" if self.chip.platform == "gpu" else self.chip.platform

    @property
    def abstract_device(self) -> AbstractDevice:
        """The device as traced programs see it."""
        cores = self.chip.gpu.get("cores")
        return AbstractDevice(device_kind=self.chip.kind, num_cores=cores, platform=self.chip.platform)

    @property
    def target(self) -> dict[str, Any]:
        """The options of `get_topology_desc` besides the name."""
        several = {"num_slices": self.slices} if self.slices > 1 and self.chip.platform == "tpu" else {}
        if self.chip.config:
            return {"chip_config_name": self.chip.config, **several}
        if self.chip.platform == "tpu" and min(self.shape[:2]) == 1:  # the default is 2x2 chips a host
            return {"chips_per_host_bounds": [*(min(size, 2) for size in self.shape[:2]), 1], **several}
        if self.chip.platform != "gpu":
            return several
        hosts = self.slices * -(-self.shape[0] // self.chip.host)
        return {"topology": f"1x{hosts}x{self.devices // hosts}", "target_config": _gpu_in_words(self.chip)}


def _gpu_in_words(chip: Chip) -> str:
    """Return XLA's description of a GPU (`GpuTargetConfigProto` as text), by the figures of the table."""
    gpu = chip.gpu
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49_152,
        "shared_memory_per_core": gpu["shared_core"],
        "shared_memory_per_block_optin": gpu["shared_block"],
        "threads_per_core_limit": 2048,
        "core_count": gpu["cores"],
        "fpus_per_core": 128,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65_535,
        "block_dim_limit_z": 65_535,
        "memory_bandwidth": int(chip.bandwidth),
        "l2_cache_size": gpu["l2"],
        "clock_rate_ghz": gpu["clock"],
        "device_memory_size": chip.memory,
        "registers_per_core_limit": 65_536,
        "registers_per_block_limit": 65_536,
    }
    device = " ".join(f"{name}: {value}" for name, value in fields.items())
    return (
        f"gpu_device_info {{ {device} cuda_compute_capability {{ major: {gpu['major']} }} "
        f"device_interconnect_info {{ active_links: {gpu['links']} }} }} "  # without links XLA always sums by NCCL
        f'platform_name: "CUDA" device_description_str: "{chip.kind}"'
    )

"""The chips known to jshard, a row each: JAX's names, possible numbers and shapes, and the makers'
figures. Imports no JAX, so that a configuration with a chip is checked at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Platform = Literal["cpu", "gpu", "tpu"]
GIB = 2**30
# Seconds from a send to its arrival on another host. No TPU maker states it. XLA's model of GPUs has a round trip of
# 68.89 us x 0.45 (xla/service/gpu/model/sol_gpu_cost_model.cc, H100), used for all chips.
HOP = 0.45 * 68.89e-6 / 2


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of chip. Rates are its maker's stated peaks for a whole chip; nothing here is measured."""

    name: str
    platform: Platform
    kind: str = ""  # JAX's name
    others: tuple[str, ...] = ()  # other names in JAX, lower case; for a GPU the beginning
    devices: int = 1  # JAX devices on one chip
    vmem: int = 0  # MiB of a TPU core's fast memory
    memory: int = 0  # bytes usable by programs
    flops: Mapping[str, float] = dataclasses.field(default_factory=dict)  # per second, by dtype of the operands
    bandwidth: float = 0.0  # bytes per second of the chip's memory
    link: float = 0.0  # bytes per second one way: of a TPU's single link, or of all of a GPU; 0 if unknown
    axes: int = 0  # of the torus: a TPU has two links along each
    clock: float = 0.0  # cycles per second of a TPU's cores, the unit of its compiler
    source: str = ""
    examples: tuple[str, ...] = ()  # sizes to plan for; none if too few figures are known
    host: int = 0  # GPUs connected by NVLink
    between_hosts: float = 0.0  # bytes per second one way and chip: between GPU hosts, or TPU slices
    config: str = ""  # an option of a TPU's compiler: two cores are one device
    gpu: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # properties for a GPU's compiler

    def peak(self, dtype: str) -> float:
        """Return a device's FLOP/s of products in this dtype, or in the next wider dtype with a figure."""
        for known in (dtype, "bfloat16" if dtype == "float16" else "float32"):
            if known in self.flops:
                return self.flops[known] / self.devices
        return self.flops["bfloat16"] / self.devices

    @property
    def device_memory(self) -> int:
        """The usable bytes of a device."""
        return self.memory // self.devices


HOPPER = {
    "major": 9, "cores": 132, "links": 18, "l2": 52_428_800, "clock": 1.98, "shared_core": 233_472, "shared_block": 232_448,
}  # fmt: skip
BLACKWELL = {**HOPPER, "major": 10, "cores": 148, "l2": 132_644_864, "clock": 1.965}
# Dense; float32 as TF32.
HOPPER_FLOPS = {"float8_e4m3fn": 1979e12, "int8": 1979e12, "bfloat16": 989e12, "float32": 494.7e12}
CLOUD = "docs.cloud.google.com/tpu/docs"
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
DEEP = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
COUNTS = ("1", "2", "4", "8", "16", "64")
# A TPU multiplies float32 in bfloat16 passes: jax's default precision is one pass, so its rate is bfloat16's.
# The clock is the peak divided by the products of a device's matrix units in a cycle: 4 units of 128 x 128 (v4, v5p: 8, in
# two cores), of 256 x 256 from v6e on. By this clock, XLA's cycles for 4096 x 4096 x 4096 are at 83 to 97 % of the peak.
# VMEM is from jax's own pltpu.get_tpu_info_for_chip. Usable memory of TPUs is from their compiler's error for a program that
# is too large (docs/design/0008-plan.md).
# The rate between slices is the maker's figure for the network: v5e 6.4 Tbit/s for a pod of 256 (two NICs of 100 Gbit/s for a
# host of 8), v6e 25.6 Tbit/s for 256, v5p 50 Gbit/s per chip. For v4 and tpu7x none was found, and v5p's is used.
# A link's rate is the stated "bidirectional ICI bandwidth per chip", halved, and divided among the chip's links. For v6e, an
# older page has 3,584 Gbit/s and the present page 3,200 (112 and 100 GB/s per link): the present page counts.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            "v5e", "tpu", "TPU v5 lite", ("tpu v5e",), vmem=128, memory=int(15.75 * GIB),
            flops={"int8": 393e12, "bfloat16": 197e12}, bandwidth=819e9, link=50e9, axes=2, clock=1.5e9,
            between_hosts=3.125e9,
            source=f"{CLOUD}/v5e: 197 TFLOP/s, 16 GB, 819 GB/s, 400 GB/s over 4 links", examples=FLAT,
        ),
        Chip(
            "v5p", "tpu", "TPU v5", ("tpu v5p",), vmem=64, memory=int(95.74 * GIB),
            flops={"int8": 918e12, "bfloat16": 459e12}, bandwidth=2765e9, link=100e9, axes=3, clock=1.75e9,
            between_hosts=6.25e9,
            source=f"{CLOUD}/v5p: 459 TFLOP/s, 95 GiB, 2,765 GB/s, 1,200 GB/s over 6 links",
            examples=(*DEEP, "8x8x16", "16x16x24"),
        ),
        Chip(
            "v6e", "tpu", "TPU v6 lite", ("tpu v6e",), vmem=128, memory=int(31.25 * GIB),
            flops={"int8": 1836e12, "bfloat16": 918e12}, bandwidth=1638e9, link=100e9, axes=2, clock=1.75e9,
            between_hosts=12.5e9,
            source=f"{CLOUD}/v6e: 918 TFLOP/s, 32 GB, 1,638 GB/s, 800 GB/s over 4 links", examples=FLAT,
        ),
        Chip(
            "tpu7x", "tpu", "TPU7x", devices=2, vmem=64, memory=int(2 * 94.75 * GIB),
            flops={"float8_e4m3fn": 4614e12, "bfloat16": 2307e12}, bandwidth=7380e9, link=100e9, axes=3, clock=2.2e9,
            between_hosts=6.25e9,
            source=f"{CLOUD}/tpu7x: 2,307 TFLOP/s, 192 GiB, 7,380 GB/s, 1,200 GB/s over 6 links; a chip is two devices",
            examples=DEEP,
        ),
        Chip(
            "v4", "tpu", "TPU v4", vmem=16, memory=int(30.75 * GIB), flops={"int8": 275e12, "bfloat16": 275e12},
            bandwidth=1200e9, link=50e9, axes=3, clock=1.05e9,
            between_hosts=6.25e9,
            source=f"{CLOUD}/v4: 275 TFLOP/s, 32 GiB, 1,200 GB/s; 2,400 Gbit/s one way over 6 links", examples=DEEP,
            config="megacore",
        ),
        Chip(
            "h100", "gpu", "NVIDIA H100 80GB HBM3", ("nvidia h100",), memory=84_942_979_072, flops=HOPPER_FLOPS,
            bandwidth=3352e9, link=450e9, host=8, between_hosts=50e9, gpu=HOPPER, examples=COUNTS,
            source="NVIDIA H100 SXM data sheet: 989 TFLOP/s dense, 80 GB, 3.35 TB/s, NVLink 900 GB/s both ways",
        ),
        Chip(
            "h200", "gpu", "NVIDIA H200 141GB HBM3e", ("nvidia h200",), memory=151_397_597_184, flops=HOPPER_FLOPS,
            bandwidth=4800e9, link=450e9, host=8, between_hosts=50e9, gpu=HOPPER, examples=COUNTS,
            source="NVIDIA H200 SXM data sheet: 989 TFLOP/s dense, 141 GB, 4.8 TB/s, NVLink 900 GB/s both ways",
        ),
        Chip(
            "b200", "gpu", "NVIDIA B200", ("nvidia b200", "nvidia gb200"), memory=191_514_411_008,
            flops={"float8_e4m3fn": 4500e12, "int8": 4500e12, "bfloat16": 2250e12, "float32": 1100e12},
            bandwidth=7672e9, link=900e9, host=8, between_hosts=50e9, gpu=BLACKWELL, examples=COUNTS,
            source="NVIDIA HGX B200 data sheet: 2.25 PFLOP/s dense, 180 GB, 7.7 TB/s, NVLink 1.8 TB/s both ways",
        ),
        Chip(
            "a100", "gpu", "NVIDIA A100", ("nvidia a100",), link=300e9,
            source="NVIDIA A100 SXM data sheet: NVLink 600 GB/s both ways",
        ),
        Chip("cpu", "cpu", "cpu", source="pretended: no figures", examples=(*COUNTS, "256")),
    )
}  # fmt: skip

"""The choice of an op's algorithm: the caller's, or "auto" by a table with a source in each row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jshard.algorithms import ALGORITHMS
from jshard.errors import JShardError, did_you_mean
from jshard.kernels import chip as chips
from jshard.kernels import slices
from jshard.kernels.chip import Chip
from jshard.kernels.deterministic_sum import between_processes

# Words that run on every chip: XLA's own operations.
NO_KERNELS = ("auto", "hierarchical", "in_order", "permute", "xla")
DTYPES = ("float32", "bfloat16", "int32", "int8")
GPU_GENERATIONS = {9: "hopper", 10: "blackwell"}  # by compute capability: the name in JAX's kernels
GPUS = [name for name, each in chips.CHIPS.items() if each.gpu.get("major") in GPU_GENERATIONS]  # GPUs with a kernel
LONGEST_RING = 64  # a ring takes 4 semaphores a step, and a TPU has about 500
Unsupported = Callable[[], tuple[str, str] | None]  # the reason why a kernel can't take its operands, and a hint
KiB, MiB, MANY = 1 << 10, 1 << 20, 1 << 62


@dataclasses.dataclass(frozen=True)
class Choice:
    """An algorithm, the reason for it, and the source of the reason: a measurement or a text."""

    algorithm: str
    reason: str
    source: str

    def __str__(self) -> str:
        return f"{self.algorithm}: {self.reason} ({self.source})"


@dataclasses.dataclass(frozen=True)
class Rule:
    """A choice for `ops` on `chips`, for group sizes in `devices` and a `payload` in bytes. It may also require
    `when` of shape and dtype, a group of all devices (`of_all`), or concurrent work (`beside_work`)."""

    ops: str
    chips: str
    choice: Choice
    devices: range = range(2, MANY)
    payload: range = range(MANY)
    when: Callable[[Sequence[int], Any], bool] | None = None
    of_all: bool = False
    beside_work: bool = False

    def applies(
        self, op: str, chip: Chip, group: int, shape: Sequence[int], dtype: jnp.dtype, of_all: bool, beside_work: bool
    ) -> bool:
        if (self.of_all and not of_all) or (self.beside_work and not beside_work):
            return False
        on_chip = self.chips in ("any", chip.platform) or chip.name in self.chips.split()
        on_op = self.ops == "any" or op in self.ops.split()
        fits = group in self.devices and math.prod(shape) * dtype.itemsize in self.payload
        return on_chip and on_op and fits and (self.when is None or self.when(shape, dtype))


_UNMEASURED = "docs/measurements/kernels.md: not measured on a TPU"
_WIRE = "docs/speed.md: python -m benchmarks.overlap, compiled for absent v5e, v5p, v6e"
_TILES = "HLO compiled for an absent v5e:2x4, jax 0.10.2, libtpu 0.0.42.1: docs/design/0018-partition.md"
_GATHERED = (
    "HLO compiled for 64 to 256 absent v5e, v5p, v6e, jax 0.10.2, libtpu 0.0.42.1: docs/design/0018-partition.md"
)
_SCATTERS = "docs/measurements/kernels.md: scatters compiled for absent v5e, v5p, v6e"
_SUMS = "docs/speed.md: python -m benchmarks.fsdp --ways replicated,data,late, compiled for absent v5e, v5p, v6e"
_PROCESSES = "docs/design/0015-processes.md: python -m benchmarks.processes"


def _xla(reason: str, source: str) -> Choice:
    return Choice("xla", reason, source)


def _is_no_whole_tiles(shape: Sequence[int], dtype: jnp.dtype) -> bool:
    """Return True unless a device's shard is several whole tiles, each of 128 lanes and 8 rows of 32 bits."""
    lanes, rows = 128, 32 // dtype.itemsize
    is_whole = len(shape) > 1 and shape[-1] >= lanes and shape[-2] % rows == 0
    return not is_whole or math.prod(shape) <= rows * lanes


def _along_the_torus(chips: str, devices: range, most: int = MANY) -> Rule:
    reason = "XLA runs such a gather over all of a slice as an all-reduce, of twice the bytes, and computes nothing meanwhile"
    # below 4 KiB the waits for neighbours dominate
    return Rule("all_gather", chips, Choice("torus", reason, _GATHERED), devices, range(4 * KiB, most), of_all=True)


TABLE = (  # the first row that applies counts
    Rule("any", "any", _xla("a group of one moves nothing", "arithmetic"), range(2)),
    Rule(
        "all_reduce",
        "cpu",
        Choice("in_order", "gloo waits for a neighbour 2 (n - 1) times, this once or twice", _PROCESSES),
        devices=range(3, MANY),
        when=lambda *_: between_processes(),
    ),
    Rule(
        "reduce_scatter all_gather",
        "cpu",
        Choice(
            "in_order", "gloo's reduce-scatter delays later messages by 40 ms, and adds in another order", _PROCESSES
        ),
        when=lambda *_: between_processes(),
    ),
    Rule(
        "any",
        "cpu",
        _xla("a CPU has no links for a kernel to drive", "tests/kernels/test_select_algorithm.py: HLO of psum"),
    ),
    Rule("any", "gpu", _xla("no figure says that a kernel beats XLA's own, or NCCL's, on a GPU", "docs/kernels.md")),
    Rule(
        "all_gather_matmul matmul_reduce_scatter",
        "tpu",
        Choice("permute", "the wire runs under the product; XLA does not overlap them inside a shard_map", _WIRE),
        devices=range(2, LONGEST_RING + 1),  # a longer ring has many small products
        payload=range(64 * KiB, MANY),  # below it the waits for neighbours dominate
    ),
    Rule(
        "all_reduce",
        "tpu",
        Choice("permute", "XLA computes while permutes travel, but not while it sums", _SUMS),
        payload=range(MiB, MANY),  # below it the waits for neighbours dominate
        beside_work=True,
    ),
    Rule(
        "reduce_scatter",
        "tpu",
        Choice("permute", "XLA computes while permutes travel, but not during its scatter", _SCATTERS),
        payload=range(64 * KiB, MANY),  # below it the waits for neighbours dominate
        beside_work=True,
    ),
    *(_along_the_torus("v5e", range(group, group + 1), 16 * MiB // group + 1) for group in (64, 128, 256)),
    Rule(
        "reduce_scatter all_gather",
        "tpu",
        Choice(
            "in_order",
            "XLA runs a scatter of parts of no whole tiles as an all-reduce, of twice the bytes",
            _TILES,
        ),
        when=_is_no_whole_tiles,
    ),
    Rule(
        "all_gather",
        "v5p v6e",
        Choice("permute", "XLA computes while permutes travel, but not during its gather there", _SCATTERS),
        beside_work=True,
    ),
    *(_along_the_torus("v6e", range(group, group + 1), 16 * MiB // group + 1) for group in (64, 128, 256)),
    _along_the_torus("v5p", range(64, MANY)),
    Rule(
        "reduce_scatter",
        "tpu",
        Choice("permute", "XLA runs a scatter over all of a slice as an all-reduce, of twice the bytes", _SCATTERS),
        devices=range(16, MANY),
        of_all=True,
    ),
    Rule("any", "tpu", _xla("no figure says that a kernel beats XLA's own on this chip", _UNMEASURED), range(MANY)),
    Rule("any", "any", _xla("jshard has no kernels for this chip", "docs/kernels.md"), range(MANY)),
)


def choose(
    op: str, *, shape: Sequence[int], dtype: jax.typing.DTypeLike, group: int, chip: str | Chip | None = None,
    of_all: bool = False, beside_work: bool = False,
) -> Choice:  # fmt: skip
    """Return the "auto" choice for an array of `shape` over `group` devices of `chip` (default: the chip traced for).

    `of_all` says that the group is all of a slice, `beside_work` that the program has other
    work to do meanwhile. For a scatter or a gather, `shape` is that of a device's shard.
    """
    _check_known(op)
    target = chips.present_chip() if chip is None else chip if isinstance(chip, Chip) else chips.chip(chip)
    group = max(group, 2) if op == "matmul" else group  # the row for a group of one is about collectives
    of = target, group, shape, jnp.dtype(dtype), of_all, beside_work
    return next(row.choice for row in TABLE if row.applies(op, *of))


def default_algorithm(op: str) -> Any:
    """Return the algorithm of an op if no signal names any: XLA's, except for sums between slices and between processes."""
    if op == "all_reduce" and slices.loaded_across():
        return "hierarchical"
    return "in_order" if "in_order" in ALGORITHMS[op] and between_processes() else "xla"


def adds_in_order(algorithm: str) -> bool:
    """Return True if an all-reduce by `algorithm` adds in device order here."""
    return algorithm == "in_order" or (algorithm in ("auto", "hierarchical") and between_processes())


def is_psum(algorithm: str, mesh_axes: tuple[str, ...]) -> bool:
    """Return True if JAX's psum sums the gradients: `algorithm` adds neither in device order nor by slices."""
    if algorithm in ("auto", "hierarchical") and slices.is_hierarchy(mesh_axes):
        return False
    # two numbers have one sum, in any order
    return not adds_in_order(algorithm) or math.prod(slices.size_along(name) for name in mesh_axes) < 3


def resolve_algorithm(
    op: str, algorithm: str, x: Any, mesh_axes: tuple[str, ...], unsupported: Unsupported | None = None
) -> str:
    """Return the algorithm to run: "auto" falls back to XLA if a kernel can't run; a named algorithm raises.

    `unsupported` gives further reasons, of this op alone.
    """
    _check_known(op, algorithm)
    if op == "all_reduce" and algorithm in ("auto", "hierarchical") and unsupported is None:
        if slices.is_hierarchy(mesh_axes, x.size):
            return "hierarchical"
    if algorithm == "hierarchical" and slices.loaded_across():  # a single network, or fewer numbers than devices
        algorithm = "in_order" if between_processes() else "xla"
    if algorithm == "xla":
        return "xla"
    group = math.prod(slices.size_along(name) for name in mesh_axes)
    if (op, algorithm) == ("all_reduce", "in_order") and group == 2 and unsupported is None:
        return "xla"  # a + b is b + a: both orders give the same bits
    if algorithm == "auto":
        of_all = group == slices.devices_of_a_slice()
        chosen = choose(op, shape=x.shape, dtype=x.dtype, group=group, of_all=of_all).algorithm
        return chosen if chosen == "xla" or _refusal(op, chosen, x, mesh_axes, group, unsupported) is None else "xla"
    if op != "matmul" and (group == 1 or x.size == 0):
        return "xla"  # nothing to move
    refusal = _refusal(op, algorithm, x, mesh_axes, group, unsupported)
    if refusal is not None:
        fault, hint = refusal
        raise JShardError(f'{op} can\'t run by "{algorithm}": {fault}', hint=hint)
    return algorithm


def _check_known(op: str, algorithm: str = "auto") -> None:
    if op not in ALGORITHMS:
        hint = did_you_mean(op, ALGORITHMS, f"use one of {', '.join(ALGORITHMS)}")
        raise JShardError(f'jshard has no kernel "{op}"', hint=hint)
    if algorithm not in ALGORITHMS[op]:
        words = ", ".join(f'"{word}"' for word in ALGORITHMS[op])
        hint = did_you_mean(algorithm, ALGORITHMS[op], f"use one of {words}")
        raise JShardError(f'{op} has no algorithm "{algorithm}"', hint=hint)


def _refusal(
    op: str, algorithm: str, x: jax.Array, mesh_axes: tuple[str, ...], group: int, unsupported: Unsupported | None
) -> tuple[str, str] | None:
    """Return the reason why `algorithm` can't run here, and a hint; None if it can."""
    use_auto = 'use algorithm="auto"'
    if algorithm == "hierarchical":
        return "no mesh axis crosses slices", "write jshard: {mesh: {slice: {size: 2, over: dcn}, ...}}"
    if algorithm in NO_KERNELS or (op, algorithm) == ("all_gather", "torus"):
        return None if unsupported is None else unsupported()
    chip = chips.present_chip()
    if chip.platform == "gpu" and op == "matmul":
        if chip.name not in GPUS:
            return f"its kernel drives {', '.join(GPUS)}, and this is {chip.name}", use_auto
        if chips.interpretation() is not None:
            return "its kernel for GPUs is JAX's own, which is not interpreted", use_auto
    elif chip.platform == "gpu" or (chip.platform != "tpu" and chips.interpretation() is None):
        drives = "a TPU or a GPU" if op == "matmul" else "a TPU"
        return f"its kernel drives {drives}, and this is {chip.name}", f"{use_auto}, or try it in kernels.interpret()"
    known, of = _dtypes(op, chip), {"v4": " on v4"}.get(chip.name, " on a GPU" if chip.platform == "gpu" else "")
    if str(x.dtype) not in known:
        return f"its kernel takes {', '.join(known)}{of}, and x is {x.dtype}", f"cast x, or {use_auto}"
    mesh = jax.sharding.get_abstract_mesh()
    for name in mesh_axes:
        if name not in mesh.axis_names:
            return f'"{name}" is an axis of jax.vmap, and its kernel reaches along mesh axes only', use_auto
    if mesh_axes and set(mesh.manual_axes) != set(mesh.axis_names):
        left = next(name for name in mesh.axis_names if name not in mesh.manual_axes)
        return (
            f'mesh axis "{left}" is left to the partitioner, and a kernel reaches devices by all mesh axes',
            f"{use_auto}, or a shard_map over every mesh axis",
        )
    longest = max((slices.size_along(name) for name in mesh_axes), default=1) if algorithm == "torus" else group
    if algorithm in ("ring", "torus") and longest > LONGEST_RING:
        several = 'use algorithm="torus" over several mesh axes' if op == "all_reduce" else 'use algorithm="xla"'
        return f"a ring of {longest} needs more semaphores than a TPU has, which is enough for {LONGEST_RING}", several
    if algorithm == "torus" and len(mesh_axes) < 2:
        return f'a torus has several mesh axes, and "{"".join(mesh_axes)}" is one', 'use algorithm="ring"'
    if algorithm == "one_shot":
        budget, need = vmem_budget(), (group + 2) * x.size * x.dtype.itemsize
        if need > budget:
            return (
                f"{x.size * x.dtype.itemsize:,} bytes from each of {group} devices need {need:,} bytes of VMEM, and "
                f"there are {budget:,}",
                'use algorithm="ring"',
            )
    return None if unsupported is None else unsupported()


def _dtypes(op: str, chip: Chip) -> list[str]:
    """Return the dtypes of a kernel. A TPU's matrix unit multiplies no int32, v4's no int8; a GPU's kernel takes 16 bits."""
    if chip.platform == "gpu":
        return ["bfloat16", "float16"]  # dtypes that tensor cores multiply straight from memory
    missing = () if "matmul" not in op else ("int32", "int8") if chip.name == "v4" else ("int32",)
    return [name for name in DTYPES if name not in missing]


def vmem_budget() -> int:
    """Return the bytes of VMEM for a kernel on the chip traced for."""
    return (chips.present_chip().vmem or 16) * MiB * 3 // 4  # the rest is for Mosaic itself

"""Compilation for absent devices, in another process with a time limit. A compiler that
aborts becomes one sentence here, and its noise, environment and memory stay there."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export

from jshard.errors import JShardError
from jshard.inspect.compiled.collective import Large
from jshard.inspect.plan.topology import Topology
from jshard.programs.jaxprs import Jaxpr, bare, equations
from jshard.programs.provenance import cause, op_name, source_of

LIMIT = 600  # seconds
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # libtpu would query the network for this machine's TPU
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # or two compilations at once collide on a lock file
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # an executable out of JAX's own cache has no text to read
}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The result of a compilation. A program too large for the chip has no text, but the compiler's figures."""

    text: str
    memory: Mapping[str, int]  # bytes: argument, output, alias, temp, generated_code, peak
    seconds: float
    needed: int | None = None
    available: int | None = None
    largest: tuple[Large, ...] = ()

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Compiled:
        fields = json.loads(text)
        return cls(**{**fields, "largest": tuple(Large(**each) for each in fields["largest"])})


def check_installed(topology: Topology) -> None:
    """Raise if the compiler for `topology` is not installed, with the command to install it."""
    plugin = next((f"cuda{n}" for n in (13, 12) if _there(f"jax_plugins.xla_cuda{n}")), None)
    missing = None
    if topology.platform == "tpu" and not _there("libtpu"):
        missing = "libtpu", '"jshard[tpu]"'
    elif topology.platform == "cuda" and plugin is None:
        missing = "JAX's CUDA plugin", '"jshard[plan]"'
    elif topology.platform == "cuda" and not _assembler(plugin or ""):
        missing = "NVIDIA's assembler (nvidia-cuda-nvcc)", '"jshard[plan]"'
    elif not _there("flatbuffers"):
        missing = "flatbuffers", "flatbuffers"
    if missing is not None:
        fault = f"planning for {topology.name} needs {missing[0]}, which is not installed"
        raise JShardError(fault, hint=f"type: pip install {missing[1]}")


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # no parent package
        return False


def _assembler(plugin: str) -> bool:
    """Return True if XLA finds an assembler: the wheel's, or the machine's CUDA toolkit."""
    wheel = {"cuda13": "nvidia.cu13", "cuda12": "nvidia.cuda_nvcc"}[plugin]
    return _there(wheel) or shutil.which("ptxas") is not None or Path("/usr/local/cuda/bin/ptxas").exists()


@dataclasses.dataclass(frozen=True)
class Exported:
    """A program for another process: its bytes, its job (how to compile it), a hash of its meaning, and its jaxpr."""

    program: bytes
    job: str
    meaning: bytes
    jaxpr: Any = None


PLACE = re.compile(r"#loc\d*")
NUMBERED = re.compile(r"program=\d+")  # the number of a partitioned program in this process
NAMED = re.compile(r'^(#loc\d*) = loc\("(.*)"\(#loc\d*\)\)$', re.MULTILINE)


def meaning_of(module: str) -> bytes:
    """Return a hash of the program and the names of its scopes, without the lines of its source and callers."""
    names = dict(NAMED.findall(module))
    lines = [line for line in module.splitlines() if not line.startswith("#loc")]
    bare = PLACE.sub(lambda found: names.get(found[0], ""), "\n".join(lines))
    return hashlib.sha256(NUMBERED.sub("program", bare).encode()).digest()


def exported(program: Any, args: Sequence[Any], kwargs: Mapping[str, Any], topology: Topology) -> Exported:
    """Export a jitted program of arrays on absent meshes, as a program of
    flat arrays. The other process does not know the user's classes."""
    infos = jax.tree.leaves(program.trace(*args, **kwargs).args_info, is_leaf=lambda each: hasattr(each, "donated"))
    donated = [number for number, info in enumerate(infos) if info.donated]
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))

    def flat(*leaves: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return jax.tree.leaves(program(*args, **kwargs))

    jitted = jax.jit(flat, donate_argnums=donated)
    jaxpr = bare(jitted.trace(*leaves).jaxpr)
    check_stays_on_devices(jaxpr)
    # Custom calls are the program's kernels. The same version of JAX compiles them, so this check is not needed.
    export = jax.export.export(
        jitted,
        platforms=[topology.platform],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name) for name in KERNELS],
    )(*leaves)
    job = {
        "platform": topology.platform,
        "name": topology.name,
        "target": topology.target,
        "donated": donated,
    }
    return Exported(bytes(export.serialize()), json.dumps(job, sort_keys=True), meaning_of(export.mlir_module()), jaxpr)


KERNELS = ("__gpu$xla.gpu.triton", "mosaic_gpu_v2", "tpu_custom_call", "AllocateBuffer")


def check_stays_on_devices(jaxpr: Jaxpr) -> None:
    """Raise for a program with calls of Python: absent devices have no process to run them."""
    for eqn in equations(jaxpr):
        if eqn.primitive.name.endswith(("callback", "debug_print")):
            place = source_of(eqn)
            raise JShardError(
                f"{place or 'the program'} calls Python while it runs ({eqn.primitive.name}), so it can't be planned",
                hint="take jax.debug.print and other callbacks out",
            )


def compile_absent(export: Exported, topology: Topology, *, limit: float = LIMIT) -> Compiled:
    """Compile in another process. An error there becomes one sentence here."""
    check_installed(topology)
    environment = {**os.environ, **ENVIRONMENT, "JAX_NUM_CPU_DEVICES": str(topology.devices), "PJRT_NPROC": "2"}
    script = Path(__file__).with_name("aot_worker.py")
    with tempfile.TemporaryDirectory(prefix="jshard-plan-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(export.job)
        (folder / "program.bin").write_bytes(export.program)
        began = time.perf_counter()
        with (folder / "stderr").open("w") as stderr:
            # -P: do not import from the folder of the script
            child = subprocess.Popen(
                [sys.executable, "-P", str(script), name],
                env=environment, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr, start_new_session=True,
            )  # fmt: skip
            try:
                status = child.wait(limit)
            except subprocess.TimeoutExpired:
                raise JShardError(
                    f"compiling for {topology.name} took longer than {limit:g} s",
                    hint=f"plan a smaller program, or give it longer: limit={2 * limit:g}",
                ) from None
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
        seconds = time.perf_counter() - began
        stderr_text = (folder / "stderr").read_text(errors="replace")
        if status == 0:
            result = json.loads((folder / "result.json").read_text())
            return Compiled((folder / "program.hlo").read_text(), result["memory"], seconds)
        too_large = _out_of_memory(stderr_text)
        if too_large is not None:
            needed, available, largest = too_large
            return Compiled("", {}, seconds, needed, available, largest)
        raise JShardError(
            _reason(topology, status, stderr_text), hint="plan a smaller part of the program to find what it can't take"
        )


def _reason(topology: Topology, status: int, stderr_text: str) -> str:
    """Return the reason why the other process ended, in a sentence."""
    lines = [line.strip() for line in stderr_text.splitlines() if line.strip()]
    fatal = [line for line in lines if re.match(r"(F\d{4} |LLVM ERROR|Fatal |.*Check failed)", line)]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b.*:", line)]
    last = (fatal or raised or lines or ["it printed nothing"])[-1]
    if status < 0:
        last_words = f": {last}" if fatal else ""
        return f"the compiler for {topology.name} aborted ({signal.Signals(-status).name}){last_words}"
    return f"the compiler for {topology.name} refused the program: {last}"


SIZE = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _bytes(word: str) -> int:
    found = re.fullmatch(r"([\d.]+)([BKMGT]?)", word)
    assert found, f"a size that jshard can't read: {word}"
    return int(float(found[1]) * SIZE[found[2]])


# The first lists the largest allocations; the second comes before the compiler knows them.
OUT_OF_MEMORY = re.compile(
    r"Ran out of memory in memory space hbm.*?Used ([\d.]+[BKMGT]?) of ([\d.]+[BKMGT]?) hbm", re.S
)
FAR_OUT_OF_MEMORY = re.compile(
    r"Ran out of memory on HBM, .*?\(([\d.]+[BKMGT]?)\) exceeds available HBM \(([\d.]+[BKMGT]?)\)"
)


def _out_of_memory(stderr_text: str) -> tuple[int, int, tuple[Large, ...]] | None:
    """Read libtpu's message about a program too large for its chip: bytes needed, bytes there, largest arrays."""
    found = OUT_OF_MEMORY.search(stderr_text) or FAR_OUT_OF_MEMORY.search(stderr_text)
    if found is None:
        return None
    largest = []
    for each in re.split(r"\n\s*\d+\. Size: ", stderr_text[found.end() :])[1:]:
        size = re.match(r"[\d.]+[BKMGT]?", each)
        shape = re.search(r"Shape: (\S+?)(?:\{|\s|$)", each)
        assert size, each
        largest.append(Large(_bytes(size[0]), shape[1] if shape else "", cause(op_name(each)).signal))
    return _bytes(found[1]), _bytes(found[2]), tuple(largest)

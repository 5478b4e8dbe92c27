"""The number of this process, the address of process 0, and its GPUs, from the environment."""

from __future__ import annotations

import dataclasses
import os
import re
import zlib
from collections.abc import Mapping

from jshard.errors import JShardError
from jshard.hardware.host import nvidia_cards

PORT = 8476  # of process 0, if the environment names only its host


@dataclasses.dataclass(frozen=True)
class Membership:
    """Process `rank` of `processes`; process 0 listens at `coordinator`, a `host:port`."""

    coordinator: str
    processes: int
    rank: int
    found_by: str

    def __post_init__(self) -> None:
        fault = f"{self.found_by} says that this is process {self.rank} of {self.processes}"
        if self.processes < 1 or not 0 <= self.rank < self.processes:
            raise JShardError(fault, hint=f"number the processes from 0 to {max(self.processes, 1) - 1}")
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise JShardError(
                f'{self.found_by} says that the first process is at "{self.coordinator}", which is no host:port',
                hint="write it like JAX_COORDINATOR_ADDRESS=node1:8476",
            )

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def is_local(self) -> bool:
        """True if all processes are on this machine, so that none listens beyond it."""
        return self.address[0] == "localhost" or self.address[0].startswith("127.") or self.address[0] == "::1"

    def variables(self) -> dict[str, str]:
        """Return the environment for a process with this membership."""
        return {
            "JAX_COORDINATOR_ADDRESS": self.coordinator,
            "JAX_NUM_PROCESSES": str(self.processes),
            "JAX_PROCESS_ID": str(self.rank),
        }


def found(environment: Mapping[str, str] = os.environ) -> Membership | None:
    """Return the membership from JAX_NUM_PROCESSES and the like, or from Slurm, Open MPI,
    Kubernetes or Cloud TPU. Return None for a single process."""
    for look in (_named, _slurm, _open_mpi, _cloud_tpu):
        if (membership := look(environment)) is not None:
            return membership
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        raise JShardError(  # Kubernetes has no variable for the number of pods of an indexed Job
            f"Kubernetes says that this is process {environment['JOB_COMPLETION_INDEX']}, but not of how many",
            hint="set JAX_NUM_PROCESSES and JAX_COORDINATOR_ADDRESS in the pod, as examples/cluster/jobset.yaml does",
        )
    return None


def _named(environment: Mapping[str, str]) -> Membership | None:
    """Read JAX's own three variables. In a JobSet the number of a process is its completion index."""
    count = environment.get("JAX_NUM_PROCESSES")
    rank = environment.get("JAX_PROCESS_ID", environment.get("JOB_COMPLETION_INDEX"))
    if count is None:
        return None
    if rank is None:
        if any(look(environment) for look in (_slurm, _open_mpi, _cloud_tpu)):
            return None  # the scheduler has the rank, and the count too
        raise JShardError(
            f"JAX_NUM_PROCESSES is {count}, but JAX_PROCESS_ID is not set",
            hint=f"set JAX_PROCESS_ID to the number of this process, from 0 to {_number('JAX_NUM_PROCESSES', count) - 1}",
        )
    coordinator, jobset = map(environment.get, ("JAX_COORDINATOR_ADDRESS", "JOBSET_NAME"))
    if not coordinator and jobset and (job := environment.get("REPLICATED_JOB_NAME")):
        coordinator = f"{jobset}-{job}-0-0.{jobset}"  # as JobSet calls the first pod
    if not coordinator and count != "1":
        raise JShardError(
            f"JAX_NUM_PROCESSES is {count}, but JAX_COORDINATOR_ADDRESS is not set",
            hint=f"set JAX_COORDINATOR_ADDRESS to host:port of the first process, like node1:{PORT}",
        )
    coordinator = _with_port(coordinator or f"127.0.0.1:{PORT}", environment)
    processes, number = _number("JAX_NUM_PROCESSES", count), _number("JAX_PROCESS_ID", rank)
    return Membership(coordinator, processes, number, "JAX_PROCESS_ID")


def _slurm(environment: Mapping[str, str]) -> Membership | None:
    """Return the membership of a task of `srun`. The batch script itself is no task: it has no step."""
    nodes, rank, job = map(environment.get, ("SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_JOB_ID"))
    count = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))
    if not (nodes and rank and job) or count == "1":
        return None
    host = environment.get("JAX_COORDINATOR_ADDRESS") or first_host(nodes)
    step = environment.get("SLURM_STEP_ID", "0")
    return _member(environment, host, count, rank, "Slurm", ("SLURM_NTASKS", "SLURM_PROCID"), seed=f"{job}.{step}")


def _open_mpi(environment: Mapping[str, str]) -> Membership | None:
    """Return the membership under `mpirun`: version 4 has an address of its host, version 5 a name in the job's."""
    count, rank = map(environment.get, ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"))
    if not (count and rank) or count == "1":
        return None
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    job = environment.get("PMIX_NAMESPACE", uri.partition(";")[0]).partition("@")[0]
    named = re.search(r"tcp://([^,:]+)", uri) or re.fullmatch(r"prterun-(.+)-\d+", job)
    host = "127.0.0.1" if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == count else named and named[1]
    host = environment.get("JAX_COORDINATOR_ADDRESS", host)
    if host is None:
        raise JShardError(
            f"Open MPI says that this is process {rank} of {count}, but not where the first one is",
            hint=f"type: mpirun -x JAX_COORDINATOR_ADDRESS=node1:{PORT} and the rest",
        )
    return _member(environment, host, count, rank, "Open MPI", ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), job)


def _cloud_tpu(environment: Mapping[str, str]) -> Membership | None:
    """Return the membership of a worker of a TPU slice, or of several slices of equally many workers."""
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    worker = environment.get("TPU_WORKER_ID")
    if not (hosts and worker):
        return None
    names = [name.strip().partition(":")[0] for name in hosts.split(",")]
    slices = _number("MEGASCALE_NUM_SLICES", environment.get("MEGASCALE_NUM_SLICES", "1"))
    part = _number("MEGASCALE_SLICE_ID", environment.get("MEGASCALE_SLICE_ID", "0"))
    if len(names) * slices == 1:
        return None
    first = environment.get("MEGASCALE_COORDINATOR_ADDRESS", "").partition(":")[0] if slices > 1 else names[0]
    if not first:
        raise JShardError(
            f"Cloud TPU says that this is slice {part} of {slices}, but not where the first one is",
            hint="set MEGASCALE_COORDINATOR_ADDRESS to the first worker of slice 0",
        )
    rank = part * len(names) + _number("TPU_WORKER_ID", worker)
    host = environment.get("JAX_COORDINATOR_ADDRESS") or first
    return Membership(_with_port(host, environment), len(names) * slices, rank, "Cloud TPU")


def _member(
    environment: Mapping[str, str], host: str, count: str, rank: str, by: str, names: tuple[str, str], seed: str
) -> Membership:
    """Build a membership. Jobs on the same host differ in `seed`, and so most likely in their ports."""
    coordinator = _with_port(host, environment, port=49152 + zlib.crc32(seed.encode()) % 8192)
    return Membership(coordinator, _number(names[0], count), _number(names[1], rank), by)


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list: `tpu[03-10,12],login` begins with `tpu03`."""
    first = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    assert first is not None
    return "".join(part for part in first.groups() if part)


def _with_port(address: str, environment: Mapping[str, str], port: int = PORT) -> str:
    has = "]:" in address or address.count(":") == 1
    return address if has else f"{address}:{environment.get('JAX_COORDINATOR_PORT', port)}"


def _number(name: str, value: str) -> int:
    if not value.strip().isdecimal():
        raise JShardError(f'{name} is "{value}", which is no number', hint=f"set it like {name}=4")
    return int(value)


# -- the GPUs of a host: JAX would give all GPUs to each process --


def cards_of(
    local: int, count: int, environment: Mapping[str, str] = os.environ, *, strict: bool = False
) -> dict[str, str]:
    """Return the variable for the GPUs of process `local` of `count` on this host, an equal part each. Return
    none without GPUs to share. An unequal part is an error if `strict`; otherwise a scheduler has shared them."""
    if "JAX_LOCAL_DEVICE_IDS" in environment or environment.get("JAX_PLATFORMS") == "cpu":
        return {}
    cards = nvidia_cards(environment)
    if cards % count and strict:
        raise JShardError(
            f"{cards} GPUs can't be divided evenly among {count} processes",
            hint=f"start a number of processes that divides {cards}, or set JAX_PLATFORMS=cpu",
        )
    if not cards or cards % count:
        return {}
    each = cards // count
    return {"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(local * each, (local + 1) * each)))}


def place_on_host(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return this process's number on its host and the count there, from a scheduler; None if alone."""
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

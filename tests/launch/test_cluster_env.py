"""Who a process is, by the environment that Slurm, Open MPI, Kubernetes, Cloud TPU or a user sets."""

from __future__ import annotations

import pytest

from jshard.errors import JShardError
from jshard.launch.cluster_env import Membership, cards_of, first_host, found, place_on_host

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-10],gpu12",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "3",
}
MPI_4 = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
MPI_5 = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-head-node-4242@1",
}
JOBSET = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOB_COMPLETION_INDEX": "1",
    "JAX_NUM_PROCESSES": "2",
    "JOBSET_NAME": "digits",
    "REPLICATED_JOB_NAME": "workers",
}
TPU = {"TPU_WORKER_HOSTNAMES": "t1k-0,t1k-1,t1k-2,t1k-3", "TPU_WORKER_ID": "2"}
SLICES = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "s0-0:8080"}
NAMED = {"JAX_NUM_PROCESSES": "16", "JAX_PROCESS_ID": "9", "JAX_COORDINATOR_ADDRESS": "node1:1234"}


@pytest.mark.parametrize(
    ("environment", "host", "processes", "rank", "by"),
    [
        (NAMED, "node1", 16, 9, "JAX_PROCESS_ID"),
        (SLURM, "gpu07", 5, 3, "Slurm"),
        (MPI_4, "10.96.0.1", 4, 2, "Open MPI"),
        (MPI_5, "head-node", 4, 2, "Open MPI"),
        ({**MPI_5, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "127.0.0.1", 4, 2, "Open MPI"),
        (JOBSET, "digits-workers-0-0.digits", 2, 1, "JAX_PROCESS_ID"),
        (TPU, "t1k-0", 4, 2, "Cloud TPU"),
        ({**TPU, **SLICES}, "s0-0", 8, 6, "Cloud TPU"),
        (
            {"TPU_PROCESS_ADDRESSES": "10.0.0.1:8476,10.0.0.2:8476", "TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "x"},
            "10.0.0.1",
            2,
            1,
            "Cloud TPU",
        ),
        ({**SLURM, **NAMED}, "node1", 16, 9, "JAX_PROCESS_ID"),
        ({**SLURM, "JAX_NUM_PROCESSES": "5"}, "gpu07", 5, 3, "Slurm"),
        ({"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, "127.0.0.1", 1, 0, "JAX_PROCESS_ID"),
        ({**NAMED, "JAX_COORDINATOR_ADDRESS": "[fd00::1]:99"}, "fd00::1", 16, 9, "JAX_PROCESS_ID"),
    ],
)
def test_membership_is_found(environment, host, processes, rank, by):
    membership = found(environment)
    assert membership is not None
    assert (membership.address[0], membership.processes, membership.rank, membership.found_by) == (
        host,
        processes,
        rank,
        by,
    )


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"JAX_COORDINATOR_ADDRESS": "node1:1234"},
        {
            "SLURM_JOB_ID": "77",
            "SLURM_NTASKS": "4",
            "SLURM_PROCID": "0",
            "SLURM_JOB_NODELIST": "a,b",
        },  # the batch script
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    ],
)
def test_membership_of_a_process_that_stands_alone_is_none(environment):
    assert found(environment) is None


def test_membership_of_two_jobs_on_a_host_has_two_ports():
    first, again, other = (found({**SLURM, "SLURM_JOB_ID": job}) for job in ("77", "77", "78"))
    assert first == again
    assert first is not None and other is not None
    assert first.address[1] != other.address[1]


def test_membership_hands_on_what_it_found():
    first = found(SLURM)
    assert first is not None
    again = found(first.variables())
    assert again is not None
    assert (again.coordinator, again.processes, again.rank) == (first.coordinator, first.processes, first.rank)


@pytest.mark.parametrize(
    ("nodes", "host"), [("a", "a"), ("a,b", "a"), ("a[3]", "a3"), ("tpu[03-10,12],x", "tpu03"), ("r[1-2]n,b", "r1n")]
)
def test_membership_reads_slurms_list(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (
            {"JAX_NUM_PROCESSES": "4"},
            "JAX_NUM_PROCESSES is 4, but JAX_PROCESS_ID is not set; set JAX_PROCESS_ID to the number of this process, from "
            "0 to 3",
        ),
        (
            {"JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "1"},
            "JAX_NUM_PROCESSES is 4, but JAX_COORDINATOR_ADDRESS is not set; set JAX_COORDINATOR_ADDRESS to host:port of "
            "the first process, like node1:8476",
        ),
        (
            {**NAMED, "JAX_PROCESS_ID": "16"},
            "JAX_PROCESS_ID says that this is process 16 of 16; number the processes from 0 to 15",
        ),
        ({**NAMED, "JAX_PROCESS_ID": "-1"}, 'JAX_PROCESS_ID is "-1", which is no number; set it like JAX_PROCESS_ID=4'),
        (
            {**NAMED, "JAX_COORDINATOR_ADDRESS": "node1:http"},
            'JAX_PROCESS_ID says that the first process is at "node1:http", which is no host:port; write it like '
            "JAX_COORDINATOR_ADDRESS=node1:8476",
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"},
            "Open MPI says that this is process 2 of 4, but not where the first one is; type: mpirun -x "
            "JAX_COORDINATOR_ADDRESS=node1:8476 and the rest",
        ),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"},
            "Kubernetes says that this is process 3, but not of how many; set JAX_NUM_PROCESSES and JAX_COORDINATOR_ADDRESS "
            "in the pod, as examples/cluster/jobset.yaml does",
        ),
        (
            {**TPU, "MEGASCALE_NUM_SLICES": "2"},
            "Cloud TPU says that this is slice 0 of 2, but not where the first one is; set MEGASCALE_COORDINATOR_ADDRESS to "
            "the first worker of slice 0",
        ),
    ],
)
def test_membership_that_is_said_by_half_is_told(environment, sentence):
    with pytest.raises(JShardError) as told:
        found(environment)
    assert str(told.value) == sentence


def test_membership_is_local_on_loopback_alone():
    here = [
        Membership(f"{host}:1", 2, 0, "test").is_local
        for host in ("127.0.0.1", "localhost", "[::1]", "10.0.0.1", "node")
    ]
    assert here == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (1, 2)),
        ({"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "2"}, (1, 2)),
        ({"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"}, None),
    ],
)
def test_place_on_a_host_is_what_the_scheduler_says(environment, place):
    assert place_on_host(environment) == place


@pytest.mark.parametrize(
    ("environment", "cards", "taken"),
    [({}, 8, "2,3"), ({}, 4, "1"), ({}, 0, None), ({}, 1, None), ({"JAX_PLATFORMS": "cpu"}, 8, None),
     ({"JAX_LOCAL_DEVICE_IDS": "0"}, 8, None), ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 0, "1"),
     ({"CUDA_VISIBLE_DEVICES": "3"}, 0, None)],
)  # fmt: skip
def test_each_process_of_a_host_takes_its_part_of_the_gpus(environment, cards, taken):
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(cards))), **environment}
    assert cards_of(1, 4, environment).get("JAX_LOCAL_DEVICE_IDS") == taken


def test_gpus_that_can_not_be_shared_out_are_told():
    with pytest.raises(JShardError) as told:
        cards_of(0, 3, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, strict=True)
    assert str(told.value) == (
        "8 GPUs can't be divided evenly among 3 processes; start a number of processes that divides 8, or set "
        "JAX_PLATFORMS=cpu"
    )

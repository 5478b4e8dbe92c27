"""What processes compare over the notes that all can read; here the notes are a dictionary."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import jax
import pytest

from jshard.cli import rank_main as member
from jshard.cli.target import Target
from jshard.errors import JShardError
from jshard.launch import kv_store
from jshard.launch.cluster_env import Membership
from jshard.launch.initialize import pretend_part
from jshard.signals.config import load_configuration


@pytest.fixture
def notes(monkeypatch):
    """`notes[rank]` is told, or "", when all ranks that are in `facts` agree on them: `told(facts, processes)`."""
    written: dict[str, object] = {}
    rank = threading.local()

    def wait(key: str, seconds: float) -> object:
        deadline = time.monotonic() + seconds
        while key not in written and time.monotonic() < deadline:
            time.sleep(0.005)
        return written.get(key)

    monkeypatch.setattr(kv_store, "write", written.__setitem__)
    monkeypatch.setattr(kv_store, "read", wait)
    monkeypatch.setattr(member, "joined", lambda: rank.membership)

    def told(facts: dict[int, dict[str, str]], processes: int) -> list[str]:
        said = dict.fromkeys(facts, "")

        def one(which: int) -> None:
            rank.membership = Membership("127.0.0.1:1", processes, which, "test")
            try:
                member.agree("program", facts[which], hint="fix it", seconds=0.3)
            except JShardError as error:
                said[which] = str(error)

        threads = [threading.Thread(target=one, args=(which,)) for which in facts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return list(said.values())

    return told


def test_processes_that_say_the_same_agree(notes):
    assert notes({0: {"a": "1"}, 1: {"a": "1"}, 2: {"a": "1"}}, 3) == ["", "", ""]


def test_processes_that_differ_are_all_told_which(notes):
    sentence = "rank 2 has another program than rank 0: a is 2, and 1 at rank 0; fix it"
    assert notes({0: {"a": "1"}, 1: {"a": "1"}, 2: {"a": "2"}}, 3) == [sentence] * 3


def test_a_process_that_says_nothing_is_named(notes):
    sentence = "rank 1 has not reported its program within 0.3 s of rank 0; look at the last output of rank 1"
    assert notes({0: {"a": "1"}, 2: {"a": "1"}}, 3) == [sentence] * 2


def test_rank_0_that_says_nothing_is_named(notes):
    sentence = "rank 0 has not reported its program for 0.6 s; look at the last output of rank 0"
    assert notes({1: {"a": "1"}}, 2) == [sentence]


def test_a_mesh_that_leaves_a_process_without_work_is_told(monkeypatch):
    devices = [SimpleNamespace(process_index=number // 2) for number in range(8)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(JShardError) as told:
        member.check_all_have_devices("jshard.mesh (a.yaml:4)", {"data": 4})
    assert str(told.value) == (
        "jshard.mesh (a.yaml:4) takes 4 of 8 devices, and rank 2 has none of them; start 2 processes, or make the mesh larger"
    )
    with pytest.raises(JShardError) as told:
        member.check_all_have_devices("--mesh data=1", {"data": 1, "tensor": 2})
    assert str(told.value) == (
        "--mesh data=1 takes 2 of 8 devices, and rank 1 has none of them; start 1 process, or make the mesh larger"
    )
    member.check_all_have_devices("jshard.mesh (a.yaml:4)", {"data": 8})
    member.check_all_have_devices("jshard.mesh (a.yaml:4)", {"data": -1})


@pytest.mark.parametrize(
    ("devices", "processes", "hint"),
    [
        (8, 3, "start 2 or 4 of them: jshard launch -n 4"),
        (8, 9, "start 8 of them: jshard launch -n 8"),
        (12, 7, "start 6 or 12 of them: jshard launch -n 12"),
    ],
)
def test_devices_that_can_not_be_shared_out_are_told_with_counts_that_divide_them(devices, processes, hint):
    with pytest.raises(JShardError) as told:
        pretend_part(devices, processes)
    assert str(told.value) == f"{devices} devices can't be divided evenly among {processes} processes; {hint}"


def test_a_mesh_that_can_not_be_shared_out_is_named(monkeypatch):
    monkeypatch.setattr(member, "found", lambda: Membership("127.0.0.1:1", 3, 0, "test"))
    with pytest.raises(JShardError) as told:
        member.join(Target("configs/xor.yaml", ()).configuration(), {})
    assert str(told.value) == (
        "the 4 devices of jshard.mesh (configs/xor.yaml:5) can't be divided evenly among 3 processes; start 2 or 4 of them: "
        "jshard launch -n 4"
    )


def test_facts_of_a_configuration_are_its_keys_and_values():
    configuration = load_configuration({"jshard": {"mesh": {"data": 2}}, "a": {"row": "data"}}, ["batch=32"])
    facts = member.facts_of(configuration)
    assert (facts["jshard.mesh.data"], facts["jshard.train.batch"], facts["a.row"]) == ("2", "32", "[data]")

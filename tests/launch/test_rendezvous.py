"""All processes are there and alike, or each of them gets one sentence; here they are threads."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time

import pytest

from jshard.errors import JShardError
from jshard.launch.cluster_env import Membership
from jshard.launch.rendezvous import answer, mismatch
from jshard.launch.supervisor import local

ME = f"process {os.getpid()} on {socket.gethostname()}"
SAME = {
    "installation": {"jax": "0.12", "Python": "3.12"},
    "configuration": {"jshard.train.batch": "64", "layer1.row": "data"},
}


def call(members: list[Membership], facts: dict[int, dict] | None = None, seconds: float = 5.0) -> list[str]:
    """What each member was told; nothing when all was well."""
    said = [""] * len(members)

    def one(at: int) -> None:
        try:
            answer(members[at], (facts or {}).get(at, SAME), seconds)
        except JShardError as error:
            said[at] = str(error)

    threads = [threading.Thread(target=one, args=(at,)) for at in range(len(members))]
    for thread in reversed(threads):  # rank 0 last: the others wait for it to listen
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    return said


def test_roll_call_of_all_alike_says_nothing_and_leaves_the_port():
    members = local(4)
    assert call(members) == [""] * 4
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(members[0].address)


def test_roll_call_of_one_says_nothing():
    assert call(local(1)) == [""]


def test_roll_call_names_the_rank_with_another_yaml_and_the_key():
    other = {**SAME, "configuration": {"jshard.train.batch": "32", "layer1.row": "data"}}
    sentence = (
        "rank 2 has another configuration than rank 0: jshard.train.batch is 32, and 64 at rank 0; start all of them with "
        "the same YAML and the same key=value"
    )
    assert call(local(4), {2: other}) == [sentence] * 4


def test_roll_call_names_the_rank_with_another_version():
    other = {**SAME, "installation": {"jax": "0.10.2", "Python": "3.12"}}
    sentence = "rank 1 has another installation than rank 0: jax is 0.10.2, and 0.12 at rank 0; install the same versions for all of them"
    assert call(local(2), {1: other}) == [sentence] * 2


def test_roll_call_names_who_is_missing_after_the_stated_time():
    began = time.monotonic()
    said = call([member for member in local(4) if member.rank in (0, 1)], seconds=0.6)
    sentence = (
        "ranks 2, 3 of 4 did not start within 0.6 s; start it with --process-id 2, look at its output, or wait longer "
        "with JSHARD_START_TIMEOUT=600"
    )
    assert said == [sentence] * 2
    assert time.monotonic() - began < 5


def test_roll_call_without_rank_0_ends_after_the_stated_time():
    members = local(2)
    sentence = (
        f"rank 0 did not answer rank 1 at {members[0].coordinator} within 0.5 s; start rank 0, look at its output, or "
        "name another --coordinator"
    )
    assert call(members[1:], seconds=0.5) == [sentence]


def test_roll_call_names_a_rank_that_is_there_twice_at_once():
    members = local(3)
    began = time.monotonic()
    said = call([members[0], members[1], members[1]])
    assert said == [f"rank 1 was started twice: {ME} and {ME}; give each process a --process-id of its own"] * 3
    assert time.monotonic() - began < 6


def test_roll_call_names_rank_0_that_is_there_twice():
    members = local(2)
    said = call([members[0], members[0]])
    assert said == [f"rank 0 was started twice: {ME} and {ME}; give each process a --process-id of its own"] * 2


def test_roll_call_names_a_rank_of_another_size():
    members = local(2)
    said = call([members[0], dataclasses.replace(members[1], processes=4)])
    sentence = (
        f"rank 1 ({ME}) was started as one of 4 processes and rank 0 as one of 2; give all of them the same --processes"
    )
    assert said == [sentence] * 2


def test_roll_call_on_a_port_in_use_is_told():
    members = local(2)
    with socket.socket() as other:
        other.bind(members[0].address)
        other.listen()
        host, port = members[0].address
        said = call(members[:1], seconds=0.5)
    sentence = (
        f"port {port}, where rank 0 has to listen, is in use by another program; choose another for all of them: "
        f"--coordinator {host}:{port + 1}"
    )
    assert said == [sentence]


def test_roll_call_goes_on_when_a_stranger_knocks():
    members = local(2)
    said = []
    thread = threading.Thread(target=lambda: said.append(call(members[:1], seconds=10)))
    thread.start()
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"rank": 1}\n', b""):
        while True:
            try:
                with socket.create_connection(members[0].address) as stranger:
                    stranger.sendall(words)
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
    assert call(members[1:]) == [""]
    thread.join()
    assert said == [[""]]


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({0: {"a": "1"}, 1: {"a": "1"}}, None),
        ({0: {"a": "1"}, 1: {"a": "2"}}, "rank 1 has another thing than rank 0: a is 2, and 1 at rank 0"),
        (
            {0: {"a": "2"}, 1: {"a": "1"}, 2: {"a": "1"}},
            "rank 0 has another thing than rank 1: a is 2, and 1 at rank 1",
        ),
        ({0: {"a": "1"}, 1: {}}, "rank 1 has another thing than rank 0: a is not there, and 1 at rank 0"),
        ({0: {}, 1: {"a": "1"}}, "rank 1 has another thing than rank 0: a is 1, and not there at rank 0"),
    ],
)
def test_difference_names_the_one_that_stands_alone(said, sentence):
    assert mismatch("thing", said) == sentence

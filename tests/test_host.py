"""What a host is said to have."""

from __future__ import annotations

import random
import socket

import pytest

from jshard.hardware import host


def test_free_port_is_none_that_is_taken_nor_one_that_a_connection_may_take(monkeypatch):
    with socket.socket() as taken, socket.socket() as connection:
        taken.bind(("127.0.0.1", 0))
        connection.bind(("127.0.0.1", 0))
        assert connection.getsockname()[1] not in host.PORTS
        port = taken.getsockname()[1]
        monkeypatch.setattr(host, "PORTS", range(port, port + 1))
        monkeypatch.setattr(random.SystemRandom, "sample", lambda self, ports, count: list(ports))
        with pytest.raises(OSError, match="are all in use"):
            host.free_port()
    assert host.free_port() == port


@pytest.mark.parametrize(
    ("environment", "count"), [({"CUDA_VISIBLE_DEVICES": "0,2"}, 2), ({"CUDA_VISIBLE_DEVICES": ""}, 0)]
)
def test_nvidia_cards_are_those_that_the_environment_shows(environment, count):
    assert host.nvidia_cards(environment) == count


@pytest.mark.parametrize(
    ("environment", "on_cpus"),
    [
        ({"JAX_PLATFORMS": "cpu"}, True),
        ({"JAX_PLATFORMS": "cpu,tpu"}, True),
        ({"JAX_PLATFORMS": "cuda,cpu"}, False),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, False),
    ],
)
def test_computes_on_cpus_as_jax_is_told_or_by_the_cards(environment, on_cpus):
    assert host.computes_on_cpus(environment) is on_cpus

"""`jshard.testing`: pretended devices and assertions, for programs placed by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jshard
from jshard.errors import JShardError
from jshard.testing import assert_collectives, assert_equal_to_one_device, assert_fits
from tests.support.outside import users_environment

ROOT = Path(__file__).parent.parent


@pytest.fixture
def put():
    """Place an array on a mesh of 2 x 4, with no configuration loaded."""
    jshard.unload()
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    return lambda shape, *spec: jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, P(*spec)))


@pytest.fixture
def args(put):
    return put((16, 32), None, "tensor"), put((32, 16), "tensor", None), put((8, 16), "data", None)


def loss(w1, w2, x):
    return ((jnp.maximum(x @ w1, 0) @ w2) ** 2).mean()


def test_a_program_by_hand_equals_one_device(args):
    assert_equal_to_one_device(loss, *args)


def test_a_constraint_on_a_mesh_of_the_users_own_is_allowed(args):
    where = NamedSharding(args[0].sharding.mesh, P("data", None))

    def constrained(w1, w2, x):
        h = jax.lax.with_sharding_constraint(jnp.maximum(x @ w1, 0), where)
        return ((h @ w2) ** 2).mean()

    assert_equal_to_one_device(constrained, *args)


def test_a_difference_is_an_assertion_with_the_verdict(args):
    def of_the_mesh(w1, w2, x):
        return loss(w1, w2, x) * jshard.mesh().size

    with pytest.raises(AssertionError, match="NOT EQUAL: .* on {data: 2, tensor: 4} and on one device"):
        assert_equal_to_one_device(of_the_mesh, *args)


def test_arguments_on_no_mesh_are_one_sentence():
    jshard.unload()
    with pytest.raises(JShardError, match=r"^the arguments lie on 0 meshes, and one is needed; place one of them by"):
        assert_equal_to_one_device(loss, *(np.ones((4, 4), np.float32),) * 3)


def test_collectives_are_counted_by_kind_and_phase(args):
    assert_collectives(loss, *args, all_gather=0, all_to_all=0)
    assert_collectives(loss, *args, phase="forward", all_reduce=2, wire=2_000)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"all_reduce": 1}, r"2 all_reduce instead of 1:\n.*test_testing\.py:38 "),
        ({"wire": 100}, r"388 B on the wire of a device, and at most 100 are allowed:\n"),
    ],
)
def test_collectives_that_are_too_many_are_listed_with_their_lines(args, asked, says):
    with pytest.raises(AssertionError, match=says):
        assert_collectives(loss, *args, phase="forward", **asked)


def test_a_collective_that_is_none_is_one_sentence(args):
    with pytest.raises(JShardError, match=r'no collective "allreduce"; did you mean "all_reduce"\?$'):
        assert_collectives(loss, *args, allreduce=2)


def test_memory_is_compared_with_a_budget(args):
    assert_fits(loss, *args, topology="cpu:8", budget=2**24)
    with pytest.raises(AssertionError, match=r"B on a device of cpu:8, and 100 are there:\n"):
        assert_fits(loss, *args, topology="cpu:8", budget=100)


@pytest.mark.seconds
def test_the_plugin_pretends_devices_for_a_users_tests(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\njshard_devices = 8\n")
    (tmp_path / "test_mine.py").write_text("import jax\n\n\ndef test_eight():\n    assert len(jax.devices()) == 8\n")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]  # installed, it loads itself
    environment = users_environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr

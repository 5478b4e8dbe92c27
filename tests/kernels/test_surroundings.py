"""Every kernel in every surrounding: copies early and late, remat, scan, vmap, a mesh that is partly the partitioner's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jshard import kernels
from jshard.errors import JShardError
from tests.kernels.conftest import clean
from tests.kernels.test_gpu import lowered
from tests.support import compiled_before

# x[8, 8] on each device, and so the result, but matmul's, which has as many columns as rows of x
OPS = {
    "one_shot": lambda x, algorithm: kernels.all_reduce(x, "t", algorithm=algorithm or "one_shot"),
    "ring": lambda x, algorithm: kernels.all_reduce(x, "t", algorithm=algorithm or "ring"),
    "reduce_scatter": lambda x, algorithm: kernels.reduce_scatter(x, "t", algorithm=algorithm or "ring"),
    "all_gather": lambda x, algorithm: kernels.all_gather(x, "t", algorithm=algorithm or "ring"),
    "matmul": lambda x, algorithm: kernels.matmul(x, x.T, algorithm=algorithm or "pallas"),
}
NAMES = {"one_shot": "all_reduce", "ring": "all_reduce"}


def numbers(n, dtype=np.float32):
    return (np.arange(n * 64) * 7 % 5 - 2).reshape(n * 8, 8).astype(dtype)


def both(mesh, body, n=2, dtype=np.float32):
    """`body(x, op's algorithm)` by the kernel and by XLA."""
    here = mesh(t=n)
    x = jax.device_put(numbers(n, dtype), jax.NamedSharding(here, P("t")))

    def run(algorithm):
        def varied(x):
            y = body(x, algorithm)
            return y if "t" in jax.typeof(y).mat.varying else lax.pcast(y, "t", to="varying")

        return np.asarray(jax.jit(jax.shard_map(varied, mesh=here, in_specs=P("t"), out_specs=P("t")))(x))

    return run(None), run("xla")


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_kernel_is_right_and_clean_however_copies_go(mesh, capsys, copies, name):
    with kernels.interpret(copies=copies), compiled_before.interpreting():
        ours, theirs = both(mesh, OPS[name], n=3 if name in NAMES else 4)
    clean(capsys)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_gradient_under_scan_and_remat_is_that_of_xla(mesh, interpreted, name):
    def body(x, algorithm):
        @jax.checkpoint
        def block(scale, _):
            return scale + OPS[name](x * scale, algorithm).sum(), None

        def loss(x, scale=1.0):
            start = lax.pcast(jnp.float32(scale), "t", to="varying")
            return lax.scan(lambda c, _: block(c, _), start + 0 * x.sum(), None, length=2)[0]

        return jax.grad(lambda x: OPS[name](x, algorithm).sum() + 0 * loss(x))(x) + loss(x)

    ours, theirs = both(mesh, body)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["matmul", "all_gather"])
def test_batch_of_vmap_is_that_of_xla(mesh, interpreted, name):
    ours, theirs = both(
        mesh, lambda x, algorithm: jax.vmap(lambda x: OPS[name](x, algorithm))(jnp.stack([x, 2 * x]))[1]
    )
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", OPS)
def test_mesh_that_is_partly_the_partitioners_is_right_by_auto_and_refused_by_name(mesh, name):
    here = mesh(t=2, d=2, axis_types="auto")
    x = jnp.asarray(numbers(2))

    def run(algorithm):
        def body(x):
            y = OPS[name](x, algorithm)
            return lax.pcast(y, "t", to="varying") if name in NAMES else y

        return jax.jit(jax.shard_map(body, mesh=here, in_specs=P("t"), out_specs=P("t"), axis_names={"t"}))(x)

    np.testing.assert_array_equal(run("auto"), run("xla"))
    if name == "matmul":  # it reaches for nobody
        return
    with pytest.raises(JShardError) as error, kernels.interpret():
        run(None)
    word = name if name in NAMES else "ring"
    assert str(error.value) == (
        f'{NAMES.get(name, name)} can\'t run by "{word}": mesh axis "d" is left to the partitioner, and a kernel reaches '
        'devices by all mesh axes; use algorithm="auto", or a shard_map over every mesh axis'
    )


def test_bfloat16_is_summed_in_float32_and_rounded_once(mesh, interpreted):
    """One more at a time is lost beside 256 in bfloat16; three at once are not."""
    here = mesh(t=4)
    x = np.ones((4, 4, 16), np.float32)
    x[0] = 256
    x = jax.device_put(x.astype(jnp.bfloat16), jax.NamedSharding(here, P("t")))

    def body(x):
        return kernels.reduce_scatter(x[0], "t", algorithm="ring")

    y = jax.jit(jax.shard_map(body, mesh=here, in_specs=P("t"), out_specs=P("t")))(x)
    np.testing.assert_array_equal(y, np.full((4, 16), jnp.bfloat16(259)))
    assert jnp.bfloat16(256) + jnp.bfloat16(1) == 256


def test_semaphore_that_is_left_over_fails_the_test_it_happens_in(capsys):
    print("Semaphore 7 has non-zero count for 0 at kernel exit: 1")
    with pytest.raises(AssertionError, match="non-zero count"):
        clean(capsys)


@pytest.mark.parametrize("chip", ["h100", "b200"])
def test_auto_on_a_gpu_is_psum_to_the_last_word(chip):
    def text(body):
        return [line.split(" loc(")[0] for line in lowered(body, chip, names=("t",)).splitlines()[1:]]

    def varied(y):
        return lax.pcast(y, "t", to="varying")

    auto = text(lambda x: varied(kernels.all_reduce(x, "t")))
    assert auto == text(lambda x: varied(lax.psum(x, "t")))

"""JAX's compilation cache keeps no CPU program whose collectives would come back from it out of order."""

from __future__ import annotations

import jax
import pytest
from jax._src import compilation_cache
from jax.sharding import PartitionSpec as P

from jshard.layouts.mesh import build_mesh


def in_a_loop(x):
    return jax.lax.scan(lambda carried, _: (jax.lax.pmax(carried, "x") / 9, None), x, length=3)[0]


def before_a_loop(x):
    return jax.lax.pmax(x, "x") * 2


def before_and_in_a_loop(x):
    return in_a_loop(x) + before_a_loop(x)


@pytest.fixture
def kept(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield lambda: len(list(tmp_path.glob("*-cache")))
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("program, count", [(in_a_loop, 1), (before_a_loop, 1), (before_and_in_a_loop, 0)])
def test_what_would_lose_its_order_is_compiled_anew(program, count, kept):
    mesh = build_mesh({"x": 8})
    mapped = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
    mapped.lower(jax.ShapeDtypeStruct((8,), "float32", sharding=jax.NamedSharding(mesh, P("x")))).compile()
    assert kept() == count

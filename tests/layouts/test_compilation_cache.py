"""JAX's compilation cache keeps CPU programs such that their collectives come back in order."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache, compiler
from jax.sharding import PartitionSpec as P

from jshard.layouts import compilation_cache as compilation_cache_of_jshard
from jshard.layouts.compilation_cache import keep_in_order
from jshard.layouts.mesh import build_mesh


def around_a_loop(x):
    """Collectives in a loop, and others that don't wait for it."""
    carried = jax.lax.scan(lambda carried, _: (jax.lax.pmax(jnp.sin(carried), "x"), None), x, length=3)[0]
    return carried + jax.lax.psum(x, "x")


@pytest.fixture
def kept(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield lambda: len(list(tmp_path.glob("*-cache")))
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def test_a_program_comes_back_in_order_and_computes_the_same(kept, monkeypatch):
    ordered, before_and_after = compilation_cache_of_jshard.in_order, []

    def spied(program):
        before_and_after.append((program, ordered(program)))
        return before_and_after[-1][1]

    monkeypatch.setattr(compilation_cache_of_jshard, "in_order", spied)
    mesh = build_mesh({"x": 8})
    x = jax.device_put(np.arange(8.0, dtype=np.float32), jax.NamedSharding(mesh, P("x")))
    run = lambda: jax.jit(jax.shard_map(around_a_loop, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))(
        x
    )
    want = run()
    ((before, after),) = before_and_after
    assert kept() == 1 and len(after) > len(before)
    jax.clear_caches()
    for _ in range(20):
        np.testing.assert_array_equal(run(), want)
    assert kept() == len(before_and_after) == 1


def test_programs_of_other_chips_are_kept_as_they_are(monkeypatch):
    written = []
    monkeypatch.setattr(compiler, "_cache_write", lambda *of: written.append(of[4]))
    keep_in_order()
    for platform in ("cpu", "tpu", "METAL"):
        compiler._cache_write("key", 1.0, "name", SimpleNamespace(platform=platform), platform)
    assert written[0].executable == "cpu" and written[1:] == ["tpu", "METAL"]


def test_a_jax_that_writes_otherwise_is_told(monkeypatch, kept):
    monkeypatch.delattr(compiler, "_cache_write")
    with pytest.warns(UserWarning) as told:
        keep_in_order()
    assert [str(each.message) for each in told] == [
        f"jax {jax.__version__} may keep CPU programs that hang when they come back: set JAX_ENABLE_COMPILATION_CACHE=false "
        "where you compute on CPU devices"
    ]
    assert told[0].filename == __file__
    jax.config.update("jax_compilation_cache_dir", None)
    keep_in_order()

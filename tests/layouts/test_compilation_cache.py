"""JAX's compilation cache keeps no CPU program whose collectives would come back from it out of order."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest
from jax._src import compilation_cache, compiler
from jax.sharding import PartitionSpec as P

from jshard.layouts.compilation_cache import keep_only_ordered
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


def test_programs_of_other_chips_are_kept(monkeypatch):
    written = []
    monkeypatch.setattr(compiler, "_cache_write", lambda *of: written.append(of[3].platform))
    keep_only_ordered()
    two = SimpleNamespace(to_string=lambda: "body {\n a = f32[] all-reduce(b)\n}\nmain {\n c = f32[] all-gather(d)\n}")
    for platform in ("cpu", "tpu"):
        program = SimpleNamespace(hlo_modules=lambda: [two])
        compiler._cache_write("key", 1.0, "name", SimpleNamespace(platform=platform), program)
    assert written == ["tpu"]


def test_a_jax_that_writes_otherwise_is_told(monkeypatch, kept):
    monkeypatch.delattr(compiler, "_cache_write")
    with pytest.warns(UserWarning) as told:
        keep_only_ordered()
    assert [str(each.message) for each in told] == [
        f"jax {jax.__version__} may keep CPU programs that hang when they come back: set JAX_ENABLE_COMPILATION_CACHE=false "
        "where you compute on CPU devices"
    ]
    jax.config.update("jax_compilation_cache_dir", None)
    keep_only_ordered()

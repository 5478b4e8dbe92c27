"""The cache of compiled programs may save time, and change nothing that a test sees."""

from __future__ import annotations

import os
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import compiled_before


@pytest.mark.parametrize("name", ["first", "second"])
def test_program_keeps_its_own_names(name):
    """Two programs that differ by a scope alone."""

    def program(x):
        with jax.named_scope(name):
            return jnp.sin(x) * 3.25

    for _ in range(2):  # compiled, and read
        jitted = jax.jit(program)
        jitted(jnp.ones(7))  # by which it has the names of whichever was called first
        assert f"{name}/sin" in jitted.lower(jnp.ones(7)).compile().as_text()
        jax.clear_caches()


def test_programs_of_another_checkout_and_of_another_run_have_the_same_names():
    found, elsewhere = {}, f"{tempfile.gettempdir()}/pytest-of-me/pytest-0/run/a.py"
    for file, name in {__file__: "/tests/test_compiled_before.py", elsewhere: "/run/a.py"}.items():
        exec(compile("def program(x):\n    return x * 3.25", file, "exec"), found)
        text = jax.jit(found["program"]).lower(jnp.ones(7)).as_text(debug_info=True)
        assert f'"{name}"' in text and str(file) not in text


@pytest.mark.parametrize(("read", "count"), [(False, 1), (True, 2)])
def test_programs_that_differ_by_a_scope_are_one_unless_they_can_be_read(read, count, monkeypatch):
    from jax._src import compiler

    keys, found = set(), compiler._cache_read
    monkeypatch.setattr(compiler, "_cache_read", lambda name, key, *of: keys.add(key) or found(name, key, *of))
    x = jax.device_put(np.ones(7))
    for name in ("first", "second"):
        program = jax.jit(jax.named_scope(name)(lambda x: jnp.sin(x) * 3.25))
        _ = program.lower(x).compile() if read else program(x)
    assert len(keys) == count


def test_program_is_the_same_in_a_context_that_was_used_before():
    lowered = []
    for k in range(11):  # others between
        jax.jit(lambda x, k=k: x + k).lower(jnp.ones(k + 1))
        lowered.append(jax.jit(lambda x: jnp.sin(x) * 3.25).lower(jnp.ones(7)))
    assert len({each.as_text(debug_info=True) for each in lowered}) == 1
    assert len({each.compiler_ir().context for each in lowered}) < 11


def test_programs_are_counted_and_those_that_are_a_week_old_go(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled_before, "PLACE", tmp_path)
    now = time.time()
    for name, written in {"new-cache": now, "before-cache": now - 9, "old-cache": 0, "1-2-part": now}.items():
        (tmp_path / name).write_bytes(b"program")
        os.utime(tmp_path / name, (written, written))
    assert compiled_before.count_and_sweep(since=now - 5) == (1, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-2-part", "before-cache", "new-cache"]

"""What is kept of kernels for absent chips: an outcome is read for the same program, chips and variables only, and no failure is kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from compiled_absent import FOLDER, outcome


@pytest.fixture
def compile_for(monkeypatch, tmp_path):
    """How often was it compiled after each question?"""
    monkeypatch.setenv(FOLDER, str(tmp_path / "kept"))
    times = []

    def asked(factor=2, chips="v5e:2x4", made=7, sound=True):
        def compiled():
            times.append(made)
            if made is None:
                raise RuntimeError("too large")
            return made

        program = jax.jit(lambda x: x * factor).lower(jnp.ones(3))
        assert outcome(program, chips, compiled, sound=lambda _: sound) == made
        return len(times)

    return asked


def test_same_program_is_compiled_once(compile_for):
    assert [compile_for(), compile_for(), compile_for()] == [1, 1, 1]


def test_another_program_chip_or_variable_is_compiled_anew(compile_for, monkeypatch):
    assert [compile_for(), compile_for(factor=3), compile_for(chips="v6e:2x4")] == [1, 2, 3]
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--another")
    assert compile_for() == 4


def test_what_fails_or_is_not_sound_is_compiled_anew(compile_for, tmp_path):
    for _ in range(2):
        with pytest.raises(RuntimeError, match="too large"):
            compile_for(made=None)
    assert [compile_for(sound=False), compile_for(sound=False)] == [3, 4]
    assert not (tmp_path / "kept").exists()


def test_all_is_compiled_where_nothing_is_kept(compile_for, monkeypatch):
    monkeypatch.delenv(FOLDER)
    assert [compile_for(), compile_for()] == [1, 2]

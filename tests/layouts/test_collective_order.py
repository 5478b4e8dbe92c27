"""Between a loop that holds collectives and those around it stands what keeps them in order."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache
from jax.sharding import PartitionSpec as P

from jshard.layouts.collective_order import CALL, COLLECTIVE, COPY, SEQUENCES, in_order
from jshard.layouts.mesh import build_mesh
from jshard.protobuf import Message, Unreadable, edited, split_delimited, written


@pytest.fixture(autouse=True)
def compiled_here():
    """What comes out of a cache can't be serialized again."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def sequence_of(program):
    return Message(split_delimited(program)[1]).message(1).message(6)


def thunks_in(sequence):
    """The number of what each thunk is, and that."""
    return [(what, each.message(what)) for each in sequence.messages(1) for what in each.keys() - {1, 2}]


def sequences_below(sequence):
    yield sequence
    for what, thunk in thunks_in(sequence):
        for field in SEQUENCES.get(what, ()):
            for each in thunk.messages(field):
                yield from sequences_below(each)


def buffers(what, thunk):
    """The buffers that collectives in it write."""
    if what == COLLECTIVE:
        return {bytes(each) for each in thunk.message(2).contents(2)}
    inner = (each for field in SEQUENCES.get(what, ()) for each in thunk.messages(field))
    return {buffer for each in inner for of in thunks_in(each) for buffer in buffers(*of)}


def copied(thunk):
    """The buffers that a call copies onto themselves, if it does nothing else."""
    found = []
    for what, copy in thunks_in(thunk.message(1)):
        (source,), (destination,) = copy.contents(1), copy.contents(2)
        assert (what, bytes(source)) == (COPY, bytes(destination))
        found.append(bytes(source))
    return found


def serialized(program):
    mesh = build_mesh({"x": 8})
    mapped = jax.shard_map(program, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    x = jax.device_put(np.arange(32, dtype=np.float32), jax.NamedSharding(mesh, P("x")))
    return jax.jit(mapped).lower(x).compile().runtime_executable().serialize()


def loop(x, length=3):
    return jax.lax.scan(lambda carried, _: (jax.lax.psum(jnp.sin(carried), "x"), None), x, length=length)[0]


def around(x):
    first = jax.lax.psum(x, "x")
    return first - jax.lax.pmax(loop(first) + loop(x, 2), "x")


def in_branches(x):
    either = jax.lax.cond(x[0] > 2, lambda x: jax.lax.pmax(x, "x"), lambda x: loop(jax.lax.pmin(x, "x")), x)
    return either + jax.lax.psum(x, "x")


@pytest.mark.parametrize(("program", "count"), [(around, 3), (in_branches, 2)])
def test_collectives_are_in_order_where_a_sequence_of_thunks_runs_others(program, count):
    before = serialized(program)
    assert not any(what == CALL for each in sequences_below(sequence_of(before)) for what, _ in thunks_in(each))
    after, found = in_order(before), 0
    for sequence in sequences_below(sequence_of(after)):
        thunks = thunks_in(sequence)
        holding = [at for at, (what, thunk) in enumerate(thunks) if what != CALL and buffers(what, thunk)]
        for first, second in itertools.pairwise(holding):
            between = [thunk for what, thunk in thunks[first:second] if what == CALL]
            if thunks[first][0] == thunks[second][0] == COLLECTIVE:  # they share a resource
                assert not between
                continue
            (ordering,), found = between, found + 1
            one, other = copied(ordering)
            assert one in buffers(*thunks[first]) and other in buffers(*thunks[second])
        users = [number for each in sequence.messages(2) for number in each.numbers(1)]
        assert set(users) == set(holding)
    assert found == count


def test_a_program_of_one_sequence_stays_as_it_is():
    before = serialized(lambda x: jax.lax.psum(x, "x") - jax.lax.pmax(x, "x"))
    assert in_order(before) == before


def test_what_it_does_not_know_is_refused():
    other = written(1, b"async") + written(2, b"") + written(23, b"")
    program = written(1, written(6, written(1, other)))
    with pytest.raises(
        Unreadable, match="a thunk of kind async, of which jshard can't tell whether it holds collectives"
    ):
        in_order(b"\x00" + program)
    with pytest.raises(Unreadable, match="a message without field 6"):
        in_order(b"\x00" + edited(program, {1: lambda _: b""}))

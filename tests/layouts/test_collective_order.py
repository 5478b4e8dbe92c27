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
from jshard.programs.protobuf import Message, Unreadable, edited, split_delimited, written


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


def thunk(what, content):
    """As XLA writes it: its kind in words, nothing of where it comes from, and what it is."""
    return written(1, written(1, b"a kind") + written(2, b"") + written(what, content))


def program_of(*sequence):
    return b"\x00" + written(1, written(6, b"".join(sequence)))


def test_who_waits_for_whom_is_told_of_each_resource():
    """Of two, each with two: a collective, one in a loop's condition, one in its body, and one in a call."""
    first, second, third, fourth = (thunk(18, written(2, written(2, each))) for each in (b"1", b"2", b"3", b"4"))
    loop, call = thunk(10, written(1, second) + written(2, third)), thunk(3, written(1, fourth))
    ordering = [
        written(1, written(1, b"call") + written(2, b"") + written(3, written(1, b"".join(
            written(1, written(1, b"copy") + written(2, b"") + written(12, written(1, each) + written(2, each)))
            for each in pair
        ))))
        for pair in ((b"1", b"2"), (b"2", b"4"))
    ]  # fmt: skip
    before = program_of(
        written(2, written(1, b"\0\1")), written(2, written(1, b"\2\3")), first, thunk(5, b""), loop, call
    )
    assert in_order(before) == program_of(
        first, thunk(5, b""), ordering[0], loop, ordering[1], call,
        written(2, written(1, b"\0\1")), written(2, written(1, b"\3\5")),
    )  # fmt: skip


@pytest.mark.parametrize("what", [5, 22])
def test_what_holds_no_collectives_stays(what):
    program = program_of(thunk(what, b""))
    assert in_order(program) == program


def test_what_it_does_not_know_is_refused():
    other = written(1, b"async") + written(2, b"") + written(23, b"")
    program = written(1, written(6, written(1, other)))
    with pytest.raises(
        Unreadable, match="a thunk of kind async, of which jshard can't tell whether it holds collectives"
    ):
        in_order(b"\x00" + program)
    with pytest.raises(Unreadable, match="a message without field 6"):
        in_order(b"\x00" + edited(program, {1: lambda _: b""}))

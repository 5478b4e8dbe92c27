"""Where layers lie while the stages of a pipeline run them: each stage is a row of an array, and nothing is split."""

from __future__ import annotations

from fractions import Fraction

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jshard.layers.partition.stages import Counts, from_chunks, from_stages, in_turn, to_chunks, to_stages
from jshard.programs.jaxprs import equations
from jshard.programs.provenance import said
from tests.support.partitioned import asked

UNEQUAL = Counts((3, 1, 2, 2), 2)


def on_stages(f, *xs):
    return jax.jit(jax.vmap(f, axis_name="stage"))(*xs)


def sent(f, stages, *xs):
    return list(asked(jax.make_jaxpr(f, axis_env=[("stage", stages)])(*(x[0] for x in xs))))


@pytest.mark.quick("1-3", "3-1", "3-2", "4-6")
@pytest.mark.parametrize(("chunks", "stages"), [(1, 3), (3, 1), (2, 2), (2, 4), (4, 2), (3, 2), (4, 6), (6, 4)])
def test_layers_go_to_the_chunks_of_their_stages_and_back(chunks, stages):
    """By one permute for each chunk, and none where they lie there."""
    layers = np.arange(stages * chunks * 2 * 3).reshape(stages, chunks * 2, 3)
    there, back = (lambda x: to_chunks(x, chunks, "stage")), (lambda x: from_chunks(x, "stage"))
    found = on_stages(there, layers)
    np.testing.assert_array_equal(found, layers.reshape(chunks, stages, 2, 3).swapaxes(0, 1))
    np.testing.assert_array_equal(on_stages(back, found), layers)
    permutes = ["ppermute"] * (chunks if min(chunks, stages) > 1 else 0)
    assert sent(there, stages, layers) == sent(back, stages, found) == permutes


def test_counts_say_where_unequal_layers_lie():
    assert (UNEQUAL.longest, UNEQUAL.are_equal, UNEQUAL.starts) == (3, False, [0, 3, 4, 6])
    assert UNEQUAL.rows.tolist() == [[[0, 1, 2], [4, 5, 6]], [[3, 4, 5], [6, 7, 7]]]
    assert UNEQUAL.places.tolist() == [0, 1, 2, 6, 3, 4, 9, 10]
    assert UNEQUAL.by_stage == [Fraction(5, 2), Fraction(3, 2)]
    assert Counts((2, 2), 1).are_equal


@pytest.mark.parametrize("axis", [None, 1, 2])
@pytest.mark.parametrize("counts", [UNEQUAL, Counts((1, 3), 2), Counts((2, 1), 1), Counts((1, 2, 1), 3)], ids=str)
def test_unequal_layers_go_to_their_stages_and_back(counts, axis):
    """By one all-to-all, or by none where each stage has all, and gives zeros back for layers of others."""
    n, stages = sum(counts.layers), counts.stages
    layers = np.arange(1, 1 + n * 6 * 12).reshape(n, 6, 12)
    split = np.stack(np.split(layers, stages, axis) if axis else [layers] * stages)
    there, back = (lambda x: to_stages(x, axis, counts, "stage")), (lambda x: from_stages(x, axis, counts, "stage"))
    found = on_stages(there, split)
    np.testing.assert_array_equal(found, layers[counts.rows])
    stage = np.repeat(np.arange(len(counts.layers)) % stages, counts.layers)[:, None, None]
    expected = split if axis else np.stack([np.where(stage == own, layers, 0) for own in range(stages)])
    np.testing.assert_array_equal(on_stages(back, found), expected)
    moves = ["all_to_all"] * bool(axis and stages > 1)
    assert sent(there, stages, split) == sent(back, stages, found) == moves


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_run_one_after_the_other_and_the_first_has_what_is_carried(stages):
    own = np.arange(2.0, 2 + stages)

    def run(own, x):
        return in_turn(lambda carry: ([carry[0] * own + 1], [carry[0]]), [x], "stage")

    (carried,), (left,) = on_stages(run, own, np.ones(stages))
    before = [1.0]
    for scale in own:
        before.append(before[-1] * scale + 1)
    assert carried.tolist() == [before[-1], *[0] * (stages - 1)]
    assert left.tolist() == before[:-1]


def test_layers_of_a_stage_run_while_the_others_wait():
    """Once, whatever the others hold then. What goes around is told by who asks."""
    runs = []

    def run(x):
        layers = lambda carry: (jax.debug.callback(runs.append, carry[0]), (carry, []))[1]
        return in_turn(layers, [x], "stage", claim="blocks", key="stage")[0][0]

    mesh = jax.make_mesh((2,), ("stage",))
    x = jax.device_put(np.arange(2.0), NamedSharding(mesh, P("stage")))
    program = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("stage"), out_specs=P("stage")))
    program(x)
    jax.effects_barrier()
    assert np.concatenate(runs).tolist() == [0, 0]
    (told,) = (eqn for eqn in equations(jax.make_jaxpr(program)(x)) if eqn.primitive.name == "ppermute")
    assert [said(told.source_info.name_stack.stack, field) for field in ("claim", "key")] == ["blocks", "stage"]

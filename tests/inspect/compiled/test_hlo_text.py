"""Collectives read from compiled text, in every spelling of groups, loops and halves that XLA was seen to use."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jshard.inspect.compiled import collectives_in, wire_bytes
from jshard.inspect.ledger import read
from jshard.programs.provenance import Cause

HEAD = "HloModule jit_f, is_scheduled=true, num_partitions=8\n\n"


def program(*instructions: str, others: str = "") -> str:
    body = "\n".join(f"  {instruction}" for instruction in instructions)
    return f"{HEAD}{others}\nENTRY %main.1 (p: f32[8,4]) -> f32[8,4] {{\n{body}\n}}\n"


def only(text: str):
    (got,) = collectives_in(text)
    return got


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("[2,4]<=[8]", 4),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("mesh['data'=2,'tensor'=4] {'tensor'}", 4),
        ("mesh['data'=2,'tensor'=4] {'data','tensor'}", 8),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_0'}", 2),
        ("mesh['axis_0'=4,'axis_1'=2], device_ids=([2,2,2]T(0,2,1)) {'axis_0':(1)2}", 2),
        ("{}", 8),
    ],
)
def test_group_size_is_read_from_every_spelling(groups, size):
    got = only(program(f"%ar = f32[8,4]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%add"))
    assert (got.collective, got.group, got.payloads) == ("all_reduce", size, (128,))


def test_combined_all_reduce_is_one_instruction_of_several_payloads():
    got = only(
        program(
            "%ar = (f32[], bf16[4,2]{1,0:T(8,128)(2,1)}, /*index=2*/pred[3]{0}) all-reduce(%a, %b, %c), "
            'replica_groups={{0,1}}, to_apply=%add, metadata={op_name="jit(f)/jshard[signal=up]/psum"}'
        )
    )
    assert got.payloads == (4, 16, 3)
    assert got.dtypes == ("f32", "bf16", "pred")
    assert got.total == 4 + 16 + 3
    assert got.causes == (Cause(("up",)),) * 3


def test_start_and_done_count_once():
    text = program(
        "%s = f32[8]{0} all-reduce-start(%p), replica_groups={{0,1}}, to_apply=%add",
        "%d = f32[8]{0} all-reduce-done(%s)",
        "%gs = (f32[4]{0}, f32[8]{0}) all-gather-start(%p), replica_groups={{0,1}}, dimensions={0}",
        "%gd = f32[8]{0} all-gather-done(%gs)",
        "%gs2 = ((f32[4]{0}, f32[2]{0}), (f32[8]{0}, f32[4]{0})) all-gather-start(%p, %q), replica_groups={{0,1}}",
        "%ps = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}",
        "%pd = f32[8]{0} collective-permute-done(%ps)",
    )
    assert [(got.opcode, got.payloads, got.total) for got in collectives_in(text)] == [
        ("all-reduce-start", (32,), 32),
        ("all-gather-start", (32,), 16),
        ("all-gather-start", (32, 16), 24),
        ("collective-permute-start", (32,), 32),
    ]


def test_wrapped_asynchronous_collective_counts_once():
    wrapped = (
        "%wrapped (q: f32[8]) -> f32[4] {\n"
        "  ROOT %rs = f32[4]{0} reduce-scatter(%q), replica_groups={{0,1}}, dimensions={0}, to_apply=%add\n}\n"
    )
    text = program(
        "%s = ((f32[8]{0}), f32[4]{0}, u32[]) async-start(%p), calls=%wrapped",
        "%u = ((f32[8]{0}), f32[4]{0}, u32[]) async-update(%s), calls=%wrapped",
        "%d = f32[4]{0} async-done(%u), calls=%wrapped",
        others=wrapped,
    )
    got = only(text)
    assert (got.collective, got.payloads, got.total) == ("reduce_scatter", (32,), 16)


LOOP = """%body (a: (s32[], f32[8])) -> (s32[], f32[8]) {
  %g = f32[8]{0} all-gather(%a), replica_groups={{0,1}}, dimensions={0}
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %g)
}

%cond (a: (s32[], f32[8])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%outer (a: (s32[], f32[8])) -> (s32[], f32[8]) {
  ROOT %w = (s32[], f32[8]{0}) while(%a), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_loops_multiply_by_their_known_trips():
    text = program(
        "%w = (s32[], f32[8]{0}) while(%t), condition=%cond, body=%outer, "
        'backend_config={"known_trip_count":{"n":"5"}}',
        others=LOOP,
    )
    got = only(text)
    assert (got.count, got.count_known, got.total) == (15, True, 15 * 16)


def test_loop_of_unknown_trips_counts_one_and_says_so():
    text = program("%w = (s32[], f32[8]{0}) while(%t), condition=%cond, body=%outer", others=LOOP)
    got = only(text)
    assert (got.count, got.count_known) == (3, False)


def test_branches_and_calls_are_read():
    text = program(
        "%c = f32[8]{0} conditional(%i, %p, %p), branch_computations={%body, %cond}",
        "%b = f32[8]{0} conditional(%q, %p, %p), true_computation=%body, false_computation=%cond",
        "%k = f32[8]{0} call(%p), to_apply=%body",
        others=LOOP,
    )
    assert [got.total for got in collectives_in(text)] == [16, 16, 16]


def test_all_to_all_in_parts_is_one_payload():
    got = only(program("%a = (f32[4]{0}, f32[4]{0}) all-to-all(%p, %q), replica_groups={{0,4},{1,5}}"))
    assert (got.payloads, got.total) == ((32,), 16)


def test_permute_to_oneself_is_free():
    got = only(program("%a = f32[8]{0} collective-permute(%p), source_target_pairs={{0,0},{1,1}}"))
    assert got.total == 0


def compiled(mesh, body, x, out_specs):
    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("data", "tensor"), out_specs=out_specs))
    x = jax.device_put(x, jax.NamedSharding(mesh, P("data", "tensor")))
    return f.lower(x).compile(), read(jax.make_jaxpr(f)(x))


def test_cpu_emits_reduce_scatter_as_such(mesh):
    def body(x):
        return lax.psum_scatter(x, "tensor", scatter_dimension=0, tiled=True)

    program, ledger = compiled(mesh(data=2, tensor=4), body, np.ones((8, 8), np.float32), P(("data", "tensor")))
    got = only(program)
    assert (got.opcode, got.group, got.payloads) == ("reduce-scatter", 4, (32,))
    assert got.total == ledger.total == 24


def test_cpu_carries_bfloat16_reductions_as_float32(mesh):
    """Twice the bytes that were asked: true of XLA for CPU only. float16 and integers travel as they are."""
    for dtype, factor in ((jnp.bfloat16, 2), (np.float16, 1), (np.int8, 1)):
        program, ledger = compiled(
            mesh(data=2, tensor=4), lambda x: lax.psum(x, "tensor"), np.ones((8, 8), dtype), P("data")
        )
        assert wire_bytes(program) == factor * ledger.total


def test_unreadable_group_is_not_passed_over():
    with pytest.raises(AssertionError, match="a spelling of replica_groups that jshard does not know"):
        collectives_in(program("%ar = f32[8]{0} all-reduce(%p), replica_groups=??, to_apply=%add"))

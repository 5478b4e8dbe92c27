"""The algorithm that is selected, why, and the sentence of one that can't run."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jshard import kernels
from jshard.algorithms import ALGORITHMS
from jshard.errors import JShardError
from jshard.kernels import chip as chips
from jshard.kernels.select_algorithm import TABLE
from tests.kernels.test_lowering import lowered


@pytest.mark.parametrize(
    ("op", "kib", "group", "chip", "algorithm", "reason"),
    [
        ("all_reduce", 64, 8, "cpu", "xla", "a CPU has no links for a kernel to drive"),
        ("all_reduce", 64, 1, "v5e", "xla", "a group of one moves nothing"),
        ("all_reduce", 256, 8, "h200", "xla", "no figure says that a kernel beats XLA's own, or NCCL's, on a GPU"),
        ("all_reduce", 9000, 4, "h100", "xla", "no figure says that a kernel beats XLA's own, or NCCL's, on a GPU"),
        ("all_reduce", 64, 8, "a100", "xla", "no figure says that a kernel beats XLA's own, or NCCL's, on a GPU"),
        ("all_gather", 64, 8, "h200", "xla", "no figure says that a kernel beats XLA's own, or NCCL's, on a GPU"),
        ("all_gather_matmul", 64, 8, "b200", "xla", "no figure says that a kernel beats XLA's own, or NCCL's, on a GPU"),
        ("matmul", 64, 1, "b200", "xla", "no figure says that a kernel beats XLA's own, or NCCL's, on a GPU"),
        ("matmul", 64, 1, "a100", "xla", "no figure says that a kernel beats XLA's own, or NCCL's, on a GPU"),
        ("matmul", 64, 1, "h200", "xla", "no figure says that a kernel beats XLA's own, or NCCL's, on a GPU"),
        ("all_reduce", 64, 8, "v5e", "xla", "no figure says that a kernel beats XLA's own on this chip"),
        ("matmul", 64, 1, "v5p", "xla", "no figure says that a kernel beats XLA's own on this chip"),
        (
            "all_gather_matmul", 64, 16, "v6e", "permute",
            "the wire runs under the product; XLA does not overlap them inside a shard_map",
        ),
        ("reduce_scatter", 64, 8, "v5e", "xla", "no figure says that a kernel beats XLA's own on this chip"),
        (
            "reduce_scatter", 41, 2, "v5e", "in_order",
            "XLA runs a scatter of parts of no whole tiles as an all-reduce, of twice the bytes",
        ),
        ("matmul_reduce_scatter", 64, 128, "tpu7x", "xla", "no figure says that a kernel beats XLA's own on this chip"),
        ("all_gather_matmul", 63, 8, "v5p", "xla", "no figure says that a kernel beats XLA's own on this chip"),
    ],
)  # fmt: skip
def test_choice_is_that_of_the_table(op, kib, group, chip, algorithm, reason):
    choice = kernels.choose(op, shape=(kib, 256), dtype="float32", group=group, chip=chip)
    assert (choice.algorithm, choice.reason) == (algorithm, reason)


@pytest.mark.parametrize(
    ("group", "how", "algorithm"),
    [
        (16, {}, "xla"), (16, {"of_all": True}, "permute"), (8, {"of_all": True}, "xla"),
        (8, {"beside_work": True}, "permute"), (1, {"beside_work": True}, "xla"),
    ],
)  # fmt: skip
def test_a_scatter_on_tpus_goes_by_permutes_over_a_whole_slice_and_where_work_hides_it(group, how, algorithm):
    for chip in ("v5e", "v5p", "v6e"):
        given = {"shape": (64, 256), "dtype": "float32", "group": group, "chip": chip, **how}
        assert kernels.choose("reduce_scatter", **given).algorithm == algorithm
        gathers = algorithm if chip != "v5e" and "beside_work" in how else "xla"  # a v5e's gathers run beside work
        assert kernels.choose("all_gather", **given).algorithm == gathers
    assert kernels.choose("reduce_scatter", **given | {"chip": "h100"}).algorithm == "xla"


@pytest.mark.parametrize(
    ("chip", "group", "shape", "how", "algorithm"),
    [
        ("v5e", 256, (8, 16, 128), {}, "torus"),
        ("v5e", 256, (8, 8, 128), {"beside_work": True}, "torus"),  # half a tile
        ("v5e", 256, (16, 2048), {}, "torus"), ("v5e", 256, (16, 2176), {}, "xla"),  # 16 MiB in all, and more
        ("v5e", 64, (128, 1024), {}, "torus"), ("v5e", 64, (128, 1088), {}, "xla"),
        ("v5e", 32, (8, 16, 128), {}, "xla"), ("v5e", 256, (8, 128), {}, "in_order"), ("v5e", 256, (16, 64), {}, "in_order"),
        ("v5e", 256, (8, 16, 128), {"of_all": False}, "xla"),
        ("v6e", 64, (8, 16, 128), {}, "torus"), ("v6e", 64, (8, 16, 128), {"beside_work": True}, "permute"),
        ("v5p", 64, (4096, 8192), {}, "torus"), ("v5p", 32, (16, 2048), {}, "xla"),
    ],
)  # fmt: skip
def test_a_gather_over_all_of_a_slice_that_xla_would_run_as_a_sum_goes_along_the_torus(
    chip, group, shape, how, algorithm
):
    given = {"shape": shape, "dtype": "bfloat16", "group": group, "chip": chip, "of_all": True, **how}
    assert kernels.choose("all_gather", **given).algorithm == algorithm


def test_beside_work_a_scatter_goes_by_permutes_whatever_its_tiles_but_a_small_one():
    """Eight key heads of 128 in bfloat16 are half a tile, a norm's scale is 256 bytes."""
    found = [
        kernels.choose(
            "reduce_scatter", shape=shape, dtype="bfloat16", group=16, chip="v5e", beside_work=True
        ).algorithm
        for shape in ((128, 8, 128), (128,))
    ]
    assert found == ["permute", "in_order"]


def test_every_row_of_the_table_has_a_source_and_some_use(monkeypatch):
    monkeypatch.setattr(sys.modules["jshard.kernels.select_algorithm"], "between_processes", lambda: True)
    reached = set()
    for op in ALGORITHMS:
        for chip in [*chips.CHIPS.values(), chips.Chip("other", "gpu"), chips.Chip("odd", "metal")]:
            for group, how in itertools.product((1, 2, 4, 8, 64, 1024), ({}, {"of_all": True}, {"beside_work": True})):
                for kib in (1, 300, 3000, 10_000, 1 << 20):
                    reached.add(kernels.choose(op, shape=(kib, 1024), dtype="int8", group=group, chip=chip, **how))
            reached.add(kernels.choose(op, shape=(8, 1 << 15), dtype="bfloat16", group=8, chip=chip))
    assert all(row.choice.source and row.choice.reason for row in TABLE)
    assert reached == {row.choice for row in TABLE}


def test_choice_says_its_source():
    assert str(kernels.choose("all_reduce", shape=(4,), dtype="float32", group=8, chip="NVIDIA H200")) == (
        "xla: no figure says that a kernel beats XLA's own, or NCCL's, on a GPU (docs/kernels.md)"
    )


def test_auto_on_a_cpu_is_psum_to_the_last_word_of_its_hlo(mesh):
    here = mesh(t=8)
    x = jax.ShapeDtypeStruct((8, 5), np.float32, sharding=jax.NamedSharding(here, P("t")))

    def text(f):
        def body(x):
            return f(x)

        return jax.jit(jax.shard_map(body, mesh=here, in_specs=P("t"), out_specs=P())).lower(x).as_text()

    assert text(lambda x: kernels.all_reduce(x, "t")) == text(lambda x: lax.psum(x, "t"))

    def product(gather_and_multiply):
        def body(x):
            w = x.T
            return gather_and_multiply(x, w)

        return jax.jit(jax.shard_map(body, mesh=here, in_specs=P("t"), out_specs=P("t"))).lower(x).as_text()

    plain = product(lambda x, w: lax.all_gather(x, "t", tiled=True) @ w)
    assert body_of(product(lambda x, w: kernels.all_gather_matmul(x, w, "t"))) == body_of(plain)


def body_of(text):
    return [line.split(" loc(")[0] for line in text.splitlines()[1:]]


def test_auto_on_a_tpu_multiplies_while_permutes_travel_but_where_w_has_three_axes():
    def text(shape, dtype, op=kernels.all_gather_matmul):
        return lowered(lambda x: op(x, jnp.ones((512, *shape), x.dtype), "t"), (8 * 128, 512), dtype, {"t": 8})

    for dtype in ("float32", "bfloat16", "float16", "int8"):
        assert "collective_permute" in text((3,), dtype)
        assert "all_gather" not in text((3,), dtype)
    assert "collective_permute" not in text((3, 2), "float32") and "all_gather" in text((3, 2), "float32")
    assert "collective_permute" in text((3,), "float32", kernels.matmul_reduce_scatter)
    assert "tpu_custom_call" not in lowered(lambda x: kernels.all_reduce(x, "t"), (16, 128), "float32", {"t": 8})


@pytest.mark.seconds
@pytest.mark.usefixtures("fresh")
def test_plain_use_imports_neither_pallas_nor_flax():
    program = (
        "import sys, jax, jax.numpy as jnp\nfrom jshard import kernels\n"
        "mesh = jax.make_mesh((1,), ('t',), axis_types=(jax.sharding.AxisType.Auto,))\n"
        "f = lambda x: kernels.all_gather_matmul(kernels.all_reduce(x, 't'), x.T, 't')\n"
        "jax.jit(jax.shard_map(f, mesh=mesh, in_specs=jax.P(), out_specs=jax.P('t')))(jnp.ones((2, 3)))\n"
        "print(sorted(m for m in ('flax', 'jax.experimental.pallas') if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


# -- what is refused --


def refused(mesh, f, *, dtype="float32", interpreted=True, shape=(8, 8), sizes=None, **more):
    here = mesh(**(sizes or {"t": 8}))
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=jax.NamedSharding(here, P("t")))
    run = jax.shard_map(f, mesh=here, in_specs=P("t"), out_specs=P("t"), **more)
    with pytest.raises(JShardError) as error:
        if interpreted:
            with kernels.interpret():
                jax.make_jaxpr(run)(x)
        else:
            jax.make_jaxpr(run)(x)
    return str(error.value)


def by(algorithm, **more):
    return lambda x: kernels.all_reduce(x, "t", algorithm=algorithm, **more)


def test_forced_choice_that_can_not_run_says_why(mesh):
    assert refused(mesh, by("ring"), interpreted=False) == (
        'all_reduce can\'t run by "ring": its kernel drives a TPU, and this is cpu; '
        'use algorithm="auto", or try it in kernels.interpret()'
    )
    assert refused(mesh, by("ring"), dtype="float16") == (
        'all_reduce can\'t run by "ring": its kernel takes float32, bfloat16, int32, int8, and x is float16; '
        'cast x, or use algorithm="auto"'
    )
    assert refused(mesh, by("torus")) == (
        'all_reduce can\'t run by "torus": a torus has several mesh axes, and "t" is one; use algorithm="ring"'
    )
    assert refused(mesh, by("one_shot"), shape=(8, 4 << 20)) == (
        'all_reduce can\'t run by "one_shot": 16,777,216 bytes from each of 8 devices need 167,772,160 bytes of VMEM, '
        'and there are 12,582,912; use algorithm="ring"'
    )
    assert refused(mesh, by("ring", op="max")) == (
        'all_reduce can\'t run by "ring": a kernel adds, and takes no max; use algorithm="auto"'
    )
    assert refused(mesh, by("rign")) == 'all_reduce has no algorithm "rign"; did you mean "ring"?'
    assert refused(mesh, by("nccl")) == (
        'all_reduce has no algorithm "nccl"; use one of "auto", "hierarchical", "in_order", "one_shot", "permute", "ring", "torus", "xla"'
    )


def test_mesh_axis_left_to_the_partitioner_is_refused_and_auto_is_not(mesh):
    assert refused(mesh, by("ring"), sizes={"t": 4, "d": 2}, axis_names={"t"}) == (
        'all_reduce can\'t run by "ring": mesh axis "d" is left to the partitioner, and a kernel reaches devices by all '
        'mesh axes; use algorithm="auto", or a shard_map over every mesh axis'
    )
    here = mesh(t=4, d=2, axis_types="auto")
    run = jax.shard_map(by("auto"), mesh=here, in_specs=P("t"), out_specs=P(), axis_names={"t"})
    np.testing.assert_array_equal(jax.jit(run)(np.arange(4.0)), 6)


def test_axis_of_vmap_is_refused(mesh):
    def f(x):
        return jax.vmap(lambda x: kernels.all_reduce(x, "v", algorithm="ring"), axis_name="v")(x)

    assert refused(mesh, f, sizes={"t": 2}) == (
        'all_reduce can\'t run by "ring": "v" is an axis of jax.vmap, and its kernel reaches along mesh axes only; '
        'use algorithm="auto"'
    )


def test_ring_that_is_too_long_is_refused():
    with pytest.raises(JShardError) as error:
        lowered(by("ring"), (256, 128), "float32", {"t": 128})
    assert str(error.value) == (
        'all_reduce can\'t run by "ring": a ring of 128 needs more semaphores than a TPU has, which is enough for 64; '
        'use algorithm="torus" over several mesh axes'
    )


def test_products_that_a_kernel_can_not_take_are_refused(mesh):
    def gather(w, **more):
        return lambda x: kernels.all_gather_matmul(x, jnp.ones(*w), "t", algorithm="permute", **more)

    def product(w):
        return lambda x: kernels.matmul(x, jnp.ones(*w), algorithm="pallas")

    assert refused(mesh, gather(((8, 3, 2),))) == (
        'all_gather_matmul can\'t run by "permute": it takes a w of two axes, and w is (8, 3, 2); use algorithm="auto"'
    )
    prefix = 'matmul can\'t run by "pallas": '
    assert refused(mesh, product(((8, 3, 2),))) == (
        f'{prefix}its kernel takes a w of two axes, and w is (8, 3, 2); use algorithm="auto"'
    )
    assert refused(mesh, product(((8, 3), jnp.bfloat16))) == (
        f"{prefix}its kernel takes operands of equal dtype, and x is float32 and w bfloat16; cast one of them"
    )
    assert refused(mesh, product(((8, 3), jnp.int32)), dtype="int32") == (
        f'{prefix}its kernel takes float32, bfloat16, int8, and x is int32; cast x, or use algorithm="auto"'
    )
    assert refused(mesh, gather(((8, 3),), axis=1)) == (
        "all_gather_matmul joins axis 1 of x(1, 8), but the product sums over that axis; use axis=0"
    )
    assert refused(mesh, gather(((7, 3),))) == (
        "all_gather_matmul of x(1, 8) and w(7, 3): the last axis of x does not match the first of w; "
        "use a w with as many rows as x has columns"
    )
    assert refused(mesh, lambda x: kernels.matmul(x, x.T, activation="gleu")) == (
        'matmul has no activation "gleu"; did you mean "gelu"?'
    )
    with pytest.raises(JShardError) as error:
        lowered(lambda x: kernels.matmul(x, x.T, algorithm="pallas"), (8, 8), "int8", {"t": 8}, chip="v4")
    assert str(error.value) == (
        'matmul can\'t run by "pallas": its kernel takes float32, bfloat16 on v4, and x is int8; '
        'cast x, or use algorithm="auto"'
    )


def test_names_that_are_not_there_are_refused():
    for call, sentence in [
        (
            lambda: kernels.choose("all_reduc", shape=(), dtype="int8", group=2),
            'jshard has no kernel "all_reduc"; did you mean "all_reduce"?',
        ),
        (lambda: chips.chip("v6"), 'jshard knows no chip "v6"; did you mean "v6e"?'),
        (lambda: chips.chip("abacus"), f'jshard knows no chip "abacus"; use one of {", ".join(chips.CHIPS)}'),
    ]:
        with pytest.raises(JShardError) as error:
            call()
        assert str(error.value) == sentence

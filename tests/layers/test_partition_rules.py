"""Each rule of the partition: an operation on parts equals the operation on whole arrays, in value and gradient, however its
operands are split."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import jshard
from jshard.errors import JShardError
from jshard.layers import partition
from jshard.layers.partition.program import RULES
from jshard.layouts.axes import factors
from jshard.layouts.layout import Layout
from jshard.programs.jaxprs import bare, equations
from jshard.signals.claims import Claim

rng = np.random.default_rng(0)


def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)


def below(end, *shape):
    return rng.integers(0, end, shape).astype(np.int32)


@jax.custom_vjp
def doubled_backward(x):
    return jnp.sin(x).sum(0)


doubled_backward.defvjp(lambda x: (jnp.sin(x).sum(0), x), lambda x, ct: (2 * jnp.cos(x) * ct,))


def conv(x, w, *, strides=(1, 1), padding="SAME", groups=1, batches=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w, strides, padding, dimension_numbers=numbers, feature_group_count=groups, batch_group_count=batches
    )


def added_to_part(x, u):
    """Add to the first elements of some rows: no place says where a window begins."""
    return lax.scatter_add(x, jnp.arange(0, 8, 2)[:, None], u, lax.ScatterDimensionNumbers((1,), (0,), (0,)))


def beyond_the_end(x, y, at):
    return lax.dynamic_slice(x, (0, at[0]), (8, 2)) + y, lax.dynamic_update_slice(x, x[:3, :2] * 2, (at[1], at[0]))


def pooled(x, start, reduce):
    return lax.reduce_window(x, start, reduce, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def attention(q, k, v):
    scores = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), jnp.einsum("bthd,bshd->bhts", q, k), -1e9)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)


THREE = [
    lambda x, w: jnp.sin(x @ w),
    lambda x, w: x.sum(0) + x,
    lambda x, w: jnp.cos(x.mean()) * x + w.sum(1),
]  # each sums


def loss(x, targets):
    return -jnp.take_along_axis(jax.nn.log_softmax(x), targets[:, None], axis=1).mean()


def extremes(one, other):
    return jnp.minimum(one[0], other[0]), jnp.maximum(one[1], other[1])


def decomposed(x):
    values = jnp.abs(lax.stop_gradient(jnp.linalg.eigvals(x))).sum(-1)
    symmetric = x @ jnp.swapaxes(x, -1, -2) + jnp.eye(2, dtype=x.dtype)
    r, sign = jnp.linalg.qr(x)[1], jnp.linalg.slogdet(x)[1]
    return (
        values,
        jnp.linalg.cholesky(symmetric),
        jnp.linalg.eigvalsh(symmetric),
        jnp.linalg.svdvals(x),
        jnp.abs(r),
        sign,
    )


def drawn(x):
    one, other = jax.random.split(
        jax.random.wrap_key_data(jax.random.key_data(jax.random.fold_in(jax.random.key(0), 1)))
    )
    return x * jax.random.gamma(one, jnp.abs(x) + 1), jax.random.normal(jax.random.clone(other), x.shape)


X, HEADS, IMAGE = normal(4, 8), normal(2, 4, 4, 8), normal(4, 4, 4, 8)
MATRICES = normal(4, 2, 2) + 2 * np.eye(2, dtype=np.float32)
CASES = {
    "add": (lambda x, b: jnp.sin(x + b), X, normal(8)),
    "argmax": (lambda x: jnp.argmax(x, 1), X),
    "argmin and maximum so far": (lambda x: (jnp.argmin(x, 0), lax.cummax(x, 1), lax.cummin(x), lax.cumprod(x, 1), lax.cumlogsumexp(x)), X),
    "attention": (attention, HEADS, normal(2, 4, 4, 8), normal(2, 4, 4, 8)),
    "batched lookup": (loss, X, below(8, 4)),
    "bits, of several numbers": (lambda x: lax.bitcast_convert_type(x, jnp.float32), normal(4, 8).view(np.uint8).reshape(4, 8, 4)),
    "bits, in several numbers": (lambda x: lax.bitcast_convert_type(x, jnp.uint8), X),
    "bits, joined": (lambda x: [f.reduce(x, 0) for f in (jnp.bitwise_or, jnp.bitwise_and, jnp.bitwise_xor)], below(99, 8, 4)),
    "branch of three": (lambda x, w, at: [lax.switch(n, THREE, x, w) for n in at], X, normal(8, 8), np.array([2, 0, 1], np.int32)),
    "branch": (lambda x: lax.cond(x.sum() > 0, jnp.sin, lambda x: x.T.reshape(4, 8), x), X),
    "checkpoint": (lambda x, w: jax.checkpoint(lambda x, w: jnp.sin(x @ w) @ w.T)(x, w), X, normal(8, 8)),
    "clip": (lambda x: jnp.clip(x, -0.5, 0.5), X),
    "complex, largest": (lambda x, y: (lax.complex(x, y).max(0), jnp.real(lax.complex(x, y).min())), X, normal(4, 8)),
    "concatenate": (lambda x, y: jnp.concatenate([x, y], 1), X, normal(4, 8)),
    "convolution": (conv, IMAGE, normal(3, 3, 8, 4)),
    "convolution, batch groups": (lambda x, w: conv(x, w, batches=2), IMAGE, normal(3, 3, 8, 4)),
    "convolution, depthwise": (lambda x, w: conv(x, w, groups=8), IMAGE, normal(3, 3, 1, 8)),
    "convolution, grouped": (lambda x, w: conv(x, w, strides=(2, 2), padding="VALID", groups=4), IMAGE, normal(3, 3, 2, 16)),
    "multiply": (lambda x, y: x * y, normal(8, 4), normal(8, 4)),
    "cumsum": (lambda x: jnp.cumsum(x, 1), X),
    "cumulated from the end": (lambda x: [f(x, 0, reverse=True) for f in (lax.cumsum, lax.cummax, lax.cumlogsumexp)], X),
    "custom derivative": (lambda x: jax.nn.relu(x) + jax.nn.silu(x), np.maximum(X, 0)),
    "custom reverse derivative": (doubled_backward, X),
    "beta": (lambda x: jax.scipy.special.betainc(2.0, 3.0, jax.nn.sigmoid(x)), X),
    "diagonal": (jnp.diagonal, normal(8, 8)),
    "dropout": (lambda x: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0), X),
    "dynamic slice": (lambda x, at: lax.dynamic_slice(x, (0, at[0]), (4, 2)), X, below(6, 1)),
    "dynamic slice, beyond the end": (beyond_the_end, normal(8, 8), normal(8, 2), np.array([7, 4], np.int32)),
    "dynamic update": (lambda x, u, at: lax.dynamic_update_slice(x, u, (0, at[0], 0)), normal(4, 8, 4), normal(4, 1, 4), below(8, 1)),
    "embedding": (lambda table, at: table[at], normal(8, 4), below(8, 4, 8)),
    "embedding, beyond its end": (lambda table, at: jnp.take(table, at, axis=0, fill_value=3.0), normal(8, 4), below(12, 4, 8)),
    "empty": (lambda x: jnp.where(x > 9e9, jnp.empty_like(x), x), X),
    "extremes": (lambda x: lax.reduce((lax.stop_gradient(x),) * 2, (jnp.inf, -jnp.inf), extremes, (1,)), X),
    "fft": (lambda x: jnp.abs(jnp.fft.rfft(x)), X),
    "linear algebra": (decomposed, MATRICES),
    "linear system": (jnp.linalg.solve, MATRICES, normal(4, 2, 2)),
    "loop": (lambda x: lax.fori_loop(0, 3, lambda _, x: jnp.sin(x @ jnp.ones((8, 8), x.dtype)), x), X),
    "max and min": (lambda x: (x.max(0), x.min(1), x.max()), X),
    "one hot": (lambda at: jax.nn.one_hot(at, 8), below(8, 4)),
    "outer": (jnp.outer, normal(4), normal(8)),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 2))), X),
    "pool": (lambda x: (pooled(x, -jnp.inf, lax.max), pooled(x, 0.0, lax.add)), IMAGE),
    "ordered": (lambda x: lax.optimization_barrier(jnp.sin(x)), X),
    "ordered, together": (lambda x, y: lax.optimization_barrier((jnp.sin(x), jnp.cos(y))), X, normal(8, 4)),
    "product": (lambda x, w: x @ w, X, normal(8, 16)),
    "product of numbers": (lambda x: jnp.prod(x, 1), X),
    "random numbers": (drawn, X),
    "put off, joined": (lambda x, b: x * jnp.concatenate([jnp.broadcast_to(b, (4, 4)), jnp.ones((4, 4))], 1)[:, ::-1], X, normal(4)),
    "put off, cut": (lambda x, b: x * jnp.stack(jnp.split(jnp.broadcast_to(b, (4, 16)), 2, 1), 1)[:, 1], X, normal(16)),
    "reshape, joined": (lambda x: x.reshape(32), X),
    "reshape, mixed": (lambda x: x.reshape(12, 8), normal(8, 12)),
    "reshape, in another order": (lambda x: (x.ravel(order="F"), lax.reshape(x, (4, 4, 4), (2, 0, 1)), x.reshape(4, 16, order="F")), normal(4, 2, 8)),
    "reshape, split": (lambda x: x.reshape(4, 2, 4), X),
    "positions": (lambda table, x: table[jnp.broadcast_to(jnp.arange(4), (8, 4))] * x, normal(4, 8), normal(8, 4, 8)),
    "row by its own place": (lambda x, at: x[at, jnp.arange(8)[:, None], jnp.arange(2)[None]], normal(4, 8, 2, 4), below(4, 8, 2)),
    "row by another place": (lambda x, at: x[lax.select(jnp.arange(4) != 0, 3 - jnp.arange(4), jnp.arange(4)), at], X, below(8, 4)),
    "row that is not there": (lambda x, at: x.at[jnp.arange(8), at].get(mode="clip"), X, below(8, 8)),
    "reversed": (lambda x: x[:, ::-1], X),
    "rms norm": (lambda x, scale: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale, X, normal(8)),
    "scan": (lambda x, w: lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, w), X, normal(3, 8, 8)),
    "scan, one turn": (lambda x, u, w: lax.scan(lambda c, w: (jnp.tanh(c @ w) @ u, jnp.sin(c)), x, w), X, normal(8, 8), normal(1, 8, 8)),
    "scan, from zero": (lambda x: lax.scan(lambda c, x: (c + x, c * 2), jnp.zeros(8), x), X),
    "scatter": (lambda x, u: x.at[jnp.array([0, 2])].set(u), normal(8, 4), normal(2, 4)),
    "scatter-add": (lambda x, at, u: x.at[at].add(u), normal(8, 4), below(8, 8), normal(8, 4)),
    "scatter, multiplied": (lambda x, u: (x.at[jnp.array([0, 2])].mul(u), x.at[jnp.array([0, 2])].max(u), x.at[jnp.array([0, 2])].min(u)), normal(8, 4), normal(2, 4)),
    "scatter, of a part of each row": (added_to_part, normal(8, 8), normal(4, 2)),
    "scatter, subtracted": (lambda x, at, u: x.at[at].subtract(u), normal(8, 4), below(8, 8), normal(8, 4)),
    "searched": (lambda x: jnp.searchsorted(jnp.arange(4.0), x), X),
    "slice": (lambda x: (x[:, 1:5], x[:, ::2]), X),
    "slice, moved along": (lambda x: (x[:, 4:], x[2:, :16:2], x[:, 3:11], x[:, 3:3]), normal(4, 24)),
    "slice, of little": (lambda x: (x[:, 2], x[:, 1:4], x[:, 3:8], x[:, 3:10], x[:, 3:16]), normal(4, 24)),
    "slice, of one": (lambda x: (x[:, 0], x[:, -1:, 1:3], x[1] > 0, x[:, 1:8:4]), normal(4, 8, 4)),
    "split in three": (lambda x: [jnp.sin(piece) for piece in jnp.split(x, 3, 1)], normal(4, 24)),
    "split unevenly": (lambda x: jnp.split(x, [2, 10], 1), normal(4, 24)),
    "some and all": (lambda x: ((x > 0).all(1), (x > 0).any(0)), X),
    "some places": (lambda x, at: [jnp.take(x, at[:some], 1) for some in (8, 1, 3, 4)], normal(4, 24, 4), below(24, 8)),
    "sort, and added": (lambda x: x + jnp.sort(x, 1), X),
    "sort": (lambda x: jnp.sort(x, 1), X),
    "sort, by two keys": (lambda x, y: lax.sort((jnp.round(x), y), dimension=0, num_keys=2, is_stable=False), X, normal(4, 8)),
    "split and stack": (lambda x: jnp.stack(jnp.split(x, 2, 1), 1), X),
    "tile": (lambda x: jnp.tile(x, (2, 1)), X),
    "top k": (lambda x: (lax.top_k(x, 2)[0], lax.top_k(x, 2, axis=0)[0]), X),
    "three diagonals": (lambda *args: lax.linalg.tridiagonal_solve(*args), normal(8, 4), normal(8, 4) + 5, normal(8, 4), normal(8, 4, 4)),
    "transpose": (lambda x: jnp.transpose(x, (2, 0, 1)), normal(4, 8, 2)),
    "triangle": (jnp.tril, normal(8, 8)),
    "variance": (lambda x: (x.var(0), x.std(1)), X),
    "while": (lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1], X),
}  # fmt: skip
NOT_DIFFERENTIABLE = {"bits, in several numbers", "scatter, multiplied", "three diagonals", "while"}


LONG = {"argmin and maximum so far", "attention", "linear algebra", "random numbers", "some places"}


def splits(args, sizes) -> Iterator[tuple]:
    """Each axis of each array by itself over each mesh axis that divides it; then all arrays at once."""
    whole = [((),) * np.ndim(x) for x in args]
    yield tuple(whole)
    every = list(whole)
    for number, x in enumerate(args):
        for axis, name in itertools.product(range(np.ndim(x)), sizes):
            if x.shape[axis] % sizes[name] == 0:
                one = tuple((name,) if at == axis else () for at in range(np.ndim(x)))
                yield (*whole[:number], one, *whole[number + 1 :])
                every[number] = one
    yield tuple(every)


def placed(mesh, x, axes):
    return jax.sharding.reshard(x, Layout(mesh, *axes).sharding)


@pytest.mark.quick(*[f"{case}-2x4" for case in CASES if case not in LONG][::8])
@pytest.mark.parametrize(
    "sizes", [{"data": 2, "tensor": 4}, {"data": 8}], ids=lambda sizes: "x".join(map(str, sizes.values()))
)
@pytest.mark.parametrize("case", CASES)
def test_each_rule_equals_the_operation_on_whole_arrays(mesh, case, sizes):
    f, *args = CASES[case]
    ways = dict.fromkeys(splits(args, sizes))
    on, jaxpr = mesh(**sizes), jax.make_jaxpr(f)(*args)
    smooth = [] if case in NOT_DIFFERENTIABLE else [at for at, x in enumerate(args) if x.dtype == np.float32]

    def value_and_gradient(g, args):
        def floats_and_all(*some):
            given = list(args)
            for at, x in zip(smooth, some, strict=True):
                given[at] = x
            results = jax.tree.leaves(g(*given))
            return [y for y in results if jnp.issubdtype(y.dtype, jnp.floating)], results

        if not smooth:
            return jax.tree.leaves(g(*args)), ()
        floats, pull, results = jax.vjp(floats_and_all, *(args[at] for at in smooth), has_aux=True)
        weights = [np.cos(np.arange(y.size)).astype(y.dtype).reshape(y.shape) for y in floats]
        gradients = pull(
            [jax.sharding.reshard(w, jax.typeof(y).sharding) for w, y in zip(weights, floats, strict=True)]
        )
        return results, gradients

    programs = {way: partition.Program(on, jaxpr, [partition.Input(axes) for axes in way]) for way in ways}
    assert not any(program.unruled for program in programs.values())

    @jax.jit
    def all_of_them(*args):
        each = {
            way: value_and_gradient(p, [placed(on, x, axes) for x, axes in zip(args, way, strict=True)])
            for way, p in programs.items()
        }
        return value_and_gradient(f, args), [each[way] for way in ways]

    with jax.set_mesh(on):
        dense, parts = jax.device_get(
            all_of_them(*(jax.device_put(x, Layout(on, *((),) * x.ndim).sharding) for x in args))
        )
    for way, each in zip(ways, parts, strict=True):
        for want, got in zip(jax.tree.leaves(dense), jax.tree.leaves(each), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=str(way))


@pytest.mark.quick(20)
@pytest.mark.parametrize("case", CASES)
def test_gradients_lie_as_their_arrays_do(mesh, case):
    """Traced alone: no program is compiled."""
    f, *args = CASES[case]
    on, jaxpr = mesh(data=2, tensor=4), jax.make_jaxpr(f)(*args)
    smooth = tuple(at for at, x in enumerate(args) if x.dtype == np.float32)
    if case in NOT_DIFFERENTIABLE or not smooth:
        return
    *_, way = splits(args, {"data": 2, "tensor": 4})
    program = partition.Program(on, jaxpr, [partition.Input(axes) for axes in way])
    given = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=Layout(on, *a).sharding) for x, a in zip(args, way, strict=True)
    ]

    def scalar(*args):
        return sum((jnp.sum(y) for y in program(*args) if jnp.issubdtype(y.dtype, jnp.floating)), jnp.zeros(()))

    with jax.set_mesh(on):
        gradients = jax.eval_shape(jax.grad(scalar, argnums=smooth), *given)
    for at, gradient in zip(smooth, gradients, strict=True):
        assert Layout.from_sharding(gradient.sharding, gradient.ndim).axes == way[at]


REDUCED = {  # operands split like this cost these collectives forward, of so many bytes each
    ("product", (((), ("tensor",)), (("tensor",), ()))): [("psum", 256)],
    ("product", ((("data",), ()), ((), ("tensor",)))): [],
    ("product", ((("data",), ("tensor",)), (("tensor",), ()))): [("psum", 128)],
    ("embedding", ((("tensor",), ()), (("data",), ()))): [("psum", 256)],
    ("row by its own place", (((), ("data",), (), ()), (("data",), ()))): [],
    ("rms norm", (((), ("tensor",)), (("tensor",),))): [("psum", 16)],
    ("batched lookup", (((), ("tensor",)), ((),))): [("pmax", 16), ("psum", 16), ("psum", 16)],
    ("reshape, split", (((), ("data",)),)): [],
    ("ordered, together", ((("data",), ("tensor",)), (("tensor",), ("data",)))): [],
    ("put off, joined", ((("data",), ("tensor",)), ((),))): [],
    ("concatenate", (((), ("tensor",)), ((), ("tensor",)))): [("all_to_all", 32)] * 2,
    ("multiply", ((("data",), ()), (("data", "tensor"), ()))): [],
    ("reshape, joined", (((), ("data",)),)): [("all_to_all", 64)],
    ("slice, of one", (((), ("tensor",), ()),)): [("psum", 64), ("psum", 32), ("all_to_all", 128)],
    ("slice, of little", (((), ("tensor",)),)): [("psum", 16), ("psum", 48), ("all_to_all", 96)],
    ("slice, of little", ((("data",), ("tensor",)),)): [("psum", 8), ("psum", 24), ("psum", 40), ("psum", 56), ("all_gather_invariant", 48)],
    ("slice, moved along", ((("data",), ("tensor",)),)): [("ppermute", 24), ("all_gather_invariant", 48), ("all_gather_invariant", 96), ("ppermute", 16), ("ppermute", 16)],
    ("put off, cut", (((), ()), (("tensor",),))): [("all_gather_invariant", 16)],
    ("some places", ((("data",), ("tensor",), ()), ((),))): [("psum", size) for size in (256, 32, 96, 128)],
    ("some places", (((), ("tensor",), ()), ((),))): [("all_to_all", 384), ("psum", 64), ("psum", 192)],
    ("scatter", (((), ("tensor",)), ((), ("tensor",)))): [],
    ("scatter", ((("data",), ("tensor",)), (("data",), ("tensor",)))): [("all_gather_invariant", 16), ("all_gather_invariant", 4)],
    ("scatter-add", (((), ("tensor",)), (("data",),), (("data",), ("tensor",)))): [("psum", 32)],
    ("scatter-add", ((("data",), ("tensor",)), (("data",),), (("data",), ("tensor",)))): [("all_gather_invariant", 16)] * 3,
    ("sort", (((), ("tensor",)),)): [("all_to_all", 32)],
    ("sort", ((("tensor",), ("data",)),)): [("all_gather_invariant", 16)],
    ("sort, and added", (((), ("tensor",)),)): [("all_to_all", 32)],
    ("split in three", (((), ("tensor",)),)): [("ppermute", 32)] * 2,  # of the six that it has each device keeps two
    ("sort", ((("data",), ()),)): [],
    ("triangle", ((("data",), ("tensor",)),)): [],
    ("convolution", ((("data",), (), (), ()), ((), (), (), ("tensor",)))): [],
    ("convolution", (((), (), (), ("tensor",)), ((), (), ("tensor",), ()))): [("psum", 1024)],
}  # fmt: skip


COLLECTIVES = "psum psum_invariant pmax pmin all_gather all_gather_invariant all_to_all reduce_scatter ppermute".split()


def asked_for(on, case, way):
    """The collectives of one operation, and the bytes that a device has in each."""
    f, *args = CASES[case]
    program = partition.Program(on, jax.make_jaxpr(f)(*args), [partition.Input(axes) for axes in way])
    given = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=Layout(on, *a).sharding) for x, a in zip(args, way, strict=True)
    ]
    with jax.set_mesh(on):
        traced = jax.make_jaxpr(program)(*given)
    return [
        (eqn.primitive.name.replace("psum_invariant", "psum"), math.prod(v.aval.shape) * v.aval.dtype.itemsize)
        for eqn in equations(traced)
        if eqn.primitive.name in COLLECTIVES
        for v in eqn.invars[:1]
    ]


@pytest.mark.parametrize(("case", "way"), REDUCED, ids=lambda x: x if isinstance(x, str) else "")
def test_a_rule_asks_for_no_collective_but_these(mesh, case, way):
    assert asked_for(mesh(data=2, tensor=4), case, way) == REDUCED[case, way]


@pytest.mark.seconds
def test_nothing_is_summed_or_gathered_over_one_device(mesh):
    for case, way in [*REDUCED, ("argmin and maximum so far", ((("tensor",), ()),))]:
        found = {name for name, _ in asked_for(mesh(data=1, tensor=1), case, way)}
        assert found <= {"all_to_all", "ppermute"}, (case, way)  # of what moves, and costs nothing


@pytest.mark.parametrize("inside", [lambda f: f, jax.checkpoint], ids=["", "of a checkpoint"])
def test_rows_of_positions_are_made_where_they_are_needed(mesh, inside):
    """So that the gradient of the table is summed, and not that of each row gathered."""
    f, table, x = CASES["positions"]
    on = mesh(data=8)
    program = partition.Program(
        on, jax.make_jaxpr(inside(f))(table, x), [partition.Input(((), ())), partition.Input((("data",), (), ()))]
    )
    given = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=Layout(on, "data", None, None).sharding)
    with jax.set_mesh(on):
        traced = jax.make_jaxpr(jax.grad(lambda table, x: program(table, x)[0].sum()))(table, given)
    names = [eqn.primitive.name for eqn in equations(traced)]
    assert not [name for name in names if "gather" in name and name != "gather"]
    assert sum("psum" in name for name in names) == 1


def started(start, scale, x):
    """What a recurrent model starts from: alike in each row, normalized before it meets one, and looked at by heads."""
    state = jnp.broadcast_to(start, x.shape)
    normal = state * lax.rsqrt(jnp.mean(state * state, -1, keepdims=True) + 1e-6) * scale
    heads = lambda x: x.reshape(8, 4, 4, 2)
    return state + x, jnp.einsum("bqhd,bkhd->bhqk", heads(x), heads(normal))


def test_a_broadcast_of_parameters_is_split_as_it_will_be_needed(mesh):
    """So that the gradients of parameters are summed, and not those of each row and head gathered."""
    on, claims = (
        mesh(data=2, tensor=4),
        jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 4}}, "a": {"row": "data", "match": ["**"]}}),
    )
    args = normal(1, 1, 8), normal(8), normal(8, 4, 8)
    claim = Claim(claims.signals["a"], "**")
    inputs = [partition.Input(claim=claim, path=name) for name in ("start", "scale")]
    program = partition.Program(
        on, jax.make_jaxpr(started)(*args), [*inputs, partition.Input((("data",), (), ("tensor",)))]
    )
    layouts = ((None,) * 3, (None,), ("data", None, "tensor"))
    given = [jax.device_put(x, Layout(on, *axes).sharding) for x, axes in zip(args, layouts, strict=True)]

    def step(f):
        return jax.value_and_grad(lambda *args: sum(jnp.sin(y).sum() for y in f(*args)), argnums=(0, 1))

    with jax.set_mesh(on):
        traced = jax.make_jaxpr(step(program))(*given)
        got = jax.jit(step(program))(*given)
    for one, other in zip(*map(jax.tree.leaves, (got, step(started)(*args))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    moved = [(eqn.primitive.name, math.prod(v.aval.shape)) for eqn in equations(traced) for v in eqn.invars[:1]]
    assert [size for name, size in moved if name.startswith("all_gather")] == [2, 2]  # a device's part of each gradient
    assert (
        max(size for name, size in moved if name.startswith("psum")) == 4 * 4
    )  # one number for each token of a device


def scaled(scale, variance, x):
    return x * (lax.rsqrt(jnp.expand_dims(variance, 0) + 1e-6) * scale.reshape(1, 8))


def spread(scale, variance, x):
    return x[:, None] * (jnp.broadcast_to(variance, (4, 8)) * jnp.broadcast_to(scale, (4, 8)))


@pytest.mark.parametrize(
    ("scaled", "words", "sums"), [(scaled, {}, [8]), (scaled, {"store": "data"}, [8, 8]), (spread, {}, [8, 8])]
)
def test_what_all_devices_have_meets_before_it_varies(mesh, scaled, words, sums):
    """So that one gradient is summed, that of the product: a BatchNorm would have one sum more. What is stored is scattered, and
    what is larger than all that it is made of is not summed."""
    loaded = jshard.load({"jshard": {"mesh": {"data": 8}}, "a": {"row": "data", **words, "match": ["**"]}})
    claim, on = Claim(loaded.signals["a"], "**"), mesh(data=8)
    args = normal(8), below(9, 8) + 1.0, normal(8, 8)
    program = partition.Program(
        on,
        jax.make_jaxpr(scaled)(*args),
        [partition.Input(claim=claim, path="scale"), partition.Input(((),)), partition.Input((("data",), ()))],
    )
    given = [jax.device_put(x, Layout(on, *at).sharding) for x, at in zip(args, program.in_axes, strict=True)]
    step = lambda f: jax.grad(lambda *args: jnp.sin(jax.tree.leaves(f(*args))[0]).sum(), argnums=(0, 1))
    traced = jax.make_jaxpr(step(program))(*given)
    found = [e for e in equations(traced) if "psum" in e.primitive.name or e.primitive.name == "reduce_scatter"]
    assert [math.prod(e.invars[0].aval.shape) for e in found if e.invars[0].aval.shape] == sums
    for one, other in zip(jax.jit(step(program))(*given), step(scaled)(*args), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def householder(x):
    return jnp.sin(lax.linalg.householder_product(x, jnp.ones(8)))


def test_a_primitive_without_a_rule_is_an_error_unless_a_signal_allows_it(mesh):
    on = mesh(data=8)
    jaxpr = jax.make_jaxpr(householder)(normal(8, 8))
    assert factors(bare(jaxpr).eqns[1]) is None
    assert "householder_product" not in RULES
    with pytest.raises(JShardError) as error:
        partition.Program(on, jaxpr, [partition.Input((("data",), ()))])
    line = householder.__code__.co_firstlineno + 1
    assert str(error.value) == (
        f"test_partition_rules.py:{line} calls householder_product, for which jshard.shard has no rule, on an array (8, 8) that is split over "
        "data, nearest to any signal; write allow: [householder_product] under that signal, to have the array gathered there, "
        "or axis_types: auto under jshard, to leave the program to XLA"
    )
    whole = partition.Program(on, jaxpr, [partition.Input(((), ()))])  # nothing moves
    assert whole.unruled == {"householder_product": 1}
    words = {"row": "data", "store": "data", "allow": ["householder_product"], "match": ["**"]}
    claim = Claim(jshard.load({"jshard": {"mesh": {"data": 8}}, "a": words}).signals["a"], "**")
    allowed = partition.Program(on, jax.make_jaxpr(lambda w, x: householder(x * w))(normal(8), normal(8, 8)),
                      [partition.Input(((),), claim, "w"), partition.Input((("data",), ()))])  # fmt: skip
    given = [
        jax.device_put(x, Layout(on, *at).sharding)
        for x, at in zip((normal(8), normal(8, 8)), allowed.in_axes, strict=True)
    ]
    gathers = [e for e in equations(jax.make_jaxpr(allowed)(*given)) if "all_gather" in e.primitive.name]
    assert [e.invars[0].aval.shape for e in gathers] == [
        (1,),
        (1, 8),
    ]  # what is stored, and what the primitive is given


def test_a_parameter_that_is_not_known_is_an_error_unless_a_signal_allows_it(mesh):
    """As one that a newer JAX has: the rule does not know what it does to axes."""
    traced = jax.make_jaxpr(lambda x: lax.sort(x, dimension=1))(X)
    (eqn,) = traced.jaxpr.eqns
    newer = eqn.replace(params={**eqn.params, "descending": True})
    jaxpr = traced.replace(jaxpr=traced.jaxpr.replace(eqns=[newer]))
    assert factors(newer) is None
    with pytest.raises(JShardError) as error:
        partition.Program(mesh(data=4), jaxpr, [partition.Input((("data",), ()))])
    assert str(error.value).split(" calls ")[1] == (
        "sort with descending, which jshard.shard does not know, on an array (4, 8) that is split over data, nearest to any "
        "signal; write allow: [sort] under that signal, to have the array gathered there, or axis_types: auto under jshard, to "
        "leave the program to XLA"
    )


def mapped(x):
    auto = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(lambda x: lax.pmean(x, "data"), mesh=auto, in_specs=jax.P("data"), out_specs=jax.P())(x)


def kernel(x):
    return pl.pallas_call(lambda x, y: y.__setitem__(..., x[...]), out_shape=jax.typeof(x), interpret=True)(x)


@pytest.mark.parametrize(("f", "primitive"), [(mapped, "shard_map"), (kernel, "pallas_call")])
def test_a_shard_map_or_kernel_of_the_models_own_is_one_sentence(mesh, f, primitive):
    jaxpr = jax.make_jaxpr(f)(normal(8))
    with pytest.raises(JShardError) as error:
        partition.Program(mesh(data=8), jaxpr, [partition.Input((("data",),))])
    line = f.__code__.co_firstlineno + (2 if f is mapped else 1)
    assert str(error.value) == (
        f"test_partition_rules.py:{line} calls {primitive}, which has collectives and devices of its own; give the model "
        "its path without it, or write axis_types: auto under jshard, to leave the program to XLA"
    )

"""The table of what primitives do to axes, read as one reads einops: a letter for each factor, its size and kind after `where`."""

from __future__ import annotations

import string
import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jshard.layouts.axes import factors, spread
from jshard.programs.jaxprs import equations


def written(eqn):
    found = factors(eqn)
    order = list(dict.fromkeys(f for array in (*found.operands, *found.results) for axis in array for f in axis))
    letter = dict(zip(order, string.ascii_lowercase, strict=False))

    def arrays(each):
        return ", ".join(" ".join("".join(letter[f] for f in axis) or "1" for axis in array) or "()" for array in each)

    kinds = (f"{letter[f]}{found.sizes[f]}" + (f":{found.kinds[f]}" if found.kinds[f] != "kept" else "") for f in order)
    return " ".join(f"{arrays(found.operands)} -> {arrays(found.results)} where {' '.join(kinds)}".split())


def whole(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def convolution(**groups):
    return lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **groups
    )


def looked_up(table, at, sizes=(2, 3)):
    numbers = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,))
    return lax.gather(table, at, numbers, sizes)


def added_in(window, inserted, together=(), of=()):
    numbers = lax.ScatterDimensionNumbers(window, inserted, (0,), together, of)
    return lambda table, at, updates: lax.scatter_add(table, at, updates, numbers)


def grouped(x, w, sizes):
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return lax.ragged_dot_general(x, w, sizes, numbers)


def along_rows(table, at):
    return jnp.take_along_axis(table, at, axis=1)


def pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID")


KEY = jax.eval_shape(lambda: jax.random.key(0))
TABLE = [
    ("mul", lax.mul, [(2, 3), (2, 3)], "a b, a b -> a b where a2 b3"),
    ("mul", lambda x, y: x * y, [(2, 3), (3,)], "a b, 1 b -> a b where a2 b3"),
    ("mul", lambda x, y: x * y, [(2, 3), (2, 1)], "a b, a 1 -> a b where a2 b3"),
    ("mul", lambda x, y: x * y, [(0, 3), (1, 3)], "a b, 1 b -> a b where a0 b3"),
    ("add", lambda x: x + 1, [(2, 3)], "a b, () -> a b where a2 b3"),
    ("clamp", lambda x: lax.clamp(0.0, x, 1.0), [(2, 3)], "(), a b, () -> a b where a2 b3"),
    ("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (4, 2, 3), (1, 2)), [(2, 1)], "a 1 -> b a c where a2 b4 c3"),
    ("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (0, 3), (0, 1)), [(1, 3)], "1 a -> b a where a3 b0"),
    ("reshape", lambda x: x.reshape(8, 3), [(2, 4, 3)], "a b c -> ab c where a2 b4 c3"),
    ("reshape", lambda x: x.reshape(2, 2, 1, 6), [(4, 1, 6)], "ab 1 c -> a b 1 c where a2 b2 c6"),
    ("reshape", lambda x: x.reshape(12, 1, 10), [(2, 6, 10)], "a b c -> ab 1 c where a2 b6 c10"),
    ("reshape", lambda x: x.reshape(4, 6), [(6, 4)], "ab c -> ad e where a2 b3:fixed c4:fixed d2:fixed e6:fixed"),
    ("reshape", lambda x: x.reshape(3, 4), [(2, 6)], "a b -> c d where a2:fixed b6:fixed c3:fixed d4:fixed"),
    ("reshape", lambda x: x.reshape(5, 4, 6), [(5, 6, 4)],
     "a bc d -> a be f where a5 b2 c3:fixed d4:fixed e2:fixed f6:fixed"),
    ("reshape", lambda x: x.reshape(1, 1), [(1,)], "1 -> 1 1 where"),
    ("reshape", lambda x: x.reshape(0, 3), [(3, 0)], "a b -> ac d where a3 b0:fixed c0:fixed d3:fixed"),
    ("reshape", lambda x: x.reshape(3, 0), [(0, 3)], "ab c -> a d where a3 b0:fixed c3:fixed d0:fixed"),
    ("reshape", lambda x: x.reshape(2, 0, 3), [(2, 3, 0)],
     "a b c -> a bd e where a2 b3 c0:fixed d0:fixed e3:fixed"),
    ("reshape", lambda x: lax.reshape(x, (8, 3), (1, 0, 2)), [(4, 2, 3)], "a b c -> ba c where a4 b2 c3"),
    ("reshape", lambda x: x.ravel(order="F"), [(2, 3)], "a b -> ba where a2 b3"),
    ("reshape", lambda x: lax.reshape(x, (4, 6), (1, 0)), [(4, 6)], "a bc -> bd e where a4:fixed b2 c3:fixed d2:fixed e6:fixed"),
    ("transpose", lambda x: lax.transpose(x, (2, 0, 1)), [(2, 3, 4)], "a b c -> c a b where a2 b3 c4"),
    ("squeeze", lambda x: lax.squeeze(x, (0, 2)), [(1, 2, 1, 3)], "a b c d -> b d where a1 b2 c1 d3"),
    ("reduce_sum", lambda x: x.sum((0, 2)), [(2, 3, 4)], "a b c -> b where a2:sum b3 c4:sum"),
    ("reduce_max", lambda x: x.max(1), [(2, 3)], "a b -> a where a2 b3:max"),
    ("reduce_min", lambda x: x.min(1), [(2, 3)], "a b -> a where a2 b3:min"),
    ("reduce_or", lambda x: (x > 0).any(1), [(2, 3)], "a b -> a where a2 b3:max"),
    ("reduce_and", lambda x: (x > 0).all(1), [(2, 3)], "a b -> a where a2 b3:min"),
    ("reduce_prod", lambda x: x.prod(1), [(2, 3)], "a b -> a where a2 b3:fixed"),
    ("argmax", lambda x: jnp.argmax(x, 1), [(2, 3)], "a b -> a where a2 b3:fixed"),
    ("dot_general", lambda x, w: lax.dot_general(x, w, (((2,), (1,)), ((0,), (2,)))), [(2, 3, 4), (5, 4, 2)],
     "a b c, d c a -> a b d where a2 b3 c4:sum d5"),
    ("conv_general_dilated", convolution(), [(2, 8, 7, 4), (3, 5, 4, 6)],
     "a b c d, e f d g -> a h i g where a2 b8:fixed c7:fixed d4:sum e3:fixed f5:fixed g6 h8:fixed i7:fixed"),
    ("conv_general_dilated", convolution(feature_group_count=2), [(2, 8, 8, 4), (3, 3, 2, 6)],
     "a b c de, f g e dh -> a i j dh where a2 b8:fixed c8:fixed d2 e2:sum f3:fixed g3:fixed h3 i8:fixed j8:fixed"),
    ("conv_general_dilated", convolution(batch_group_count=2), [(4, 8, 8, 3), (3, 3, 3, 6)],
     "ab c d e, f g e ah -> b i j ah where a2 b2 c8:fixed d8:fixed e3:sum f3:fixed g3:fixed h3 i8:fixed j8:fixed"),
    ("cumsum", lambda x: jnp.cumsum(x, 1), [(2, 3)], "a b -> a c where a2 b3:fixed c3:fixed"),
    ("sort", lambda x, y: lax.sort((x, y), dimension=1), [(2, 3), (2, 3)],
     "a b, a c -> a d, a e where a2 b3:fixed c3:fixed d3:fixed e3:fixed"),
    ("rev", lambda x: lax.rev(x, (0, 2)), [(2, 3, 4)], "a b c -> d b e where a2:fixed b3 c4:fixed d2:fixed e4:fixed"),
    ("concatenate", lambda x, y: lax.concatenate([x, y], 1), [(2, 3), (2, 4)],
     "a b, a c -> a d where a2 b3:fixed c4:fixed d7:fixed"),
    ("split", lambda x: lax.split(x, (1, 2), 1), [(2, 3)], "a b -> a c, a d where a2 b3:fixed c1:fixed d2:fixed"),
    ("slice", lambda x: x[:, 1:3], [(2, 4)], "a b -> a c where a2 b4:fixed c2:fixed"),
    ("dynamic_slice", lambda x, at: lax.dynamic_slice(x, (0, at), (2, 3)), [(2, 4), whole()],
     "a b, (), () -> a c where a2 b4:fixed c3:fixed"),
    ("dynamic_update_slice", lambda x, y, at: lax.dynamic_update_slice(x, y, (0, at)), [(2, 4), (2, 3), whole()],
     "a b, a c, (), () -> a d where a2 b4:fixed c3:fixed d4:fixed"),
    ("pad", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 0, 0), (0, 0, 1))), [(2, 3, 4)],
     "a b c, () -> a d e where a2 b3:fixed c4:fixed d4:fixed e7:fixed"),
    ("tile", lambda x: lax.tile(x, (2, 1)), [(2, 3)], "a b -> c b where a2:fixed b3 c4:fixed"),
    ("top_k", lambda x: lax.top_k(x, 2), [(2, 3)], "a b -> a c, a d where a2 b3:fixed c2:fixed d2:fixed"),
    ("fft", jnp.fft.rfft, [(2, 3, 4)], "a b c -> a b d where a2 b3 c4:fixed d3:fixed"),
    ("fft", jnp.fft.rfft2, [(2, 3, 4)], "a b c -> a d e where a2 b3:fixed c4:fixed d3:fixed e3:fixed"),
    ("eigh", lambda x: lax.linalg.eigh(x, symmetrize_input=False), [(5, 3, 3)],
     "a b c -> a d e, a f where a5 b3:fixed c3:fixed d3:fixed e3:fixed f3:fixed"),
    ("reduce_window_max", pool, [(2, 4, 3)], "a b c -> a d c where a2 b4:fixed c3 d2:fixed"),
    ("select_and_scatter_add", jax.grad(lambda x: pool(x).sum()), [(2, 4, 3)],
     "a b c, a d c -> a e c where a2 b2:fixed c3 d4:fixed e4:fixed"),
    ("gather", lambda table, at: table[at], [(8, 4), whole(2, 3)],
     "a b, c d e -> c d b where a8:lookup b4 c2 d3 e1:fixed"),
    ("gather", lambda table, at: table[:, at], [(8, 4), whole(2, 3)],
     "a b, c d e -> a c d where a8 b4:lookup c2 d3 e1:fixed"),
    ("gather", along_rows, [(8, 4), whole(8, 3)], "a b, a c d -> a c where a8 b4:lookup c3 d1:fixed"),
    ("gather", looked_up, [(8, 4), whole(5, 1)],
     "a b, c d -> c e f where a8:fixed b4:fixed c5 d1:fixed e2:fixed f3:fixed"),
    ("gather", lambda table, at: looked_up(table, at, (0, 4)), [(8, 4), whole(5, 1)],
     "a b, c d -> c e b where a8:fixed b4 c5 d1:fixed e0:fixed"),
    ("gather", lambda x, at: lax.dynamic_slice(x, (at[0], 0), (8, 4))[at], [(8, 4), whole(1)],
     "a b, c d -> c b where a8:lookup b4 c1 d1:fixed"),
    ("scatter-add", lambda table, at, y: table.at[at].add(y), [(8, 4), whole(5), (5, 4)],
     "a b, c d, c b -> a b where a8:lookup b4 c5:sum d1:fixed"),
    ("scatter-add", lambda table, at, y: table.at[:, at].add(y), [(8, 4), whole(5), (8, 5)],
     "a b, c d, a c -> a b where a8 b4:lookup c5:sum d1:fixed"),
    ("scatter-add", added_in((1, 2), ()), [(8, 4), whole(5, 1), (5, 2, 3)],
     "a b, c d, c e f -> a b where a8:fixed b4:fixed c5:sum d1:fixed e2:fixed f3:fixed"),
    ("scatter-add", added_in((1,), (0,)), [(8, 4), whole(5, 1), (5, 2)],
     "a b, c d, c e -> a b where a8:lookup b4:fixed c5:sum d1:fixed e2:fixed"),
    ("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.uint8), [(2, 3)], "a b -> a b c where a2 b3 c4:fixed"),
    ("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.int32), [(2, 3)], "a b -> a b where a2 b3"),
    ("reduce_or", lambda x: lax.reduce_or(x, [1]), [whole(2, 3)], "a b -> a where a2 b3:fixed"),
    ("ragged_dot_general", lambda x, w, n: lax.ragged_dot(x, w, n), [(8, 4), (3, 4, 5), whole(3)],
     "a b, c b d, e -> a d where a8:fixed b4:sum c3:fixed d5 e3:fixed"),
    ("ragged_dot_general", lambda x, w, n: jax.vmap(lax.ragged_dot)(x, w, n), [(2, 8, 4), (2, 3, 4, 5), whole(2, 3)],
     "a b c, a d c e, a f -> a b e where a2 b8:fixed c4:sum d3:fixed e5 f3:fixed"),
    ("ragged_dot_general", grouped, [(8, 4), (8, 5), whole(3)], "a b, a c, d -> e b c where a8:fixed b4 c5 d3:fixed e3:fixed"),
    ("scatter-add", jax.grad(lambda table, at: along_rows(table, at).sum()), [(8, 4), whole(8, 3)],
     "a b, a c d, a c -> a b where a8 b4:lookup c3:sum d1:fixed"),
    ("scatter-add", added_in((), (0,), (1,), (0,)), [(4, 8), whole(8, 3, 1), (8, 3)],
     "a b, b c d, b c -> a b where a4:lookup b8 c3:sum d1:fixed"),
    ("iota", lambda: lax.broadcasted_iota(jnp.int32, (2, 3), 1), [], "-> a b where a2 b3"),
    ("random_bits", lambda key: jax.random.bits(key, (2, 3)), [KEY], "() -> a b where a2 b3"),
    ("random_fold_in", lambda keys: jax.vmap(lambda key: jax.random.fold_in(key, 1))(jax.random.split(keys, 3)), [KEY],
     "a, () -> b where a3:fixed b3"),
    ("optimization_barrier", lambda x, y: lax.optimization_barrier((x, y)), [(2, 3), (4,)], "a b, c -> a b, c where a2 b3 c4"),
    ("stack", lambda x, y: jnp.stack([x, y], 1), [(2, 3), (2, 3)], "a b, a b -> a c b where a2 b3 c2:fixed"),
    ("stack", lambda x: jnp.stack([x]), [(2, 3)], "a b -> c a b where a2 b3 c1:fixed"),
    ("unstack", lambda x: jnp.unstack(x), [(1, 2)], "a b -> b where a1:fixed b2"),
    ("unstack", lambda x: jnp.unstack(x, axis=1), [(2, 3)], "a b -> a, a, a where a2 b3:fixed"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "f", "given", "expected"), TABLE, ids=[f"{row[0]}-{row[3].split(' where')[0]}" for row in TABLE]
)
def test_each_primitive_keeps_its_axes_as_the_table_says(name, f, given, expected):
    args = [jax.ShapeDtypeStruct(each, jnp.float32) if isinstance(each, tuple) else each for each in given]
    assert [written(eqn) for eqn in equations(jax.make_jaxpr(f)(*args)) if eqn.primitive.name == name][-1:] == [
        expected
    ]


def test_mesh_axes_go_to_factors_major_first_as_far_as_they_divide():
    sizes = {"x": 2, "y": 4, "z": 3}

    def over(names, *counts):
        return dict(spread(range(len(counts)), names, counts, sizes))

    assert over("xy", 8) == {0: ("x", "y")}
    assert over("xy", 2, 12) == {0: ("x",), 1: ("y",)}
    assert over("yx", 2, 4) == {}  # y ends in the second
    assert over("xyz", 24, 5) == {0: ("x", "y", "z")}
    assert over("xz", 4, 3) == {0: ("x",)}  # what is left of the first comes before the second
    assert over("zx", 6, 2) == {0: ("z", "x")}
    assert over("", 4) == {}
    assert over("xy", 0, 4) == {0: ("x", "y")}
    assert over("x", 0, 1) == {0: ("x",)}


def attention(given, made, *, layout=0, dropout_rate=0.0, name="dot_product_attention_fwd_wrapper"):
    """NVIDIA's attention, which can't be traced here: of q, k, v, a bias, two lengths, two offsets and two tables of pages."""
    arrays = lambda shapes: [types.SimpleNamespace(aval=jax.ShapeDtypeStruct(each, jnp.float32)) for each in shapes]
    return types.SimpleNamespace(
        primitive=types.SimpleNamespace(name=name),
        params={"layout": layout, "dropout_rate": dropout_rate},
        invars=arrays(given), outvars=arrays(made),
    )  # fmt: skip


Q, K, BIAS, KEPT, NONE = (2, 16, 6, 8), (2, 32, 3, 8), (2, 6, 16, 32), (2, 6, 16), (0,)
HEADS_FIRST = [(2, 6, 16, 8), *[(2, 3, 32, 8)] * 2]
BACKWARD = "dot_product_attention_bwd_wrapper"


@pytest.mark.parametrize(
    ("eqn", "arrays", "kept"),
    [
        (attention([Q, K, K, BIAS, (2,), (2,), *[NONE] * 4], [Q, KEPT]),
         "a b cd e, a f c g, a f c g, a cd h i, a, a, j, k, l, m -> a b cd e, a cd b", "a2 c3 d2"),
        (attention([*HEADS_FIRST, (1, 1, 16, 32), (1,), (3,), *[NONE] * 4], [HEADS_FIRST[0], KEPT], layout=1),
         "a bc d e, a b f g, a b f g, 1 1 h i, j, k, l, m, n, o -> a bc d e, a bc d", "a2 b3 c2"),
        (attention([Q, K, K, *[NONE] * 7], [Q]), "a b cd e, a f c g, a f c g, h, i, j, k, l, m, n -> a b cd e", "a2 c3 d2"),
        (attention([Q, K, K, (*BIAS, 1), *[NONE] * 6], [Q]),
         "a b cd e, a f c g, a f c g, h i j k l, m, n, o, p, q, r -> a b cd e", "a2 c3 d2"),
        (attention([Q, K, K, BIAS, *[NONE] * 6, KEPT, Q, Q], [Q, K, K, BIAS], name=BACKWARD),
         "a b cd e, a f c g, a f c g, a cd h i, j, k, l, m, n, o, a cd b, a b cd e, a b cd e -> a b cd e, a f c g, a f c g, a cd h i",
         "a2 c3 d2"),
        (attention([Q, K, K, *[NONE] * 7, KEPT, Q, Q], [Q, K, K], name=BACKWARD),
         "a b cd e, a f c g, a f c g, h, i, j, k, l, m, n, a cd b, a b cd e, a b cd e -> a b cd e, a f c g, a f c g", "a2 c3 d2"),
        (attention([Q, K, K, *[NONE] * 7], [Q], dropout_rate=0.5),
         "a b c d, e f g h, i j k l, m, n, o, p, q, r, s -> t u v w", ""),
        (attention([Q, K, K, *[NONE] * 3, (3,), *[NONE] * 3], [Q]),
         "a b c d, e f g h, i j k l, m, n, o, p, q, r, s -> t u v w", ""),
    ],
    ids=["places first", "heads first, shared bias", "no bias", "a bias of five axes", "backward", "backward, no bias", "dropout",
         "documents"],
)  # fmt: skip
def test_attention_by_nvidia_keeps_rows_and_heads(eqn, arrays, kept):
    found, _, sizes = written(eqn).partition(" where ")
    assert (found, " ".join(size for size in sizes.split() if ":" not in size)) == (arrays, kept)
    assert factors(eqn).sums == ((3,) if eqn.primitive.name == BACKWARD else ())

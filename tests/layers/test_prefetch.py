"""A loop whose parameters are gathered one layer ahead: what is in it, and that it computes what `lax.scan` does. What is gathered
here is made of a shard by one device."""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal
from jax.interpreters import partial_eval

from jshard.layers.partition.prefetch import scan_ahead
from jshard.programs.jaxprs import bare, equations

ROWS, WIDTH = 6, 4
X, BIAS = np.ones((ROWS, WIDTH), np.float32), np.linspace(-1, 1, WIDTH, dtype=np.float32)


def gather(name, dtype=jnp.float32, *, in_slices):
    """Make `dtype` of a shard, and of that a kernel of twice as many rows, or a number: its gradient is read in slices, or whole."""

    def full(shard):
        shard = shard.astype(dtype)
        return checkpoint_name(jnp.concatenate([shard, 2 * shard]) if shard.ndim else 3 * shard, name)

    def backward(shard, of_full):
        part = lambda number: lax.dynamic_slice_in_dim(of_full, number * len(shard), len(shard), 0)
        return ((part(0) + 2 * part(1)).astype(shard.dtype),)

    if not in_slices:
        return full
    sliced = jax.custom_vjp(full)
    sliced.defvjp(lambda shard: (full(shard), shard), backward)
    return sliced


GATHERS = [*enumerate(gather(name, in_slices=name != "d") for name in "adbc")]


def layer(carry, full, each):
    """Three products one behind the other, of kernels that leave in slices, and a number that leaves late."""
    (x, count), (scale, number, shift) = carry, each
    a, d, b, c = full
    product = lambda x, kernel: (x.astype(kernel.dtype) @ kernel).astype(x.dtype)
    made = checkpoint_name(jnp.tanh(product(x, a) + BIAS * scale), "made")
    y = product(jnp.tanh(product(made, b)), c) + shift
    return [x + y * scale + x * d.astype(x.dtype), count + number], [y.sum(0), y.astype(jnp.int32).sum(0) * 0 + count]


def operands(length):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32) / 2
    kernel = WIDTH // 2, WIDTH
    shards = [draw(length, *shape) for shape in (kernel, (), kernel, kernel)]
    each = [draw(length), np.arange(1, length + 1), draw(length, ROWS, WIDTH)]
    return [draw(ROWS, WIDTH), np.zeros(WIDTH, int)], shards, each


def ahead(carry, shards, each, bias=None, *, layer=layer, gathers=GATHERS, reverse=False, travels=True, remat=""):
    """With what it closes over as an operand."""
    run = layer if bias is None else lambda carry, full, each: layer([carry[0] + bias, carry[1]], full, each)
    return scan_ahead(
        run, gathers, carry, shards, each, length=len(shards[0]), reverse=reverse, travels=travels, remat=remat
    )


def plain(carry, shards, each, bias, *, reverse=False, **_):
    def turn(carry, given):
        shards, each = given
        x, count = carry
        return layer([x + bias, count], [f(shards[n]) for n, f in GATHERS], each)

    return lax.scan(turn, carry, (shards, each), reverse=reverse)


def gradient_of(run, **how):
    """What it returns, and its gradients by all that are no whole numbers."""

    def loss(smooth, count, number):
        x, shards, (scale, shift), bias = smooth
        found = run([x, count], shards, [scale, number, shift], bias, **how)
        leaves = [x for x in jax.tree.leaves(found) if x.dtype == jnp.float32]
        return sum((jnp.sin(x) * jnp.cos(jnp.arange(x.size).reshape(x.shape))).sum() for x in leaves), found

    return jax.value_and_grad(loss, has_aux=True)


def smooth(length):
    (x, count), shards, (scale, number, shift) = operands(length)
    return (x, shards, (scale, shift), BIAS), count, number


@pytest.mark.quick(1)
@pytest.mark.parametrize("length, how", [
    (1, {}), (1, {"travels": False, "remat": "products"}), (2, {"reverse": True, "remat": "full"}), (4, {}),
    (4, {"reverse": True, "remat": "products"}), (3, {"travels": False}), (4, {"remat": ("made",), "travels": False}),
], ids=str)  # fmt: skip
def test_it_computes_what_a_loop_does(length, how):
    given = smooth(length)
    found, expected = (jax.jit(gradient_of(run, **how))(*given) for run in (ahead, plain))
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    jax.tree.map(near, found, expected)


def test_what_is_not_differentiated_is_what_a_loop_makes():
    carry, shards, each = operands(2)
    found, expected = ahead(carry, shards, each, BIAS), plain(carry, shards, each, BIAS)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, expected)


def program(given=None, *, keep=False, **how):
    """The whole of it, and the bodies of its loops: forward and backward. What nothing reads is left out."""
    whole = jax.make_jaxpr(gradient_of(ahead, **how))(*given or smooth(5)).jaxpr
    loops = [eqn.params["jaxpr"].jaxpr for eqn in whole.eqns if eqn.primitive.name == "scan"]
    return [each if keep else partial_eval.dce_jaxpr(each, [True] * len(each.outvars))[0] for each in (whole, *loops)]


def products(jaxpr):
    return collections.Counter(
        eqn.outvars[0].aval.shape for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"
    )


def names_in(eqn):
    inside = [
        eqn,
        *(each for value in eqn.params.values() if hasattr(bare(value), "eqns") for each in equations(value)),
    ]
    return [each.params["name"] for each in inside if each.primitive.name == "name"]


def waits(jaxpr, names="abcd"):
    """Of what is gathered outside of loops, behind what else, each with the how manieth it is."""
    count, behind, found = collections.Counter(), {}, {}
    for eqn in jaxpr.eqns:
        before = {name for v in eqn.invars if not isinstance(v, Literal) for name in behind.get(v, ())}
        made = [] if eqn.primitive.name == "scan" else [name for name in names_in(eqn) if name in names]
        for name in made:
            count[name] += 1
            found[f"{name}{count[name]}"] = " ".join(sorted(before))
        before |= {f"{name}{count[name]}" for name in made}
        behind |= dict.fromkeys(eqn.outvars, before)
    return found


def test_gathers_stand_one_turn_ahead_and_those_of_the_backward_loop_go_one_after_another():
    """Before that loop they wait for the gradient that it begins with. None waits for one whose gradient leaves whole."""
    whole, forward, backward = program()
    assert waits(forward) == {"a1": "", "d1": "", "b1": "", "c1": ""}
    assert waits(backward) == {"a1": "", "d1": "a1", "b1": "a1", "c1": "a1 b1"}
    before = "a1 b1 c1 d1"
    assert waits(whole) == {f"{name}1": "" for name in "abcd"} | {f"{name}2": before for name in "abcd"}


@pytest.mark.parametrize(("length", "again"), [(1, 0), (2, 1), (3, 1)])
def test_of_one_layer_nothing_is_gathered_for_its_backward(length, again):
    """Once it is gathered for its types, which nothing reads."""
    whole, *loops = program(smooth(length), keep=True)
    gathers = [eqn for eqn in whole.eqns if "a" in names_in(eqn) and eqn.primitive.name != "scan"]
    assert (len(gathers), len(loops)) == (2 + again, 1 + again)


REMAT = {  # for each word what a layer leaves beside sums, how many products are made again, and what keeps from merging
    "": (1, 3, {False}, {False}),
    "full": (1, 3, {False}, {False, True}),
    "products": (4, 0, {False}, {False}),
    ("made",): (2, 3, {False}, {False}),
}


@pytest.mark.parametrize("remat", REMAT, ids=str)
def test_remat_says_what_a_layer_leaves(remat):
    whole, forward, backward = program(remat=remat)
    guards = lambda jaxpr: {eqn.params["prevent_cse"] for eqn in equations(jaxpr) if "prevent_cse" in eqn.params}
    left = [v.aval.shape for v in forward.outvars].count((ROWS, WIDTH)) - 1
    again = products(backward)[ROWS, WIDTH] - 3
    assert (left, again, guards(backward), guards(whole)) == REMAT[remat]


WIDE, HALF, SMALL = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn


@pytest.mark.parametrize(("slices", "rounded"), [("abc", [(8, 7)]), ("", [])])
def test_a_shard_is_rounded_before_it_is_gathered_in_bfloat16(slices, rounded):
    """A wide one, to the same numbers, where gathers go one after another."""
    dtypes = {"a": (WIDE, HALF), "d": (WIDE, SMALL), "b": (HALF, HALF), "c": (WIDE, WIDE)}  # at rest, gathered
    (x, shards, *others), count, number = smooth(5)
    shards = [shard.astype(rest) for shard, (rest, _) in zip(shards, dtypes.values(), strict=True)]
    gathers = [gather(name, dtype, in_slices=name in slices) for name, (_, dtype) in dtypes.items()]
    _, *loops = program(((x, shards, *others), count, number), gathers=[*enumerate(gathers)])
    for loop in loops:
        found = [eqn.params for eqn in equations(loop) if eqn.primitive.name == "reduce_precision"]
        assert [(each["exponent_bits"], each["mantissa_bits"]) for each in found] == rounded


@pytest.mark.parametrize(("how", "late"), [({}, ""), ({"travels": False}, "abc")])
def test_gradients_of_kernels_are_made_in_slices(how, late):
    *_, backward = program(**how)
    of_kernels = products(backward)
    assert of_kernels[WIDTH // 2 * 2, WIDTH] == len(late) and of_kernels[WIDTH, WIDTH // 2] == 2 * (3 - len(late))


def test_a_layer_is_read_and_written_as_rows_of_all_of_them():
    for jaxpr in program():
        slices = [eqn for eqn in equations(jaxpr) if eqn.primitive.name in ("dynamic_slice", "dynamic_update_slice")]
        assert max(eqn.invars[0].aval.ndim for eqn in slices) == 2


once = lambda x, kernel: jnp.tanh(x @ kernel)
ODD = {
    "read twice": lambda x, kernel: once(x, kernel) @ kernel,
    "read by a cast": lambda x, kernel: once(x, kernel.astype(HALF).astype(WIDE)),
    "read by nothing": lambda x, kernel: x,
    "whole": once,
}


@pytest.mark.quick(4)
@pytest.mark.parametrize(("odd", "others", "slices"), [
    (None, 2, 0), (None, 3, 3), (None, 4, 4), *((odd, others, slices) for odd in ODD for others, slices in ((2, 0), (3, 3))),
])  # fmt: skip
def test_gradients_leave_in_slices_where_no_more_than_a_third_is_made_last(odd, others, slices):
    """Those of kernels that one product reads."""
    uses = [once] * others + ([ODD[odd]] if odd else [])
    gathers = [*enumerate(gather("a", in_slices=n < others or odd != "whole") for n in range(len(uses)))]

    def chain(carry, full, _):
        return [functools.reduce(lambda x, of: of[0](x, of[1]), zip(uses, full, strict=True), carry[0])], []

    def loss(shards):
        return scan_ahead(chain, gathers, [X], shards, [], length=5, reverse=False, travels=True, remat="")[0][0].sum()

    shards = [np.ones((5, WIDTH // 2, WIDTH), np.float32) for _ in uses]
    loops = [eqn for eqn in jax.make_jaxpr(jax.grad(loss))(shards).eqns if eqn.primitive.name == "scan"]
    assert products(loops[1].params["jaxpr"])[WIDTH, WIDTH // 2] == 2 * slices

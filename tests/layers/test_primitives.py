"""Which primitives Flax, optax and JAX's numpy reach, read from their traces: each has a rule, and each rule a case."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import lax
from jax._src import traceback_util
from jax.extend.core import Literal
from test_partition_rules import CASES, NOT_DIFFERENTIABLE, placed, pooled

from jshard.layers import partition
from jshard.layers.partition.local_sizes import localized
from jshard.layers.partition.program import RULES
from jshard.layouts.axes import RULES as TABLE_OF_RULES
from jshard.layouts.axes import factors
from jshard.layouts.primitives import ELEMENTWISE, PARAMETERS, READ, REFUSED, unknown_parameters
from jshard.programs.jaxprs import CALLS, equations

pytestmark = pytest.mark.slow  # what is reached takes six seconds to find
X, TOKENS, IMAGE = np.ones((4, 4), np.float32), np.ones((4, 4), np.int32), np.ones((2, 4, 4, 4), np.float32)
GIVEN = ([X], [X, X], [X[0]], [X[0], X[0]], [TOKENS], [TOKENS, TOKENS], [X, X, X], [X > 0], [X, TOKENS], [X > 0, X, X])


def public(*rooms: types.ModuleType) -> Iterator[Callable[..., Any]]:
    for room in rooms:
        for name, found in sorted(vars(room).items()):
            if not name.startswith("_") and callable(found) and not inspect.isclass(found):
                yield found


def scalar(tree: Any) -> Any:
    floats = [jnp.sum(y) for y in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(y), jnp.floating)]
    return functools.reduce(jnp.add, floats, jnp.zeros(()))


def traced(f: Callable[..., Any], args: list[Any]) -> Any:
    """None where the function refuses such arguments."""
    try:
        return jax.make_jaxpr(f)(*args)
    except Exception:  # a library's own, for arguments that it does not take
        return None


def functions() -> Iterator[Any]:
    """Every public function that takes one to three small arrays: those of the first two kinds that it takes."""
    for f in public(jnp, jnp.linalg, jnp.fft, jax.nn, jax.scipy.special, optax.losses):
        taken = ((args, found) for args in GIVEN if (found := traced(f, args)) is not None)
        for number, (args, found) in zip(range(2), taken, strict=False):
            yield found
            if number == 0:
                yield traced(jax.grad(lambda *args, f=f: scalar(f(*args))), args)
    for f in public(jax.random):
        for args in ([], [(4,)], [X], [X, X], [3]):
            yield traced(lambda key, args=args, f=f: f(key, *args), [jax.random.key(0)])
    yield jax.make_jaxpr(lambda x: jax.image.resize(x, (2, 8, 8, 4), "bilinear"))(IMAGE)


def updated(optimizer: Any, weights: Any) -> Any:
    return optimizer.update(weights, optimizer.init(weights), weights)


def optimizers() -> Iterator[Any]:
    weights = {"kernel": X, "bias": X[0]}
    for f in public(optax):
        for args in ((), (0.1,), (0.1, 0.1)):
            if (found := traced(lambda w, f=f, args=args: updated(f(*args), w), [weights])) is not None:
                yield found
                break


def layers() -> Iterator[Any]:
    """A call and a gradient of each layer with weights; those of Linen share their bodies with these but for a few."""
    rngs = nnx.Rngs(0)
    cell = {"rngs": rngs, "in_features": 4, "hidden_features": 4}
    made: list[tuple[nnx.Module, Any]] = [
        (nnx.Linear(4, 4, rngs=rngs), X),
        (nnx.LinearGeneral((4,), (2, 2), rngs=rngs), X),
        (nnx.Einsum("ab,bc->ac", (4, 4), rngs=rngs), X),
        (nnx.Embed(4, 4, rngs=rngs), TOKENS),
        (nnx.Conv(4, 4, (3, 3), rngs=rngs), IMAGE),
        (nnx.ConvTranspose(4, 4, (3, 3), strides=2, rngs=rngs), IMAGE),
        (nnx.MultiHeadAttention(2, 4, decode=False, dropout_rate=0.1, deterministic=False, rngs=rngs), IMAGE[0]),
        (nnx.BatchNorm(4, rngs=rngs), X),
        (nnx.LayerNorm(4, rngs=rngs), X),
        (nnx.RMSNorm(4, rngs=rngs), X),
        (nnx.GroupNorm(4, 2, rngs=rngs), IMAGE),
        (nnx.InstanceNorm(4, rngs=rngs), IMAGE),
        (nnx.WeightNorm(nnx.Linear(4, 4, rngs=rngs), rngs=rngs), X),
        (nnx.Dropout(0.5, rngs=rngs), X),
        (nnx.PReLU(), X),
        (nnx.LoRALinear(4, 4, lora_rank=2, rngs=rngs), X),
        (nnx.RNN(nnx.LSTMCell(**cell)), IMAGE[0]),
        (nnx.RNN(nnx.OptimizedLSTMCell(**cell)), IMAGE[0]),
        (nnx.Bidirectional(nnx.RNN(nnx.GRUCell(**cell)), nnx.RNN(nnx.SimpleCell(**cell)), rngs=rngs), IMAGE[0]),
        *((nnx.bridge.ToNNX(each, rngs=rngs), IMAGE[0]) for each in (linen.Dense(4), linen.MultiHeadDotProductAttention(2))),
    ]  # fmt: skip
    for layer, x in made:
        if isinstance(layer, nnx.bridge.ToNNX):
            layer.lazy_init(x)
        graphdef, weights, rest = nnx.split(layer, nnx.Param, ...)

        def call(weights: Any, rest: Any, x: Any, graphdef: Any = graphdef) -> Any:
            layer = nnx.merge(graphdef, weights, jax.tree.map(lambda leaf: leaf, rest))
            return scalar(layer(x)), nnx.state(layer)

        yield jax.make_jaxpr(jax.value_and_grad(call, has_aux=True))(weights, rest, x)
    yield jax.make_jaxpr(lambda x: linen.avg_pool(linen.max_pool(x, (2, 2)), (2, 2)))(IMAGE)


def rules() -> Iterator[Any]:
    """The operations that each rule is held by, and JAX's own functions, of arrays alone."""
    for name, (f, *args) in CASES.items():
        yield jax.make_jaxpr(f)(*args)
        if name not in NOT_DIFFERENTIABLE and (smooth := [at for at, x in enumerate(args) if x.dtype == np.float32]):
            yield jax.make_jaxpr(jax.grad(lambda *args, f=f: scalar(f(*args)), smooth))(*args)
    yield jax.make_jaxpr(lambda x: (lax.reduce_precision(x, 5, 4), lax.ragged_dot(x, x[None], jnp.array([4]))))(X)
    yield jax.make_jaxpr(lambda x: jax.jvp(lambda x: pooled(x, -np.inf, lax.max), (x,), (x,)))(IMAGE)
    for f in public(lax, lax.linalg):
        yield next((found for args in GIVEN if (found := traced(f, args)) is not None), None)


@pytest.fixture(scope="module")
def everything() -> list[Any]:
    """An equation of each primitive with each set of parameters. Of functions that refuse what they are given JAX would tidy 2,172 tracebacks, which takes
    half of the time, and read the lines of the stack at each to see whether it is to."""
    with mock.patch.object(traceback_util, "_is_under_reraiser", lambda error: True):
        found = {
            (source is rules, eqn.primitive.name, *eqn.params): eqn
            for source in (functions, optimizers, layers, rules)
            for jaxpr in source()
            if jaxpr is not None
            for eqn in equations(jaxpr)
        }
    return [(is_of_rules, eqn) for (is_of_rules, *_), eqn in found.items()]


@pytest.fixture(scope="module")
def reached(everything: list[Any]) -> dict[str, Any]:
    """An equation of each primitive that Flax, optax and numpy reach."""
    return {eqn.primitive.name: eqn for is_of_rules, eqn in everything if not is_of_rules}


def test_each_primitive_that_flax_optax_and_numpy_reach_has_a_rule(reached):
    assert len(reached) > 120
    assert {"scan", "conv_general_dilated", "erf_inv", "reduce_window_sum", "eigh", "custom_jvp_call"} <= reached.keys()
    unknown = {
        name for name, eqn in reached.items() if name not in RULES and name not in CALLS and factors(eqn) is None
    }
    assert unknown == set()


def test_each_rule_but_the_elementwise_one_is_held_against_whole_arrays(reached):
    held = set()
    for name, (f, *args) in CASES.items():
        smooth = tuple(at for at, x in enumerate(args) if x.dtype == np.float32)
        programs = [jax.make_jaxpr(f)(*args)]
        if smooth and name not in NOT_DIFFERENTIABLE:
            programs.append(jax.make_jaxpr(jax.grad(lambda *args, f=f: scalar(f(*args)), smooth))(*args))
        held |= {eqn.primitive.name for jaxpr in programs for eqn in equations(jaxpr)}
    assert reached.keys() - held - ELEMENTWISE == set()


def applied(eqn: Any, xs: list[Any]) -> list[Any]:
    it = iter(xs)
    args = [jnp.asarray(v.val, v.aval.dtype) if isinstance(v, Literal) else next(it) for v in eqn.invars]
    out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return out if eqn.primitive.multiple_results else [out]


def test_the_elementwise_rule_holds_for_each_primitive(reached, mesh):
    """Each in the equation in which it was met, its operands of the result's shape split along each axis, or none of them."""
    on, draw = mesh(data=2, tensor=4), np.random.default_rng(0)
    programs, given = {}, {}
    for name in sorted(reached.keys() & ELEMENTWISE):  # in one order, so that a second run finds the program
        eqn = reached[name]
        operands = [v.aval for v in eqn.invars if not isinstance(v, Literal)]
        shape = eqn.outvars[0].aval.shape
        given[name] = [
            jnp.asarray(draw.uniform(0.1, 0.9, aval.shape) * (1 if jnp.issubdtype(aval.dtype, jnp.floating) else 9)).astype(aval.dtype)
            for aval in operands
        ]  # fmt: skip
        jaxpr = jax.make_jaxpr(lambda *xs, eqn=eqn: applied(eqn, xs))(*given[name])
        for axis, size in enumerate(shape):
            split = tuple(("tensor",) if at == axis else () for at in range(len(shape)))
            if size % 4 == 0:
                ways = [split if aval.shape == shape else ((),) * len(aval.shape) for aval in operands]
                program = partition.Program(on, jaxpr, [partition.Input(way) for way in ways])
                assert program.out_axes[0] == (split if split in ways else ((),) * len(shape)), name
                programs[name, axis] = program, ways

    def on_parts(given):
        return [
            program(*(placed(on, x, way) for x, way in zip(given[name], ways, strict=True)))
            for (name, _), (program, ways) in programs.items()
        ]

    # In one program XLA would split the loops that some of them are, and no cache keeps collectives inside loops and outside.
    whole = jax.device_get(jax.jit(lambda given: {name: applied(reached[name], given[name]) for name in given})(given))
    with jax.set_mesh(on):
        step = jax.jit(on_parts)
        asked = {eqn.primitive.name.removesuffix("_invariant") for eqn in equations(step.trace(given).jaxpr)}
        parts = jax.device_get(step(given))
    assert not asked & {"all_gather", "all_to_all", "ppermute", "psum", "reduce_scatter"}
    assert len(parts) > 80
    for (name, axis), part in zip(programs, parts, strict=True):
        for want, got in zip(whole[name], part, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=f"{name}, axis {axis}")


# These no function that is traced here reaches: of a backend, of another JAX, of a program that jshard writes.
ELSEWHERE = frozenset(
    "by_hand call_hi_primitive checkpoint closed_call copy_p core_call custom_lin custom_vjp_call_jaxpr dot_product_attention_bwd_wrapper "
    "dot_product_attention_fwd_wrapper empty eq_to le_to log2 lt_to mesh_cast name one_minus_square pjit polynomial random_gamma_grad "
    "regathered remat reshard scatter_add scatter_max scatter_min scatter_mul scatter_sub sharding_constraint threefry2x32 "
    "reduce_window reduce_window_min".split()
)


def test_each_parameter_is_read_or_told_to_be_irrelevant(everything):
    """A newer JAX with a parameter more is red here, and a sentence to its user: `sort(x, descending=True)`, say."""
    unknown = {f"{eqn.primitive.name}.{key}" for _, eqn in everything for key in unknown_parameters(eqn)}
    assert unknown == set()
    met = {eqn.primitive.name for _, eqn in everything}
    assert PARAMETERS.keys() - met - ELSEWHERE == set()
    assert met & (TABLE_OF_RULES.keys() | RULES.keys()) - PARAMETERS.keys() - REFUSED == set()


class Read(dict):
    """Parameters that note which are read."""

    def __init__(self, params: dict[str, Any]):
        super().__init__(params)
        self.names: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.names.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default


def test_each_rule_reads_the_parameters_that_are_told_to_be_read(everything):
    told = {name: set(words.split()) for names, words in READ.items() for name in names.split()}
    for _, eqn in everything:
        name, params = eqn.primitive.name, Read(eqn.params)
        noting = types.SimpleNamespace(primitive=eqn.primitive, params=params, invars=eqn.invars, outvars=eqn.outvars)
        if (found := factors(noting)) is None:
            continue
        made_local = localized(noting, found, {}, {}).keys()
        wanted = told[name] & eqn.params.keys()
        if name in RULES:  # and what that rule reads beside
            assert params.names <= wanted, name
        else:
            assert params.names | made_local == wanted, name

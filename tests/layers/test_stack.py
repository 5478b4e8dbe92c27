"""`jshard.stack`: equal layers as one scan, under `shard` and of jshard.Linear, and what of them is kept for backward."""

from __future__ import annotations

import collections
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jshard
from jshard.errors import JShardError
from jshard.inspect.compiled.hlo_text import HloProgram
from jshard.inspect.compiled.schedule import Done, Loop, Start, collectives_in, schedule_of
from jshard.layers.creating import created
from jshard.programs.jaxprs import equations, scanned
from jshard.programs.provenance import op_name
from tests.support.drawn import drawn

WIDTH, HIDDEN = 16, 32


class Block(nnx.Module):
    """With something of everything: products, a norm, random numbers, what a call leaves behind."""

    def __init__(self, dropout=0.0, *, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(HIDDEN))

    def __call__(self, x, scale=1.0):
        hidden = checkpoint_name(self.up(self.norm(x)), "hidden")
        self.mean[...] = hidden.mean((0, 1))
        return x + self.dropout(self.down(nnx.gelu(hidden))) * scale


class Model(nnx.Module):
    def __init__(self, depth, dropout=0.0, unroll=1, *, rngs):
        self.blocks = jshard.stack(Block, depth, dropout, rngs=rngs, unroll=unroll)
        self.head = nnx.Linear(WIDTH, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(self.blocks(x))


def loss(model, x):
    return (model(x) ** 2).mean()


def claimed(mesh, **words):
    split = {"row": "data", **words}
    stored = {key: word for key, word in split.items() if key != "sequence"}
    return {
        "jshard": {"mesh": mesh},
        "up": {**split, "column": "tensor", "match": ["blocks/up/**"]},
        "down": {**split, "reduction": "tensor", "match": ["blocks/down/**"]},
        "rest": {**stored, "match": ["**"]},
    }


X = np.random.default_rng(0).normal(size=(8, 4, WIDTH)).astype(np.float32)


def built(depth=3, dropout=0.0, unroll=1):
    return drawn(Model, depth, dropout, unroll)


def drawing():
    return Model(3, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def one_device():
    return nnx.value_and_grad(loss)(built(), X)


class Attending(nnx.Module):
    def __init__(self, depth=0, *, rngs):
        layer = Attending if depth else jshard.Attention
        given = (WIDTH, 2) if not depth else (depth - 1,)
        self.layers = jshard.stack(layer, 2, *given, rngs=rngs)

    def __call__(self, x, positions=None):
        return self.layers(x, positions)


@pytest.mark.seconds
def test_layers_in_stacks_of_stacks_write_to_one_cache():
    nested = Attending(1, rngs=nnx.Rngs(0))
    whole = nested(X)
    for _, module in nnx.iter_modules(nested):
        if isinstance(module, jshard.Attention):
            module.init_cache(8, 5)
            cache = module.cached_key
    assert cache.shape == (2, 2, 8, 2, 5, WIDTH // 2)
    np.testing.assert_allclose(nested(X[:, :3]), whole[:, :3], rtol=1e-4, atol=1e-5)
    token = nested(X[:, 3:], np.full((8, 1), 3))
    np.testing.assert_allclose(token, whole[:, 3:], rtol=1e-4, atol=1e-5)
    assert [bool((cache[:, :, :, :, at] == 0).all()) for at in range(5)] == [False] * 4 + [True]


def test_a_stack_is_its_layers_one_after_the_other():
    stacked = built().blocks
    assert isinstance(stacked, Block)
    graph, state = nnx.split(stacked)
    assert stacked.up.kernel.shape == (3, WIDTH, HIDDEN)
    assert len({float(each) for each in stacked.up.kernel[:, 0, 0]}) == 3  # each draws its own
    x, means = X, []
    for number in range(3):
        layer = nnx.merge(graph, jax.tree.map(operator.itemgetter(number), state))
        means.append(layer.up(layer.norm(x)).mean((0, 1)))
        x = Block.__call__(layer, x, 0.5)
    np.testing.assert_allclose(stacked(X, 0.5), x, atol=1e-6)
    np.testing.assert_allclose(stacked.mean[...], jnp.stack(means), atol=1e-6)  # each keeps what it has left


def test_each_layer_drops_its_own_numbers_and_others_in_each_call():
    stacked = jshard.stack(Block, 2, 0.5, rngs=nnx.Rngs(0))
    stacked.down.kernel[...] = jnp.zeros_like(stacked.down.kernel[...])
    stacked.down.bias[...] = jnp.ones_like(stacked.down.bias[...])
    first, second = stacked(X) - X, stacked(X) - X
    assert set(np.unique(np.round(first))) == {0, 2, 4}  # 4 is both, 2 is one: not the same in both layers
    assert not np.array_equal(first, second)


PREFETCH = {"parameters": "data", "prefetch": True}
PERMUTES = {"all_gather": "permute", "reduce_scatter": "permute"}
PLANS = {
    "tensor": claimed({"data": 2, "tensor": 4}),
    "tensor sequence store": claimed({"data": 2, "tensor": 4}, sequence="tensor", store="data"),
    "store": claimed({"data": 8, "tensor": 1}, store="data"),
    "remat": claimed({"data": 2, "tensor": 4}, store="data", remat="full"),
    "prefetch": claimed({"data": 2, "tensor": 4}, store=PREFETCH),
    "prefetch products": claimed({"data": 2, "tensor": 4}, store=PREFETCH, remat="products"),
    "prefetch saved": claimed({"data": 4, "tensor": 2}, store=PREFETCH, sequence="tensor", remat={"save": ["hidden"]}),
    "prefetch sequence": claimed(
        {"data": 4, "tensor": 2}, store=PREFETCH, sequence="tensor", dtype={"reduce": "float32"}
    ),
    "permutes": claimed({"data": 4, "tensor": 2}, store="data", sequence="tensor", kernel=PERMUTES),
    "prefetch slices": claimed(
        {"slice": {"size": 2, "over": "dcn"}, "data": 2, "tensor": 2}, row=["slice", "data"], store=PREFETCH
    ),
    "late sums": claimed({"data": 4, "tensor": 2}, store={"prefetch": True}, kernel={"all_reduce": "permute"}),
    "late sums of psum": claimed({"data": 2, "tensor": 4}, store={"prefetch": True}, dtype={"reduce": "float32"}),
    "prefetch parts": claimed({"data": 4, "tensor": 2}, store=PREFETCH, kernel={"reduce_scatter": "permute"}),
    "prefetch permutes": claimed({"data": 4, "tensor": 2}, store=PREFETCH, sequence="tensor", kernel=PERMUTES),
}


@pytest.mark.quick("prefetch")
@pytest.mark.parametrize("plan", PLANS)
def test_it_equals_one_device_and_its_layers_lie_as_claimed(plan, one_device):
    jshard.load(PLANS[plan])
    model = jshard.shard(built(), X)
    value, gradients = nnx.jit(nnx.value_and_grad(jshard.shard(loss)))(model, X)
    np.testing.assert_allclose(value, one_device[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradients, one_device[1])
    kernel, split = model.blocks.up.kernel[...], PLANS[plan]["up"].get("store", {}) not in ({}, {"prefetch": True})
    ways = dict(PLANS[plan]["jshard"]["mesh"])
    shard = (3, WIDTH // ways["data"] if split else WIDTH, HIDDEN // ways["tensor"])
    assert kernel.sharding.shard_shape(kernel.shape) == shard
    assert gradients["blocks"]["up"]["kernel"][...].sharding == kernel.sharding


def differentiated(unroll):
    """Value and gradients of layers of which so many are one turn of their loop, and the function they are of."""
    jshard.load(PLANS["tensor sequence store"])
    model, step = jshard.shard(built(unroll=unroll), X), nnx.value_and_grad(jshard.shard(loss))
    return model, step


@pytest.mark.seconds
@pytest.mark.parametrize("unroll", [2, 3])
def test_unrolled_layers_are_the_same_and_ask_for_the_same(unroll, one_device):
    model, step = differentiated(unroll)
    value, gradients = nnx.jit(step)(model, X)
    np.testing.assert_allclose(value, one_device[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradients, one_device[1])
    asked = lambda model, step: [
        (each.cause.signal, each.collective, each.count, each.payload) for each in jshard.explain(step, model, X).lines
    ]
    assert asked(model, step) == asked(*differentiated(1))


@pytest.mark.quick("1-False")
@pytest.mark.parametrize(("unroll", "guarded"), [(1, False), (2, False), (3, True), (5, True)])
def test_gathers_of_layers_that_are_no_loop_are_kept_from_being_merged(unroll, guarded):
    """A loop can't be merged with its backward; where no loop is left XLA is told."""
    model, step = differentiated(unroll)
    graph, state = nnx.split(model)
    traced = jax.make_jaxpr(lambda state: step(nnx.merge(graph, state), X))(state)
    inside = [eqn for eqn in equations(traced) if eqn.primitive.name == "scan"]
    found = {
        eqn.params["prevent_cse"]
        for loop in inside
        for eqn in equations(loop.params["jaxpr"])
        if "prevent_cse" in eqn.params
    }
    assert found == {guarded}


@pytest.mark.parametrize(("unroll", "guarded"), [(None, False), (2, False), (3, True), (5, True)])
def test_layers_that_are_computed_anew_in_no_loop_are_kept_from_being_merged(unroll, guarded):
    jshard.load({"jshard": {"mesh": {"data": 8}}, "blocks": {"remat": "full"}})
    with jshard.signal("blocks"):
        more = {} if unroll is None else {"unroll": unroll}
        model = nnx.eval_shape(lambda: jshard.stack(nnx.Linear, 3, WIDTH, WIDTH, rngs=nnx.Rngs(0), **more))
    graph, state = nnx.split(model)
    program = jax.make_jaxpr(jax.grad(lambda x, state: loss(nnx.merge(graph, state), x)))(X, state)
    found = {
        name: [eqn.params for eqn in equations(program) if eqn.primitive.name == name] for name in ("scan", "remat2")
    }
    assert {each["unroll"] for each in found["scan"]} == {min(unroll or 1, 3)}
    assert {each["prevent_cse"] for each in found["remat2"]} == {guarded}


def test_gathering_ahead_of_unrolled_layers_is_refused_in_a_sentence():
    jshard.load(PLANS["prefetch"])
    with pytest.raises(
        JShardError, match="for layers of which 2 are one turn of their loop .*; remove `unroll`, or store"
    ):
        nnx.jit(nnx.value_and_grad(jshard.shard(loss)))(jshard.shard(built(unroll=2), X), X)


def step_of(mesh, **words):
    """The equations of a loss and its gradients, and their values."""
    jshard.load(claimed(mesh, **words))
    graph, state = nnx.split(jshard.shard(built(), X))
    step = jax.jit(lambda state: nnx.value_and_grad(jshard.shard(loss))(nnx.merge(graph, state), X))
    return list(equations(jax.make_jaxpr(step)(state))), step(state)


@pytest.mark.parametrize("words", [{}, {"store": "data"}])
def test_over_mesh_axes_of_one_device_nothing_is_sent_nor_summed(words, one_device):
    found, (value, gradients) = step_of({"data": 1, "tensor": 1}, **words)
    sent = "psum psum_invariant all_gather all_gather_invariant reduce_scatter all_to_all ppermute".split()
    assert not {eqn.primitive.name for eqn in found} & {*sent}
    np.testing.assert_allclose(value, one_device[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradients, one_device[1])


def test_the_parameters_of_layers_are_not_kept_twice_for_the_backward_pass():
    found, _ = step_of({"data": 2, "tensor": 4})
    loops = [[variable.aval.shape for variable in eqn.outvars] for eqn in found if eqn.primitive.name == "scan"]
    kernels = {(3, WIDTH, HIDDEN // 4), (3, HIDDEN // 4, WIDTH)}
    assert [len(kernels & {*shapes}) for shapes in loops] == [0, 2]  # forward, and the gradients


def operations(depth):
    graph, state = nnx.split(built(depth))
    return len(list(equations(jax.make_jaxpr(lambda state: nnx.merge(graph, state)(X))(state))))


@pytest.mark.seconds
def test_its_cost_to_read_is_that_of_one_layer():
    jshard.load(PLANS["tensor sequence store"])
    step = nnx.value_and_grad(jshard.shard(loss))
    ledgers = {depth: jshard.explain(step, jshard.shard(built(depth), X), X) for depth in (2, 64)}
    assert len(ledgers[2].lines) == len(ledgers[64].lines)
    of_layers = {
        depth: sorted(line.count for line in ledger.lines if line.count > 1) for depth, ledger in ledgers.items()
    }
    assert set(of_layers[2]) == {2} and set(of_layers[64]) == {64} and len(of_layers[2]) == len(of_layers[64])
    assert {line.cause.signal for line in ledgers[2].lines} == {"up", "down", "rest"}  # of the layer, not of the loop
    assert operations(2) == operations(64)


@pytest.mark.seconds
@pytest.mark.parametrize("depth", [2, 64])
def test_it_is_proven(depth):
    jshard.load(PLANS["tensor"])
    proof = jshard.verify(jshard.shard(loss), built(depth), X)
    assert proof.ok and {each.verdict for each in proof.findings} == {"bitwise"}, proof


def backward_of(remat, /, depth=2, **more):
    """The program of the gradients of a stack, for each word."""
    first, _, last = remat.partition(" ") if isinstance(remat, str) else ("", "", remat)
    store = {"parameters": "data", first: True} if first in ("keep", "prefetch") else "data"
    words = {"remat": last or first} if last or first not in ("", "keep", "prefetch") else {}
    jshard.load(claimed({"data": 2, "tensor": 4}, store=store, **words, **more))
    model = jshard.shard(built(depth), X)
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)
    run = jshard.shard(loss)
    gradient = jax.grad(lambda parameters, rest: run(nnx.merge(graph, parameters, rest, copy=True), X))
    return list(equations(jax.make_jaxpr(gradient)(parameters, rest)))


def products(remat, /, depth=2, **more):
    """How many products, gathers and activations the program has for each word."""
    names = [each.primitive.name for each in backward_of(remat, depth, **more)]
    return names.count("dot_general"), sum(name.startswith("all_gather") for name in names), names.count("tanh")


@pytest.mark.seconds
def test_remat_says_what_is_kept():
    """Of a layer: up and down forward, for each its two gradients; so 6, and the head's 3. gelu has one tanh."""
    _, gathers, tanh = kept = products("keep")
    assert kept[0] == 9
    assert products("") == (9, gathers + 4, tanh)  # of up, down and the norm, and outside of the loop the head
    assert products("products") == (9, gathers + 4, tanh + 1)
    assert products("full") == (10, gathers + 4, tanh + 1)  # and the product of up: down's is used by nothing
    assert products({"save": ["hidden"]}) == (9, gathers + 4, tanh + 1)
    assert products({"save": ["another"]}) == products("full")


@pytest.mark.seconds
def test_remat_says_what_is_kept_of_layers_that_are_gathered_ahead():
    """Of five layers three stand in the backward pass: the first, the last and the loop's. It multiplies once less in each."""
    full, gathers, tanh = products("prefetch", depth=5)
    for remat in ("products", {"save": ["hidden"]}):
        assert products("prefetch", depth=5, remat=remat) == (full - 3, gathers, tanh)


@pytest.mark.seconds
def test_remat_full_computes_the_last_of_layers_that_are_gathered_ahead_again():
    """Its forward and backward stand beside each other: XLA for TPU merges what both compute, where no barrier is between."""

    def barriers(**words):
        jshard.load(claimed({"data": 2, "tensor": 4}, store=PREFETCH, **words))
        model = jshard.shard(built(), X)
        return nnx.jit(nnx.value_and_grad(jshard.shard(loss))).lower(model, X).as_text().count("optimization_barrier")

    assert barriers(remat="full") == barriers(remat="products") + 1 == barriers() + 1


@pytest.mark.seconds
def test_gradients_of_layers_of_two_equal_kernels_stand_whole_and_leave_a_layer_late():
    """Half of such a layer is multiplied first: behind the last of its gradients nothing would hide a scatter."""

    def sizes(**words):
        jshard.load(claimed({"data": 4, "tensor": 2}, store=PREFETCH, **words))
        graph, parameters, rest = nnx.split(jshard.shard(built(5), X), nnx.Param, ...)
        run = jshard.shard(loss)
        gradient = jax.grad(lambda parameters: run(nnx.merge(graph, parameters, rest, copy=True), X))
        program = equations(jax.make_jaxpr(gradient)(parameters))
        shapes = collections.Counter(
            eqn.outvars[0].aval.shape for eqn in program if eqn.primitive.name == "dot_general"
        )
        half = HIDDEN // 2
        return [sum(shapes[shape] for shape in {(rows, half), (half, rows)}) for rows in (WIDTH, WIDTH // 4)]

    turns = 3  # that stand in the program: the first, the last and the loop's
    assert sizes() == [2 * turns, 0]
    assert sizes(kernel={"reduce_scatter": "permute"}) == [2 * turns, 0]


@pytest.mark.quick("full", "keep", "prefetch", "products")
@pytest.mark.parametrize("remat", ["", "products", "full", "keep", "prefetch", "prefetch products"])
def test_no_layer_keeps_what_it_gathered(remat):
    """What a loop leaves for each layer, or writes into what it carries, has a leading axis of the depth, or of the turns between the
    first and the last: a device's kernels, whole and at rest."""
    loops = [each for each in backward_of(remat, depth=5) if each.primitive.name == "scan"]
    left = {var.aval.shape[1:] for loop in loops for var in loop.outvars if var.aval.ndim}
    assert {(WIDTH // 2, HIDDEN // 4), (HIDDEN // 4, WIDTH // 2)} <= left  # gradients
    assert len(left & {(WIDTH, HIDDEN // 4), (HIDDEN // 4, WIDTH)}) == (2 if remat == "keep" else 0)


@pytest.mark.quick("True")
@pytest.mark.parametrize("tied", [False, True])
def test_what_stands_outside_of_loops_is_gathered_again_too(tied):
    """The product behind the loop needs its kernel for the backward pass. A table that is read before the loop too is gathered
    once for both."""

    def f(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), jnp.take(params["table"], x, axis=0), params["w"])
        return (jax.nn.log_softmax(x @ (params["table"] if tied else params["head"]).T) ** 2).mean()

    rng = np.random.default_rng(0)
    shapes = {"table": (40, 8), "w": (3, 8, 8)} | ({} if tied else {"head": (40, 8)})
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    tokens = rng.integers(0, 40, (8, 4))
    wanted = jax.value_and_grad(f)(params, tokens)
    jshard.load({"jshard": {"mesh": {"data": 8}}, "all": {"row": "data", "store": "data", "match": ["**"]}})
    step = jax.value_and_grad(jshard.shard(f))
    value, gradients = jax.jit(step)(params, tokens)
    np.testing.assert_allclose(value, wanted[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradients, wanted[1])
    counts = collections.Counter()
    for line in jshard.explain(step, params, tokens):
        if line.payload == 4 * 40 * 8 and line.cause.key == "store":
            counts[line.collective, line.phase] += line.count
    many = 1 if tied else 2
    again = {} if tied else {("all_gather", "backward"): 1}
    assert counts == {("all_gather", "forward"): many, ("reduce_scatter", "backward"): many} | again


@pytest.mark.quick("2")
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_layer_is_gathered_while_the_one_before_it_computes(depth):
    """Each once forward, the last not again; what is carried has the next layer's kernels, which wait for nothing of this one."""
    jshard.load(PLANS["prefetch"])
    model, alone = jshard.shard(built(depth), X), built(depth)
    step = nnx.value_and_grad(jshard.shard(loss))
    counts = collections.Counter()
    for line in jshard.explain(step, model, X):
        if line.signal in ("up", "down") and line.cause.key == "store" and line.payload > 4 * WIDTH:  # kernels
            counts[line.collective, line.phase] += line.count
    expected = {("all_gather", "forward"): 2 * depth, ("reduce_scatter", "backward"): 2 * depth}
    assert counts == expected | ({("all_gather", "backward"): 2 * (depth - 1)} if depth > 1 else {})
    value, gradients = nnx.jit(step)(model, X)
    wanted = nnx.value_and_grad(loss)(alone, X)
    np.testing.assert_allclose(value, wanted[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradients, wanted[1])
    loops = [each for each in backward_of("prefetch", 5) if each.primitive.name == "scan"]
    for loop in loops:
        body = loop.params["jaxpr"].jaxpr
        behind = set(body.outvars[: scanned(loop)[1]])
        gathers = [eqn for eqn in body.eqns if eqn.primitive.name.startswith("all_gather")]
        assert sum(eqn.outvars[0] in behind for eqn in gathers) >= 2, loop
    assert len(loops) == 2


def test_sums_of_data_parallel_leave_with_each_turn_of_the_backward_loop():
    """In what XLA for CPU made, a layer's sums stand behind its own products, in the loop; those of the head and the loss do not."""
    depth = 5
    jshard.load(claimed({"data": 8, "tensor": 1}))
    model = jshard.shard(built(depth), X)
    text = nnx.jit(nnx.value_and_grad(jshard.shard(loss))).lower(model, X).compile().as_text()
    bytes_of = collections.Counter()
    for each in collectives_in(text):
        bytes_of[each.collective, each.count] += sum(each.payloads)
    kernels = 4 * 2 * WIDTH * HIDDEN
    assert kernels <= bytes_of["all_reduce", depth] < 1.2 * kernels  # a norm's scale, a bias and means besides
    assert 4 * WIDTH * 8 <= bytes_of["all_reduce", 1] < kernels
    program = HloProgram(text)
    loops = [each for each in schedule_of(program) if isinstance(each, Loop) and each.trips == depth]
    turn = [
        "sum" if isinstance(e, Start) else op_name(e.instruction.rest)
        for e in loops[-1].body
        if not isinstance(e, Done)
    ]
    products = [at for at, name in enumerate(turn) if name.endswith("dot_general")]
    assert turn.count("sum") == 1 and len(products) == 4 and products[0] < turn.index("sum"), turn


@pytest.mark.quick(1)
@pytest.mark.parametrize("algorithm", ["xla", "permute"])
def test_sums_of_data_parallel_leave_one_layer_late(algorithm):
    """Of each layer once, its first permute or its sum before the products of the layer before: it waits for nothing of this turn."""
    depth, n = 5, 8
    jshard.load(claimed({"data": n, "tensor": 1}, store={"prefetch": True}, kernel={"all_reduce": algorithm}))
    model, step = jshard.shard(built(depth), X), nnx.value_and_grad(jshard.shard(loss))
    found = collections.Counter()
    for line in jshard.explain(step, model, X):
        if line.signal in ("up", "down") and line.phase == "backward":
            assert (line.cause.key, line.collective) == ("row", "permute" if algorithm == "permute" else "all_reduce")
            found["count"] += line.count
            found["wire"] += line.total
    arrays, size = 3 * depth, depth * (2 * WIDTH * HIDDEN + WIDTH)  # two kernels and a bias
    hops = 2 * (n - 1) if algorithm == "permute" else 1
    assert found == {"count": arrays * hops, "wire": 4 * size * 2 * (n - 1) // n}
    if algorithm == "permute":  # what XLA for CPUs does with many is its own
        return
    text = nnx.jit(step).lower(model, X).compile().as_text()
    order = schedule_of(HloProgram(text))
    last = max(at for at, each in enumerate(order) if isinstance(each, Loop))
    assert not any(isinstance(each, Start) for each in order[:last])  # the loss's sum, too, is behind all of backward
    turn = [
        "sum" if isinstance(each, Start) else op_name(each.instruction.rest).rpartition("/")[2]
        for each in order[last].body
        if not isinstance(each, Done)
    ]
    assert [name for name in turn if name in ("sum", "dot_general")] == ["sum"] + 5 * ["dot_general"]


@pytest.mark.seconds
@pytest.mark.parametrize("store", ["data", PREFETCH], ids=["store", "prefetch"])
def test_gathers_and_scatters_go_by_permutes_where_the_signal_says_so(store):
    """Each is n - 1 permutes of as many bytes, for the same reason: of weights and their gradients, and of the sequence."""
    mesh, found = {"data": 4, "tensor": 2}, []
    for words, kinds in (({}, ("all_gather", "reduce_scatter")), ({"kernel": PERMUTES}, ("permute",))):
        jshard.load(claimed(mesh, store=store, sequence="tensor", **words))
        model = jshard.shard(built(), X)
        step = nnx.value_and_grad(jshard.shard(loss))
        counts, wire = collections.Counter(), collections.Counter()
        for line in jshard.explain(step, model, X):
            if line.collective != "all_reduce":
                assert line.collective in kinds
                key = line.signal, line.cause.key, line.phase, line.axis
                counts[key] += line.count * (1 if words else mesh[line.axis] - 1)
                wire[key] += line.total
        found.append((counts, wire))
    assert found[0] == found[1]
    assert {(key, axis) for _, key, _, axis in found[1][0]} == {("store", "data"), ("sequence", "tensor")}
    text = nnx.jit(step).lower(model, X).compile().as_text()
    assert "collective-permute" in text and not {"all-gather(", "reduce-scatter("} & set(text.split())


@pytest.mark.seconds
@pytest.mark.parametrize(
    "plan",
    ["prefetch", "prefetch products", "prefetch parts", "prefetch permutes", "late sums", "late sums of psum"],
)
def test_layers_that_are_gathered_ahead_are_proven(plan):
    jshard.load(PLANS[plan])
    proof = jshard.verify(jshard.shard(loss), built(3), X)
    assert proof.ok and {each.verdict for each in proof.findings} == {"bitwise"}, proof


def test_a_loop_from_the_last_layer_to_the_first_that_counts():
    """Whole numbers are carried, gone along and left; a layer closes over what is differentiated."""

    def f(params, x):
        def layer(carry, each):
            x, count = carry
            w, number = each
            x = jnp.tanh(x @ w) * scale + number
            return (x, count + number), (x.sum(), number)

        scale = params["scale"] * 2
        (x, count), (sums, numbers) = jax.lax.scan(layer, (x, 0), (params["w"], jnp.arange(4)), reverse=True)
        return (x**2).mean() + (sums * numbers).mean() + count

    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(4, 8, 8)).astype(np.float32), "scale": rng.normal(size=8).astype(np.float32)}
    wanted = jax.value_and_grad(f)(params, X[:, 0, :8])
    signal = {"row": "data", "store": PREFETCH, "match": ["**"]}
    jshard.load({"jshard": {"mesh": {"data": 4, "tensor": 2}}, "all": signal})
    got = jax.jit(jax.value_and_grad(jshard.shard(f)))(params, X[:, 0, :8])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max()), got, wanted)


def test_layers_that_say_what_is_computed_anew_are_not_gathered_ahead():
    jshard.load({"jshard": {"mesh": {"data": 8}}, "all": {"row": "data", "store": PREFETCH, "match": ["**"]}})
    layer = jax.checkpoint(lambda x, w: (x @ w, None))
    with pytest.raises(JShardError) as told:
        jshard.shard(lambda params, x: jax.lax.scan(layer, x, params["w"])[0])(
            {"w": np.ones((2, 8, 8))}, np.ones((8, 8))
        )
    line = layer.__wrapped__.__code__.co_firstlineno + 2
    assert str(told.value) == (
        f'signal "all" (<dict>) says store.prefetch (<dict>) for layers that say themselves what is computed anew '
        f"(test_stack.py:{line}); remove one: of layers that are gathered ahead their input is kept, and what `remat` says"
    )


def test_a_layer_that_knows_no_next_one_is_not_gathered_ahead():
    jshard.load({"jshard": {"mesh": {"data": 8}}, "up": {"row": "data", "store": PREFETCH}})
    with jshard.signal("up"), pytest.raises(JShardError) as told:
        jshard.Linear(8, 8, rngs=nnx.Rngs(0))(np.ones((8, 8)))
    assert str(told.value) == (
        'signal "up" (<dict>) says store.prefetch (<dict>) for a layer that does not know which is the next; '
        "build the layers with jshard.stack, claim them by match, and run the model by jshard.shard"
    )


def test_two_words_for_the_layers_of_one_loop_are_a_sentence():
    config = claimed({"data": 2, "tensor": 4})
    config["up"]["remat"], config["down"]["remat"] = "full", "products"
    jshard.load(config)
    with pytest.raises(JShardError) as told:
        jshard.shard(built(), X)
    assert str(told.value) == (
        'signal "down" (<dict>) and signal "up" (<dict>) (<dict>) say different remat for the layers of one loop; '
        "give both the same: the layers of a loop are computed anew as a whole"
    )


@pytest.mark.parametrize("depth", [0, True, "4"])
def test_no_layers_are_a_sentence(depth):
    with pytest.raises(JShardError) as told:
        jshard.stack(Block, depth, rngs=nnx.Rngs(0))
    assert str(told.value) == f"jshard.stack of {depth!r} layers; give it 1 or more"
    with pytest.raises(JShardError) as told:
        jshard.stack(Block, 2, rngs=nnx.Rngs(0), unroll=depth)
    assert str(told.value) == f"jshard.stack of {depth!r} layers unrolled; give it 1 or more"


class Explicit(nnx.Module):
    def __init__(self, *, rngs):
        with jshard.signal("up"):
            self.up = jshard.Linear(WIDTH, HIDDEN, rngs=rngs)
        with jshard.signal("down"):
            self.down = jshard.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


def test_layers_of_jshard_are_born_split_and_see_the_signals_around():
    run = nnx.jit(nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean()))
    expected = run(jshard.stack(Explicit, 3, rngs=nnx.Rngs(0)), X)
    column, reduction = {"row": "data", "column": "tensor"}, {"row": "data", "reduction": "tensor"}
    signals = {"blocks": {"remat": "full"}, "blocks/up": column, "blocks/down": reduction}
    jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 4}}, **signals})
    with jshard.signal("blocks"):
        model = jshard.stack(Explicit, 3, rngs=nnx.Rngs(0))
    assert model.up.kernel[...].sharding.spec == jax.P(None, None, "tensor")
    value, gradients = run(model, X)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradients, expected[1])
    told = {(line.cause.signal, line.collective, line.count) for line in jshard.explain(run, model, X).lines}
    assert ("blocks/down", "all_reduce", 3) in told


@pytest.mark.seconds
def test_numbers_are_the_same_on_every_mesh():
    made = []
    for mesh in ({"data": 2, "tensor": 4}, {"data": 8, "tensor": 1}, {"data": 1, "tensor": 1}):
        jshard.load(claimed(mesh, store="data"))
        made.append(nnx.state(created(drawing, lambda: jshard.shard(drawing(), X)), nnx.Param))
    for other in made[1:]:
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, made[0]), jax.tree.map(np.asarray, other))

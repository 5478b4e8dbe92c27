"""`jshard.shard`: Flax's own layers and models of them, unmodified, equal one device under every plan."""

from __future__ import annotations

import collections
import contextlib
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jshard
from jshard.errors import JShardError
from jshard.layers.gradients import accumulated
from jshard.layers.sharding import objective_of, partitioned
from jshard.layouts.layout import Layout
from jshard.programs.jaxprs import equations

rng = np.random.default_rng(0)
WIDTH, WORDS, HEADS = 32, 64, 4


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.before = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 64, rngs=rngs), nnx.Linear(64, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(self.before(x))))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def cross_entropy(model, tokens, targets):
    logs = jax.nn.log_softmax(model(tokens))
    return -jnp.take_along_axis(logs, targets[..., None], -1).mean()


COLUMNS = ["blocks/*/attention/{query,key,value}/**", "blocks/*/up/**"]
SUMS = ["blocks/*/attention/out/**", "blocks/*/down/**", "embed/**"]


def tensor_parallel(mesh, **words):
    rest = {key: word for key, word in words.items() if key == "store"}
    return {
        "jshard": {"mesh": mesh},
        "columns": {"row": "data", "column": "tensor", "match": COLUMNS, **words},
        "sums": {"row": "data", "reduction": "tensor", "match": SUMS, **words},
        "rest": {"row": "data", "match": ["**"], **rest},
    }


PLANS = {
    "data": {"jshard": {"mesh": {"data": 8}}, "rest": {"row": "data", "match": ["**"]}},
    "fsdp": {"jshard": {"mesh": {"data": 4}}, "rest": {"row": "data", "store": "data", "match": ["**"]}},
    "tensor": tensor_parallel({"data": 2, "tensor": 4}),
    "tensor and sequence": tensor_parallel({"data": 2, "tensor": 4}, sequence="tensor"),
    "tensor and fsdp": tensor_parallel({"data": 2, "tensor": 4}, store="data"),
}
# Two blocks: an all-reduce of activations behind the lookup, the attention and the MLP, and as many backward. With `sequence`
# each is a scatter and a gather. FSDP gathers each of 33 parameters, those that are
# multiplied by again backward (six kernels and two scales of a block, the last scale, the table), and scatters each gradient once.
ACTIVATIONS = 8 * 8 * WIDTH * 4 // 2
COUNTS = {
    "data": {},
    "fsdp": {
        ("all_gather", "forward", "data"): 33, ("all_gather", "backward", "data"): 18,
        ("reduce_scatter", "backward", "data"): 33,
    },
    "tensor": {("all_reduce", "forward", "tensor"): 5, ("all_reduce", "backward", "tensor"): 5},
    "tensor and sequence": {
        ("all_gather", "forward", "tensor"): 5, ("reduce_scatter", "forward", "tensor"): 5,
        ("all_gather", "backward", "tensor"): 5, ("reduce_scatter", "backward", "tensor"): 5,
    },
    "tensor and fsdp": {
        ("all_reduce", "forward", "tensor"): 5, ("all_reduce", "backward", "tensor"): 5,
        ("all_gather", "forward", "data"): 33, ("all_gather", "backward", "data"): 18,
        ("reduce_scatter", "backward", "data"): 33,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def dense():
    batch = rng.integers(0, WORDS, (2, 8, 8)).astype(np.int32)
    jshard.unload()
    loss, gradients = nnx.jit(nnx.value_and_grad(cross_entropy))(Decoder(nnx.Rngs(0)), *batch)
    return batch, loss, jax.device_get(gradients)


@pytest.mark.seconds
@pytest.mark.parametrize("plan", PLANS)
def test_a_decoder_of_flax_layers_equals_one_device(dense, plan):
    batch, loss, gradients = dense
    jshard.load(PLANS[plan])
    model = jshard.shard(Decoder(nnx.Rngs(0)), batch[0])
    assert isinstance(model, Decoder)
    assert type(model).__name__ == "Decoder"
    sharded = jshard.shard(cross_entropy)
    got, found = nnx.jit(nnx.value_and_grad(sharded))(model, *batch)
    np.testing.assert_allclose(got, loss, rtol=1e-6)
    placed = nnx.to_flat_state(nnx.state(model, nnx.Param))
    for (path, parameter), (_, want), (_, gradient) in zip(
        placed, nnx.to_flat_state(gradients), nnx.to_flat_state(found), strict=True
    ):
        np.testing.assert_allclose(
            gradient[...], want[...], rtol=1e-4, atol=1e-5 * np.abs(want[...]).max() + 1e-7, err_msg=str(path)
        )
        assert gradient.get_value().sharding == parameter.get_value().sharding, path


@pytest.mark.quick("tensor and fsdp")
@pytest.mark.parametrize("plan", PLANS)
def test_a_decoder_asks_for_what_its_plan_costs_and_no_more(dense, plan):
    batch = dense[0]
    jshard.load(PLANS[plan])
    model = jshard.shard(Decoder(nnx.Rngs(0)), batch[0])
    sharded = jshard.shard(cross_entropy)
    ledger = jshard.explain(lambda model, *batch: nnx.value_and_grad(sharded)(model, *batch), model, *batch)
    counts = collections.Counter()
    for line in ledger:
        # numbers for each row or word are beside what is counted here
        if line.payload >= ACTIVATIONS // 4 and line.mesh_axes == ("tensor",) or line.collective != "all_reduce":
            counts[line.collective, line.phase, line.mesh_axes[0]] += line.count
        assert line.signal != "-", line
    assert dict(counts) == COUNTS[plan]


def spec(variable):
    return variable.get_value().sharding.spec


def test_the_first_product_of_a_parameter_tells_what_the_words_mean():
    jshard.load(PLANS["tensor"])
    model = jshard.shard(Decoder(nnx.Rngs(0)), np.zeros((8, 8), np.int32))
    block = model.blocks[0]
    assert spec(block.attention.query.kernel) == jax.P(None, "tensor", None)  # width, heads, numbers of a head
    assert spec(block.attention.query.bias) == jax.P("tensor", None)  # as what it is added to
    assert spec(block.attention.out.kernel) == jax.P("tensor", None, None)
    assert spec(block.attention.out.bias) == jax.P(None)
    assert spec(block.up.kernel) == jax.P(None, "tensor")
    assert spec(block.up.bias) == jax.P("tensor")
    assert spec(block.down.kernel) == jax.P("tensor", None)
    assert spec(model.embed.embedding) == jax.P("tensor", None)  # looked up: a product with one-hot rows
    assert spec(block.norm.scale) == jax.P(None)


class Vision(nnx.Module):
    """Statistics, random numbers and a loop: state that a call changes."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(4, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.groups = nnx.GroupNorm(8, num_groups=2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.general = nnx.LinearGeneral(8, (2, 4), rngs=rngs)
        self.einsum = nnx.Einsum("bhk,hkd->bhd", (2, 4, 8), rngs=rngs)
        self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(8, 8, rngs=rngs))

    def __call__(self, x):
        x = self.groups(nnx.relu(self.norm(self.conv(x))))
        x = self.dropout(x.mean((1, 2)))
        return self.rnn(self.einsum(self.general(x)))


VISION = {
    "jshard": {"mesh": {"data": 2, "tensor": 2}},
    "columns": {"row": "data", "column": "tensor", "match": ["conv/**", "general/**"]},
    "rest": {"row": "data", "store": "data", "match": ["**"]},
}


@pytest.mark.seconds
def test_state_that_a_call_changes_is_that_of_one_device():
    x = rng.normal(size=(4, 4, 4, 4)).astype(np.float32)
    jshard.unload()
    alone = Vision(nnx.Rngs(0))
    jshard.load(VISION)
    model = jshard.shard(Vision(nnx.Rngs(0)), x)
    assert spec(model.conv.kernel) == jax.P(None, None, None, "tensor")
    for _ in range(2):  # other random numbers the second time
        jshard.unload()
        want = alone(x)
        jshard.load(VISION)
        np.testing.assert_allclose(model(x), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.norm.mean[...], alone.norm.mean[...], rtol=1e-5, atol=1e-6)
    assert model.dropout.rngs.count[...] == alone.dropout.rngs.count[...] == 2


class Cached(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(4, 16, decode=True, rngs=rngs)

    def __call__(self, x):
        return self.attention(x)


@pytest.mark.seconds
def test_a_cache_of_keys_and_values_is_split_as_what_is_written_to_it():
    x = rng.normal(size=(2, 3, 1, 16)).astype(np.float32)
    jshard.unload()
    alone = Cached(nnx.Rngs(0))
    alone.attention.init_cache((2, 4, 16))
    want = [alone(x[:, at]) for at in range(3)]
    jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 4}}, "heads": {"row": "data", "column": "tensor",
                 "match": ["attention/{query,key,value}/**"]}, "rest": {"row": "data", "match": ["**"]}})  # fmt: skip
    model = Cached(nnx.Rngs(0))
    model.attention.init_cache((2, 4, 16))
    model = jshard.shard(model, x[:, 0])
    for at in range(3):
        np.testing.assert_allclose(model(x[:, at]), want[at], rtol=1e-5, atol=1e-6)
    assert spec(model.attention.cached_key) == jax.P("data", None, "tensor", None)
    np.testing.assert_allclose(
        model.attention.cached_value[...], alone.attention.cached_value[...], rtol=1e-5, atol=1e-6
    )


LOOKED_UP = {
    "few rows": ((8, 2), {}, {("all_gather", 8 * 2 * 4), ("all_to_all", 2 * 2 * 16 * 4)}),
    "more rows than words": ((8, 40), {}, {("all_gather", 20 * 16 * 4), ("reduce_scatter", 20 * 16 * 4)}),
    "a product reads it too": ((8, 2), {"tied": True}, {("all_gather", 20 * 16 * 4), ("reduce_scatter", 20 * 16 * 4)}),
    "words are split": ((8, 2), {"words": "column"}, {("all_gather", 40 * 8 * 4), ("reduce_scatter", 40 * 8 * 4)}),
}


@pytest.mark.quick("words are split")
@pytest.mark.parametrize("case", LOOKED_UP)
def test_answers_of_a_stored_table_travel_where_they_are_fewer_than_its_numbers(case):
    """Each device looks up the rows of all in the numbers that it holds of every word, and sends the answers to their rows."""
    shape, words, expected = LOOKED_UP[case]

    def f(params, tokens):
        x = jnp.take(params["table"], tokens, axis=0).astype(jnp.float32)
        return ((x @ params["table"].T if words.get("tied") else x * params["scale"]) ** 2).mean()

    table = {"row": "data", words.get("words", "reduction"): "tensor", "store": "data", "match": ["table"]}
    params = {"table": rng.normal(size=(40, 16)).astype(np.float32), "scale": np.ones(16, np.float32)}
    tokens = rng.integers(-40, 40, shape, dtype=np.int32)  # from the end too
    wanted = jax.value_and_grad(f)(params, tokens)
    jshard.load(
        {"jshard": {"mesh": {"data": 4, "tensor": 2}}, "table": table, "rest": {"row": "data", "match": ["**"]}}
    )
    step = jax.value_and_grad(jshard.shard(f))
    value, gradients = jax.jit(step)(params, tokens)
    np.testing.assert_allclose(value, wanted[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradients, wanted[1])
    stored = [line for line in jshard.explain(step, params, tokens) if line.cause.key == "store"]
    assert {(line.collective, line.payload) for line in stored} == expected
    proof = jshard.verify(jshard.shard(f), params, tokens)
    assert proof.ok and {each.verdict for each in proof.findings} == {"bitwise"}, proof


class Ours(nnx.Module):
    def __init__(self, rngs):
        with jshard.signal("up"):
            self.up = jshard.Linear(8, 16, rngs=rngs)
        with jshard.signal("down"):
            self.down = jshard.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def test_layers_of_jshard_ask_for_the_same_under_shard_as_by_themselves():
    jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 4}}, "up": {"row": "data", "column": "tensor"},
                 "down": {"row": "data", "reduction": "tensor", "store": "data"}})  # fmt: skip
    model, x = Ours(nnx.Rngs(0)), jnp.ones((4, 8))
    x = jshard.place(x, jax.P("data"))

    def loss(model, x):
        return jnp.mean(model(x) ** 2)

    def lines(loss):
        ledger = jshard.explain(lambda model, x: nnx.value_and_grad(loss)(model, x), model, x)
        return sorted(
            (line.signal, line.phase, line.collective, line.mesh_axes, line.payload)
            for line in ledger
            if line.signal != "-"
        )

    ours, shards = lines(loss), lines(jshard.shard(loss))
    assert [line for line in shards if line in ours] == ours
    assert [line[1:] for line in shards if line not in ours] == [
        ("forward", "all_reduce", ("data",), 4)
    ]  # the mean's own


def test_of_a_model_that_is_only_described_shapes_say_where_they_will_lie():
    jshard.load(PLANS["tensor and fsdp"])
    described = nnx.eval_shape(lambda: Decoder(nnx.Rngs(0)))
    nnx.reseed(described, default=0)
    model = jshard.shard(described, jax.ShapeDtypeStruct((8, 8), np.int32))
    kernel = model.blocks[0].up.kernel.get_value()
    assert isinstance(kernel, jax.ShapeDtypeStruct)
    assert kernel.sharding == jax.NamedSharding(jshard.mesh(), jax.P("data", "tensor"))


@pytest.mark.seconds
def test_a_scatter_of_parts_that_are_no_whole_tiles_is_an_all_to_all_on_tpus(dense):
    batch, *_ = dense
    jshard.load(PLANS["tensor and sequence"])
    model = jshard.shard(Decoder(nnx.Rngs(0)), batch[0])
    with jshard.kernels.interpret(chip="v5e"):  # where XLA would run it as an all-reduce
        step = nnx.value_and_grad(jshard.shard(cross_entropy))
        ledger = jshard.explain(lambda model, *batch: step(model, *batch), model, *batch)
    found = collections.Counter()
    for line in ledger:
        if line.collective != "all_reduce":
            assert line.cause.key == "sequence"
            found[line.collective, line.phase, line.total] += line.count
    wire = ACTIVATIONS * 3 // 4
    assert found == {
        (each, phase, wire): 5 for each in ("all_gather", "all_to_all") for phase in ("forward", "backward")
    }


@pytest.mark.quick(1)
@pytest.mark.parametrize("chip", ["v5e", None])
def test_a_head_sends_its_gradient_before_the_rest_of_backward_on_tpus(chip):
    """Of a loss of one chunk. XLA for TPU would send it last, and keep all of it until then. What has no gradient waits for
    nothing."""
    row = {"row": "data", "store": "data"}
    signals = {name: {**row, "match": [name]} for name in ("layers", "head")}
    jshard.load({"jshard": {"mesh": {"data": 4}}, **signals})
    params = {
        "layers": rng.normal(size=(2, 8, 8)).astype(np.float32),
        "head": rng.normal(size=(8, 64)).astype(np.float32),
    }
    x, weights = rng.normal(size=(8, 8)).astype(np.float32), rng.normal(size=(8, 64)).astype(np.float32)

    def loss(params, x, weights):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
        chunk = lambda total, some: (total + jnp.sum(some[0] @ params["head"] * some[1]), None)
        return jax.lax.scan(chunk, 0.0, (x[None], weights[None]))[0]

    def gradient_of(name, f, params):
        return lambda own: jax.grad(lambda own: f({**params, name: own}, x, weights))(own)

    placed = jshard.shard(loss).place(params, x, weights)
    with contextlib.nullcontext() if chip is None else jshard.kernels.interpret(chip=chip):
        programs = {}
        for name, own in placed.items():
            ours = gradient_of(name, jshard.shard(loss), placed)
            programs[name], found = jax.make_jaxpr(ours)(own), jax.jit(ours)(own)
            np.testing.assert_allclose(found, gradient_of(name, loss, params)(params[name]), rtol=1e-5, atol=1e-5)
            assert found.sharding == own.sharding
    count = lambda name, *ops: sum(eqn.primitive.name in ops for eqn in equations(programs[name]))
    assert [count(name, "reduce_scatter", "all_to_all") for name in params] == [2 if chip else 1, 1]
    assert [count(name, "min") for name in params] == [2 if chip else 0, 0]


GATHERED = {
    "a bias": lambda params, x: x @ params["w"] + params["b"],
    "nothing": lambda params, x: jnp.sin(x @ params["w"]),
    "rows": lambda params, x: x @ params["w"] + jnp.cos(x),
    "itself": lambda params, x: (lambda y: y + y)(x @ params["w"]),
    "a bias, and it is read again": lambda params, x: (lambda y: y * (y + params["b"]))(x @ params["w"]),
}


@pytest.mark.parametrize("added", GATHERED)
def test_columns_are_gathered_once_whatever_is_added(added):
    """A bias before, split as it rests; all else behind."""
    params, x = {"w": rng.normal(size=(8, 8)).astype(np.float32), "b": np.arange(8, dtype=np.float32)}, np.ones((4, 8))
    f, x = GATHERED[added], x.astype(np.float32)
    words = {"column": "tensor", "output": "gather", "match": ["**"]}
    jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 4}}, "all": words})
    found = jshard.shard(f)(params, x)
    np.testing.assert_allclose(found, f(params, x), rtol=1e-5, atol=1e-6)
    assert found.sharding.is_fully_replicated
    placed = jshard.shard(f).place(params, x)
    assert placed["b"].sharding.is_fully_replicated == (added != "a bias")
    ledger = jshard.explain(jshard.shard(f), placed, x)
    (line,) = ledger.only(phase="forward")
    assert (line.collective, line.payload, line.cause.key) == ("all_gather", 4 * 8 * 4, "output")


class SideBySide(nnx.Module):
    def __init__(self, rngs):
        with jshard.signal("heads"):
            self.q, self.k, self.v = (jshard.Linear(8, 16, rngs=rngs) for _ in range(3))

    def __call__(self, x):
        x = jnp.sin(x)
        return self.q(x) * self.k(x) + self.v(x)


@pytest.mark.parametrize(("words", "costs"), [
    ({"row": "data", "column": "tensor"}, [("backward", "all_reduce")]),
    ({"column": "tensor", "sequence": "tensor"}, [("backward", "reduce_scatter"), ("forward", "all_gather")]),
], ids=["tensor", "sequence"])  # fmt: skip
def test_three_layers_of_jshard_side_by_side_bring_their_input_once(words, costs):
    jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 4}}, "heads": words})
    model, place = SideBySide(nnx.Rngs(0)), jax.P(None, "tensor") if "sequence" in words else jax.P("data")
    x = jshard.place(jnp.ones((2, 8, 8)), place)

    def called(model, x):
        graphdef, state = nnx.split(model)
        pull = jax.vjp(lambda x: jshard.shard(SideBySide.__call__)(nnx.merge(graphdef, state), x), x)[1]
        return pull(jnp.ones((2, 8, 16)))

    ledger = jshard.explain(called, model, x)
    of_x = [line for line in ledger if line.mesh_axes == ("tensor",) and line.payload]
    assert sorted((line.phase, line.collective) for line in of_x for _ in range(line.count)) == costs


def test_a_function_that_only_closes_over_its_model_is_told():
    jshard.load({"jshard": {"mesh": {"data": 8}}, "heads": {"row": "data"}})
    net = SideBySide(nnx.Rngs(0))

    def forward(x):
        return net(x)

    with pytest.raises(JShardError) as error:
        jshard.shard(forward)(jnp.ones((8, 8)))
    assert str(error.value) == (
        f"forward (test_sharding.py:{forward.__code__.co_firstlineno}) uses the model net and does not take it: its "
        "parameters would not be placed, and stay what they are now; give it net as an argument"
    )


@pytest.mark.parametrize("of", ["a function", "a method"])
def test_clear_caches_of_jax_forgets_what_was_traced(of):
    """A call behind it traces anew, and what its programs held is free."""
    jshard.load({"jshard": {"mesh": {"data": 8}}, "rest": {"row": "data", "match": ["**"]}})
    traced = []

    class Traced:
        def loss(self, x):
            traced.append(1)
            return jnp.sum(x)

    run = jshard.shard((lambda x: Traced().loss(x)) if of == "a function" else Traced().loss)
    x = np.ones((8, 2), np.float32)
    assert [float(run(x)) for _ in range(2)] == [16.0, 16.0] and len(traced) == 1
    jax.clear_caches()
    assert float(run(x)) == 16.0 and len(traced) == 2


def test_what_a_function_closes_over_goes_with_it():
    jshard.load({"jshard": {"mesh": {"data": 8}}, "rest": {"row": "data"}})
    kept = []

    def run():
        shift = jnp.arange(8.0)
        kept.append(weakref.ref(shift))
        return jshard.shard(lambda x: x + shift)(np.zeros((8, 8), np.float32))

    np.testing.assert_array_equal(run()[3], np.arange(8))
    gc.collect()
    assert kept[0]() is None


def test_without_a_configuration_everything_runs_as_it_is():
    jshard.unload()
    model = jshard.shard(Ours(nnx.Rngs(0)))
    x = np.ones((4, 8), np.float32)
    np.testing.assert_array_equal(model(x), Ours(nnx.Rngs(0))(x))
    assert jshard.shard(lambda x: x + 1)(1) == 2


class ByName(nnx.Module):
    def __init__(self, rngs):
        self.up, self.balance = nnx.Linear(8, 16, rngs=rngs), jshard.AuxLoss(jnp.zeros(()))

    def __call__(self, *, x):
        self.balance[...] = 3 * jnp.ones(())
        return self.up(x)


def test_a_model_is_sharded_once_and_keeps_its_name_and_what_is_given_by_name_places_it():
    jshard.load({"jshard": {"mesh": {"data": 8}}, "rest": {"row": "data", "store": "data", "match": ["**"]}})
    x = np.ones((8, 8), np.float32)
    model = jshard.shard(jshard.shard(ByName(nnx.Rngs(0))), x=x)
    assert model.up.kernel[...].sharding.spec == P("data", None)
    assert isinstance(model, ByName) and type(model).__bases__ == (ByName,)
    assert (type(model).__name__, type(model).__module__) == ("ByName", __name__)
    assert type(model).__call__.__qualname__ == "ByName.__call__"
    value = objective_of(lambda model, x: jnp.sum(model(x=x)))(model, x)
    np.testing.assert_allclose(value, np.sum(ByName(nnx.Rngs(0))(x=x)) + 3, rtol=1e-6)


def test_a_function_keeps_its_name_and_one_of_the_model_is_partitioned_where_the_model_is():
    def f(model, x):
        return model(x)

    jshard.unload()
    assert jshard.shard(f).__name__ == "f"
    assert jshard.shard(f).place(1, 2) == ()
    model = Ours(nnx.Rngs(0))
    assert partitioned(model, f) is f
    assert partitioned(jshard.shard(model), f) is not f


def test_a_function_places_the_models_that_it_takes_without_a_run():
    def f(model, x, params):
        return model(x=x) @ params["w"]

    jshard.load({"jshard": {"mesh": {"data": 8}}, "rest": {"row": "data", "store": "data", "match": ["**"]}})
    model, params = ByName(nnx.Rngs(0)), {"w": np.ones((16, 8), np.float32)}
    placed = jshard.shard(f).place(model, jax.ShapeDtypeStruct((8, 8), np.float32), params)
    assert [x.sharding.spec for x in (model.up.kernel[...], placed["w"])] == [P("data", None)] * 2
    assert float(model.balance[...]) == 0


@pytest.mark.parametrize("claimed", [True, False])
def test_of_several_trees_of_parameters_all_are_placed(claimed):
    def f(params, other):
        return params["w"] @ other["params"]["w"]

    jshard.unload()
    if claimed:
        jshard.load({"jshard": {"mesh": {"data": 8}}, "rest": {"store": "data", "match": ["**"]}})
    w = np.ones((8, 8), np.float32)
    given = {"w": w}, {"params": {"w": w}}
    placed = jshard.shard(f).place(*given)
    assert isinstance(placed, tuple) and jax.tree.structure(placed) == jax.tree.structure(given)
    assert [isinstance(x, jax.Array) and x.sharding.spec == P("data", None) for x in jax.tree.leaves(placed)] == [
        claimed
    ] * 2


class Callable:
    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            lambda: jshard.shard(3),  # type: ignore[call-overload]
            "jshard.shard was given an int; give it a Flax model, or a function that takes one",
        ),
        (
            lambda: jshard.shard(Callable(), x=1),  # type: ignore[call-overload]
            "jshard.shard was given arguments for Callable, which holds no parameters; write shard(Callable).place(...), which "
            "returns them placed",
        ),
    ],
)
def test_what_is_no_program_and_arguments_by_name_are_a_sentence_each(given, sentence):
    with pytest.raises(JShardError) as error:
        given()
    assert str(error.value) == sentence


MISTAKES = {
    "rows": (
        {"jshard": {"mesh": {"data": 2, "tensor": 4}}, "a": {"row": "data", "match": ["up/**"]}, "b": {"row": "tensor", "match": ["**"]}},
        'signal "b" (<dict>) splits rows over tensor, and signal "a" (<dict>) over data; give both the same row: a batch is split one way',
    ),
    "column": (
        {"jshard": {"mesh": {"data": 3}}, "a": {"column": "data", "match": ["**"]}},
        'signal "a" (<dict>) splits axis 1 of "down/kernel" (16, 8) claimed at <dict> over mesh axis "data" of size 3; use 6 or 9, or claim it without column',
        'signal "a" (<dict>) splits axis 1 of "up/kernel" (8, 16) claimed at <dict> over mesh axis "data" of size 3; use 15 or 18, or claim it without column',
    ),
    "remat": (
        {"jshard": {"mesh": {"data": 2}}, "a": {"row": "data", "remat": True, "match": ["**"]}},
        'signal "a" (<dict>) says remat, which jshard.shard does for layers in a loop, and none of its parameters is in a loop; '
        "build the layers with jshard.stack",
    ),
    "prefetch": (
        {"jshard": {"mesh": {"data": 2}}, "a": {"row": "data", "store": {"parameters": "data", "prefetch": True}, "match": ["**"]}},
        'signal "a" (<dict>) says store.prefetch, which jshard.shard does for layers in a loop, and none of its parameters is in a '
        "loop; build the layers with jshard.stack",
    ),
    "remat on auto": (
        {"jshard": {"mesh": {"data": 2}, "axis_types": "auto"}, "a": {"row": "data", "remat": True, "match": ["**"]}},
        'signal "a" (<dict>) says remat, which jshard.shard does for layers in a loop, and not on axis_types: auto; '
        "remove remat, and wrap the layer in nnx.remat",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_can_not_be_done_is_a_sentence_each(mistake):
    class Plain(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            return self.down(self.up(x))

    configuration, *sentences = MISTAKES[mistake]
    jshard.load(configuration)
    with pytest.raises(JShardError) as error:
        jshard.shard(Plain(nnx.Rngs(0)), np.ones((12, 8), np.float32))
    assert str(error.value).splitlines() == sentences


def test_an_array_that_lies_on_the_mesh_stays_as_it_is():
    jshard.load(PLANS["tensor"])
    f = jshard.shard(lambda x, y: (x * y, x.sum()))
    x = jshard.place(np.ones((8, 8), np.float32), jax.P(None, "tensor"))
    product, total = f(x, np.ones((8, 8), np.float32))
    assert Layout.of(product).axes == ((), ("tensor",))
    assert total == 64


class Experts(nnx.Module):
    """Stacked kernels, of which a loop in Python takes one after the other."""

    def __init__(self, rngs):
        self.up = nnx.Param(jax.random.normal(rngs.params(), (8, WIDTH, 64)))
        self.down = nnx.Param(jax.random.normal(rngs.params(), (8, 64, WIDTH)))

    def __call__(self, x):
        return sum(nnx.relu(x @ self.up[at]) @ self.down[at] for at in range(8))


@pytest.mark.seconds
def test_pieces_of_a_parameter_lie_as_its_words_say():
    def loss(model, x):
        return jnp.square(model(x)).sum()

    x = rng.normal(size=(8, WIDTH)).astype(np.float32)
    jshard.unload()
    wanted = jax.device_get(nnx.grad(loss)(Experts(nnx.Rngs(0)), x))
    words = {"row": "data", "store": "data"}
    jshard.load({
        "jshard": {"mesh": {"data": 2, "tensor": 4}},
        "up": {**words, "column": "tensor", "match": ["up"]},
        "down": {**words, "reduction": "tensor", "match": ["down"]},
    })  # fmt: skip
    model, sharded = jshard.shard(Experts(nnx.Rngs(0)), x), jshard.shard(loss)
    assert [spec(model.up), spec(model.down)] == [P(None, "data", "tensor"), P(None, "tensor", "data")]
    got = nnx.jit(nnx.grad(sharded))(model, x)
    for name in ("up", "down"):
        want = wanted[name][...]
        np.testing.assert_allclose(got[name][...], want, rtol=1e-4, atol=1e-5 * np.abs(want).max())
        assert spec(got[name]) == spec(getattr(model, name))
    ledger = jshard.explain(lambda *args: nnx.grad(sharded)(*args), model, x)
    moved = [(line.collective, line.signal, line.count) for line in ledger if line.mesh_axes == ("data",)]
    assert sorted(moved) == [
        ("all_gather", "down", 1), ("all_gather", "down", 1), ("all_gather", "up", 1),
        ("reduce_scatter", "down", 1), ("reduce_scatter", "up", 1),
    ]  # fmt: skip


class Start(nnx.Module):
    """A state that is the same in each row, until the first one is seen."""

    def __init__(self, rngs):
        self.start = nnx.Param(jax.random.normal(rngs.params(), (4,)))

    def __call__(self, x):
        return x * jnp.concatenate([jnp.broadcast_to(self.start[...], (8, 4)), jnp.ones((8, 4))], 1)


def test_a_state_made_of_parameters_is_born_in_parts():
    x = np.ones((8, 8), np.float32)
    jshard.load({"jshard": {"mesh": {"data": 8}}, "all": {"row": "data", "match": ["**"]}})
    model, sharded = Start(nnx.Rngs(0)), jshard.shard(lambda model, x: jnp.sum(model(x)))
    ledger = jshard.explain(lambda *args: nnx.grad(sharded)(*args), model, x)
    assert [(line.collective, line.shape) for line in ledger] == [("all_reduce", (4,))]


class Joined(nnx.Module):
    """Queries, keys and values of one kernel, told apart as GPT-2 does it, or by a reshape as many vision transformers do."""

    def __init__(self, form, rngs):
        self.form = form
        self.qkv, self.out = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.qkv.bias[...] = jnp.arange(3 * WIDTH) / 50.0

    def __call__(self, x):
        y = self.qkv(x)
        if self.form == "split":
            q, k, v = (piece.reshape(*x.shape[:2], HEADS, -1) for piece in jnp.split(y, 3, -1))
        else:
            y = y.reshape(*x.shape[:2], 3, HEADS, -1)
            q, k, v = (y[:, :, at] for at in range(3))
        return self.out(jax.nn.dot_product_attention(q, k, v).reshape(x.shape))


@pytest.mark.seconds
@pytest.mark.parametrize("form", ["split", "reshape"])
@pytest.mark.parametrize("words", [{}, {"store": "data"}, {"sequence": "tensor"}], ids=str)
def test_a_joined_kernel_is_cut_and_not_what_it_makes(form, words):
    """Each device's columns of it are not those of its heads: two rounds of a twelfth of the kernel bring them there."""
    loss = lambda model, x: jnp.sin(model(x)).sum()
    x = rng.normal(size=(8, 8, WIDTH)).astype(np.float32)
    jshard.unload()
    want = nnx.value_and_grad(loss)(Joined(form, nnx.Rngs(0)), x)
    store = {key: word for key, word in words.items() if key == "store"}
    jshard.load({
        "jshard": {"mesh": {"data": 2, "tensor": 4}},
        "heads": {"row": "data", "column": "tensor", "match": ["qkv/**"], **words},
        "sums": {"row": "data", "reduction": "tensor", "match": ["out/**"], **words},
        "rest": {"row": "data", "match": ["**"], **store},
    })  # fmt: skip
    model, sharded = Joined(form, nnx.Rngs(0)), jshard.shard(loss)
    step = lambda model, x: nnx.value_and_grad(sharded)(model, x)
    sharded(model, x)
    got = nnx.jit(step)(model, x)
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    assert spec(model.qkv.kernel) == (jax.P("data", "tensor") if store else jax.P(None, "tensor"))
    assert spec(model.qkv.bias) == jax.P(("tensor", "data") if store else "tensor")
    counts = collections.Counter()
    for line in jshard.explain(step, model, x):
        if line.collective in ("permute", "all_to_all", "all_gather") and line.cause.key not in ("store", "sequence"):
            counts[line.collective, line.phase, line.cause.key, line.payload] += line.count
    kernel, bias = 4 * WIDTH * 3 * WIDTH // 12, 4 * 3 * WIDTH // 12
    assert counts == {("permute", phase, "column", n): 2 for phase in ("forward", "backward") for n in (kernel, bias)}


class Small(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def small_loss(model, x):
    return jnp.mean(model(x) ** 2)


SMALL = {
    "up": {"row": "data", "column": "tensor", "match": ["up/**"]},
    "rest": {"row": "data", "store": "data", "match": ["**"]},
}


@pytest.mark.quick("sharded loss-auto")
@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
@pytest.mark.parametrize("loss", [small_loss, jshard.shard(small_loss)], ids=["loss", "sharded loss"])
def test_a_model_that_no_call_has_placed_is_not_traced(axis_types, loss):
    jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 4}, "axis_types": axis_types}, **SMALL})
    x = np.ones((8, 16), np.float32)
    model = jshard.shard(Small(nnx.Rngs(0)))
    step = nnx.jit(lambda model, x: nnx.grad(loss)(model, x))
    with pytest.raises(JShardError) as error:
        step(model, x)
    line = "model = jshard.shard(model" if loss is small_loss else "jshard.shard(small_loss).place(model"
    assert str(error.value) == (
        "Small is traced, and no earlier call has placed its parameters: every device would keep all of them; write "
        f'{line}, jax.ShapeDtypeStruct((8, 16), "float32")) first, or @jshard.jit for @nnx.jit'
    )
    model = jshard.shard(model, jax.ShapeDtypeStruct((8, 16), "float32"))
    assert spec(model.up.kernel) == P(None, "tensor")
    assert spec(nnx.jit(lambda model, x: nnx.grad(loss)(model, x))(model, x)["up"]["kernel"]) == P(None, "tensor")
    model = jshard.shard(Small(nnx.Rngs(0)))
    jshard.jit(lambda model, x: nnx.grad(loss)(model, x))(model, x)
    assert spec(model.up.kernel) == P(None, "tensor")
    model = jshard.shard(Small(nnx.Rngs(0)))
    model(x)  # or by a call
    nnx.jit(lambda model, x: nnx.grad(loss)(model, x))(model, x)


@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
def test_microbatches_of_a_model_that_no_call_has_placed_are_not_traced(axis_types):
    jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 4}, "axis_types": axis_types}, **SMALL})
    model, batches = jshard.shard(Small(nnx.Rngs(0))), np.ones((2, 8, 16), np.float32)
    with pytest.raises(JShardError, match="Small is traced, and no earlier call has placed its parameters"):
        nnx.jit(accumulated(small_loss))(model, batches)
    pipeline = {"jshard": {"mesh": {"data": 2, "pipe": 4}, "pipeline": {"axis": "pipe"}, "train": {"microbatches": 2}}}
    jshard.load({**pipeline, "up": {"row": "data", "stage": "equal", "match": ["**"]}})
    layers = jshard.stack(lambda rngs: nnx.Linear(16, 16, rngs=rngs), 4, rngs=nnx.Rngs(0))
    step = nnx.jit(lambda model, x: jshard.value_and_grad(small_loss)(model, x))
    with pytest.raises(JShardError, match="is traced, and no earlier call has placed its parameters"):
        step(jshard.shard(layers), batches[0])


@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
def test_an_optimizer_that_was_built_before_the_first_call_is_split_by_the_first_step(axis_types):
    jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 4}, "axis_types": axis_types}, **SMALL})
    model, x = jshard.shard(Small(nnx.Rngs(0))), np.ones((8, 16), np.float32)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    model(x)

    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(small_loss)(model, x))

    step(model, optimizer, x)
    shapes = lambda x: jax.tree.map(lambda x: x.sharding.shard_shape(x.shape), jax.tree.leaves(x))
    for moments in (optimizer.opt_state[0].mu, optimizer.opt_state[0].nu):
        assert shapes(moments) == shapes(nnx.state(model)) == [(4,), (16, 8), (8,), (16, 8)]


def test_a_model_that_nothing_splits_is_traced_before_a_call():
    jshard.load({"jshard": {"mesh": {"data": 8}}, "rest": {"row": "data", "match": ["**"]}})
    nnx.jit(small_loss)(jshard.shard(Small(nnx.Rngs(0))), np.ones((8, 16), np.float32))


def test_shard_without_arguments_reports_globs_and_unclaimed_parameters():
    head = {"jshard": {"mesh": {"data": 2, "tensor": 4}}}
    jshard.load({**head, "up": {**SMALL["up"], "match": ["upp/**"]}, "down": {"match": ["down/**"]}})
    for _ in range(2):  # a report is the same again
        with pytest.raises(JShardError) as error:
            jshard.shard(Small(nnx.Rngs(0)))
        assert str(error.value) == (
            'signal "up" (<dict>) has match "upp/**", which fits no parameter; did you mean "up/**"?\n'
            'no signal of <dict> claims 2 of 4 parameters: "up/bias", "up/kernel"; claim them, or write '
            'rest: {match: ["**"]}'
        )
    jshard.load({**head, "up": SMALL["up"], "down": {"row": "data"}})  # which may be active where the layer is called
    jshard.shard(Small(nnx.Rngs(0)))

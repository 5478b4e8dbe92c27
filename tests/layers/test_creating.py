"""A model is created split: the numbers of plain creation, and no array whole on a device."""

from __future__ import annotations

import gc
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jshard
from jshard.errors import JShardError
from jshard.layers.creating import Uncreated
from jshard.layouts import creation
from jshard.signals.active_config import unload

FSDP = {"row": "data", "store": "data"}
MESHES = {
    "fsdp": {"jshard": {"mesh": {"data": 8}}, "all": {**FSDP, "match": ["**"]}},
    "tensor": {
        "jshard": {"mesh": {"data": 2, "tensor": 4}, "axis_types": "auto"},
        "up": {**FSDP, "column": "tensor", "match": ["up/**"]},
        "rest": {**FSDP, "match": ["**", "!up/**"]},
    },
}
X = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
Y = np.arange(16) % 10


class Net(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(64, 16, kernel_init=nnx.initializers.xavier_uniform(), rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(self.norm(nnx.relu(self.up(x)))))


def loss_of(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


@jshard.jit
def step(model, optimizer, x, y):
    loss, gradients = jshard.value_and_grad(loss_of)(model, x, y)
    optimizer.update(model, gradients)
    return loss


@jshard.jit
def output(model, x):
    return model(x)


@pytest.fixture(params=MESHES)
def loaded(request):
    jshard.load(MESHES[request.param])
    yield request.param
    unload()


@pytest.fixture
def fsdp():
    jshard.load(MESHES["fsdp"])
    yield
    unload()


def raw(variable):
    return variable.get_raw_value()


def numbers(tree):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(nnx.state(tree))]


def assert_same_numbers(tree, like):
    for a, b in zip(numbers(tree), numbers(like), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.quick("tensor")
def test_parameters_optimizer_and_streams_have_the_bits_of_plain_creation(loaded):
    rngs, plain_rngs = nnx.Rngs(0), nnx.Rngs(0)
    model = jshard.create(Net, rngs=rngs)
    optimizer = jshard.create(nnx.Optimizer, model, optax.adamw(1e-2), wrt=nnx.Param)
    assert {type(x) for x in jax.tree.leaves(nnx.state((model, optimizer)))} == {Uncreated}
    plain = Net(rngs=plain_rngs)
    assert_same_numbers(rngs, plain_rngs)  # what is drawn next is another number
    jshard.jit(lambda *objects: None)(model, optimizer)
    assert_same_numbers(model, plain)
    assert_same_numbers(optimizer, nnx.Optimizer(plain, optax.adamw(1e-2), wrt=nnx.Param))


@pytest.mark.seconds
def test_a_created_model_trains_as_a_plain_one_and_rests_split(loaded):
    losses = []
    for create in (jshard.create, lambda f, *args, **kwargs: f(*args, **kwargs)):
        model = create(Net, rngs=nnx.Rngs(0))
        optimizer = create(nnx.Optimizer, model, optax.adamw(1e-2), wrt=nnx.Param)
        losses.append([float(step(model, optimizer, X, Y)) for _ in range(3)])
        for x in (raw(model.up.kernel), raw(optimizer.opt_state[0].mu.up.kernel)):
            assert x.addressable_shards[0].data.size == 32 * 64 // 8
    assert losses[0] == losses[1]


class Wide(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(512, 256, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(256, 256, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        return x


@pytest.fixture
def programs(monkeypatch):
    """Each call of a program that created an array: the program, and the memory it takes."""
    found, compile_ = [], creation._compiled_creation

    def noting(*arguments):
        def program(*consts):
            compiled = compile_(*arguments)
            found.append((compiled, compiled.lower(*consts).compile().memory_analysis()))
            return compiled(*consts)

        return program

    monkeypatch.setattr(creation, "_compiled_creation", noting)
    return found


def test_a_device_never_holds_more_than_its_shards_and_one_parameter(fsdp, programs):
    model = jshard.create(Wide, rngs=nnx.Rngs(0))
    optimizer = jshard.create(nnx.Optimizer, model, optax.adam(1e-3), wrt=nnx.Param)
    jshard.jit(lambda *objects: None)(model, optimizer)
    held = sum(x.nbytes for x in jax.tree.leaves(nnx.state((model, optimizer))))
    compiled, memory = zip(*programs, strict=True)
    assert sum(each.output_size_in_bytes for each in memory) <= held // 8 + 64
    assert max(each.temp_size_in_bytes for each in memory) < 4 * 512 * 256  # the embedding
    assert len(set(compiled)) <= 9 < len(compiled)  # equal layers are one program


def test_an_array_under_a_signal_is_made_at_its_layout(loaded):
    name = "all" if loaded == "fsdp" else "up"
    with jshard.signal(name):
        x = jshard.create(jax.random.normal, jax.random.key(1), (64, 64))
    np.testing.assert_array_equal(x, jax.random.normal(jax.random.key(1), (64, 64)))
    assert x.addressable_shards[0].data.size == 64 * 64 // 8
    with pytest.raises(JShardError, match=re.escape("jshard.create is under no signal of <dict>; write `with")):
        jshard.create(jax.random.normal, jax.random.key(1), (64, 64))


def test_layers_of_jshard_are_created_where_their_signal_says_in_its_dtype():
    signals = {
        "up": {"row": "data", "column": "tensor"},
        "down": {**FSDP, "reduction": "tensor", "dtype": {"param": "bfloat16"}},
    }
    for kind in ("explicit", "auto"):
        jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 4}, "axis_types": kind}, **signals})
        built = jshard.MLP(32, 64, 16, rngs=nnx.Rngs(0))
        model = jshard.create(jshard.MLP, 32, 64, 16, rngs=nnx.Rngs(0))
        assert isinstance(raw(model.up.kernel), Uncreated)
        output(model, X)
        assert_same_numbers(model, built)
        for x, like in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(built)), strict=True):
            assert (x.sharding, x.dtype) == (like.sharding, like.dtype)
    unload()


def test_variables_and_train_states_of_linen_are_created_split(fsdp):
    module = nn.Dense(64)
    params = jshard.create(module.init, jax.random.key(0), X)["params"]
    state = jshard.create(TrainState.create, apply_fn=module.apply, params=params, tx=optax.adam(1e-2))

    @jshard.jit
    def train(state, x):
        loss = lambda params: (state.apply_fn({"params": params}, x) ** 2).mean()
        value, gradients = jshard.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    after, value = train(state, X)
    plain = module.init(jax.random.key(0), X)
    assert float(value) == pytest.approx(float((module.apply(plain, X) ** 2).mean()), rel=1e-6)
    for x in (after.params["kernel"], after.opt_state[0].mu["kernel"]):
        assert x.addressable_shards[0].data.shape == (4, 64)


class Around(nnx.Module):
    def __init__(self, body, *, rngs: nnx.Rngs):
        self.body, self.head = body, nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(self.body(x))


def test_a_model_around_another_shares_it(fsdp):
    rngs = nnx.Rngs(0)
    body = jshard.create(Net, rngs=rngs)
    model = jshard.create(Around, body, rngs=rngs)
    assert model.body is body
    output(model, X)
    assert_same_numbers(model.head, Around(Net(rngs=(plain := nnx.Rngs(0))), rngs=plain).head)
    assert raw(body.up.kernel).addressable_shards[0].data.size == 32 * 64 // 8


def test_state_that_copies_parameters_has_their_first_numbers(fsdp):
    model = jshard.create(Wide, rngs=nnx.Rngs(0))
    copies = jshard.create(lambda model: jax.tree.map(lambda x: x + 0, nnx.state(model, nnx.Param)), model)
    taken = jshard.jit(lambda model, copies: copies)(model, copies)
    for x, like in zip(jax.tree.leaves(taken), jax.tree.leaves(nnx.state(model)), strict=True):
        np.testing.assert_array_equal(x, like)


def test_explain_and_shard_take_a_model_of_shapes(fsdp):
    model = jshard.create(Net, rngs=nnx.Rngs(0))
    optimizer = jshard.create(nnx.Optimizer, model, optax.adam(1e-2), wrt=nnx.Param)
    of_shapes = str(jshard.explain(step, model, optimizer, X, Y))
    assert isinstance(raw(model.up.kernel), Uncreated)
    step(model, optimizer, X, Y)
    gc.collect()
    assert str(jshard.explain(step, model, optimizer, X, Y)) == of_shapes
    other = jshard.shard(jshard.create(Net, rngs=nnx.Rngs(0)), X)
    assert raw(other.up.kernel).addressable_shards[0].data.shape == (4, 64)


def test_without_a_configuration_and_in_a_trace_it_is_the_call_itself(fsdp):
    made = nnx.jit(lambda: jshard.create(nnx.Linear, 4, 8, rngs=nnx.Rngs(0)))()
    unload()
    plain = jshard.create(nnx.Linear, 4, 8, rngs=nnx.Rngs(0))
    assert isinstance(raw(plain.kernel), jax.Array)
    assert_same_numbers(made, plain)


UNMADE = (
    "jshard.create(Net) at test_creating.py:{} makes float32[32, 64] when a function under jshard.jit is called with it"
)


def test_mistakes_are_one_sentence(fsdp):
    model = jshard.create(Net, rngs=nnx.Rngs(0))
    line = test_mistakes_are_one_sentence.__code__.co_firstlineno + 1
    whole = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    with pytest.raises(JShardError) as told:
        step(model, whole, X, Y)
    assert str(told.value) == (
        "optimizer/opt_state/0/mu/down/bias, of shape (16,), is whole on one device, and jshard.create has not made the model yet; "
        "write optimizer = jshard.create(nnx.Optimizer, model, ...) too"
    )
    hint = "; call such a function first, outside of jax.jit"
    for early in (
        lambda: model(X), lambda: np.asarray(raw(model.up.kernel)), lambda: model.up.kernel[0],
        lambda: model.up.kernel * 2, lambda: jax.jit(lambda x: output(model, x))(X),
    ):  # fmt: skip
        with pytest.raises(JShardError) as told:
            early()
        assert re.sub(r"float32\[\d.*\] when", "float32[32, 64] when", str(told.value)) == UNMADE.format(line) + hint


@pytest.mark.quick("auto")
@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_moments_that_rest_split_further_are_created_and_stay_so(kind):
    signals = {
        "up": {"row": "data", "column": "tensor", "store": {"optimizer": "data"}},
        "down": {"reduction": "tensor"},
    }
    jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 4}, "axis_types": kind}, **signals})
    makes = [lambda f, *args, **kwargs: f(*args, **kwargs), *([jshard.create] if kind == "explicit" else [])]
    for make in makes:
        model = make(jshard.MLP, 32, 64, 16, rngs=nnx.Rngs(0))
        optimizer = make(jshard.Optimizer, model, optax.adam(1e-2))
        for _ in range(2):
            step(model, optimizer, X, Y)
            assert raw(optimizer.opt_state[0].mu.up.kernel).addressable_shards[0].data.shape == (16, 16)
    unload()


class Affine(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (64, 96)) * 0.3 + 1.0)
        self.v = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (64, 96), jnp.float32) - self.w[...] * 0.7)


def test_products_and_sums_are_rounded_one_by_one_as_in_plain_creation(fsdp):
    model = jshard.create(Affine, rngs=nnx.Rngs(0))
    jshard.jit(lambda model: None)(model)
    assert_same_numbers(model, Affine(rngs=nnx.Rngs(0)))


class Listed(nnx.Module):
    """Holds what has no hash."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.sizes, self.body = nnx.static([32, 16]), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return self.body(x)


class Angled(Listed):
    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__(rngs=rngs)
        self.angle = nnx.static(jnp.arange(16) * 0.1)


class Annotated(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        initializer = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.body = nnx.Linear(32, 16, kernel_init=initializer, rngs=rngs)

    def __call__(self, x):
        return self.body(x)


def test_a_model_that_holds_a_list_runs_under_jit_and_is_created(fsdp):
    for make in (lambda f, **kwargs: f(**kwargs), jshard.create):
        assert output(make(Listed, rngs=nnx.Rngs(0)), X).shape == (16, 16)
    with pytest.raises(JShardError) as told:
        jshard.create(Angled, rngs=nnx.Rngs(0))
    line = test_a_model_that_holds_a_list_runs_under_jit_and_is_created.__code__.co_firstlineno + 4
    assert str(told.value) == (
        f"jshard.create(Angled) at test_creating.py:{line} computes the array angle outside of a variable; "
        "write self.angle = nnx.Variable(...), or build the model without jshard.create"
    )


@pytest.mark.quick("auto")
@pytest.mark.parametrize("axes", ["explicit", "auto"])
def test_an_annotated_model_is_created_and_trains_where_its_claims_say(axes):
    jshard.load({"jshard": {"mesh": {"data": 8}, "axis_types": axes}, "all": {**FSDP, "match": ["**"]}})
    model = jshard.create(Annotated, rngs=nnx.Rngs(0))
    optimizer = jshard.create(nnx.Optimizer, model, optax.adam(1e-2), wrt=nnx.Param)
    losses = [float(step(model, optimizer, X, Y)) for _ in range(2)]
    unload()
    with nnx.use_eager_sharding(False):
        plain = Annotated(rngs=nnx.Rngs(0))
        its = nnx.Optimizer(plain, optax.adam(1e-2), wrt=nnx.Param)
    np.testing.assert_allclose(losses, [float(step(plain, its, X, Y)) for _ in range(2)], rtol=1e-6)
    assert raw(model.body.kernel).addressable_shards[0].data.shape == (4, 16)

"""What `explain` takes, what it leaves alone, and where its lines point; its bytes are those of the compiled step."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jshard
from jshard.cli.terminal import fitted
from jshard.errors import JShardError
from jshard.inspect.compiled import wire_bytes
from jshard.inspect.plan import explain
from jshard.kernels import all_reduce
from jshard.programs.provenance import scope
from jshard.signals.active_config import unload

YAML = """\
jshard:
  mesh: {data: 2, tensor: 4}

layer1: {row: data, column: tensor}
layer2:
  row: data
  reduction: tensor
"""


class MLP(nnx.Module):
    def __init__(self, rngs):
        with jshard.signal("layer1"):
            self.up = jshard.Linear(8, 16, rngs=rngs)
        with jshard.signal("layer2"):
            self.down = jshard.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        with jshard.signal("layer1"):
            x = nnx.relu(self.up(x))
        with jshard.signal("layer2"):
            return self.down(x)


def loss(model, x):
    return (model(x) ** 2).mean()


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlp.yaml").write_text(YAML)
    jshard.load("mlp.yaml")
    yield MLP(nnx.Rngs(0))
    unload()


@pytest.fixture
def x(model):
    return jax.device_put(np.ones((8, 8), np.float32), jax.NamedSharding(jshard.mesh(), P("data")))


TABLE = """\
mlp.yaml:7  layer2  forward   all_reduce  over tensor (4)   1 x 64 B  float32   96 B on the wire
-           -       forward   all_reduce  over data (2)      1 x 4 B  float32    4 B on the wire  (sharding in types, no signal asked)
mlp.yaml:6  layer2  backward  all_reduce  over data (2)     1 x 16 B  float32   16 B on the wire
mlp.yaml:6  layer2  backward  all_reduce  over data (2)     1 x 64 B  float32   64 B on the wire
mlp.yaml:4  layer1  backward  all_reduce  over data (2)     1 x 16 B  float32   16 B on the wire
mlp.yaml:4  layer1  backward  all_reduce  over data (2)    1 x 128 B  float32  128 B on the wire
mlp.yaml:4  layer1  backward  all_reduce  over tensor (4)  1 x 128 B  float32  192 B on the wire
total: 7 collectives, 516 B on the wire per device (forward 100 B, backward 416 B)"""


def test_explain_is_a_table_whose_first_column_is_the_yaml_line(model, x):
    assert str(explain(loss, model, x)) == TABLE


@pytest.mark.parametrize("wrap", [jax.jit, nnx.jit], ids=["jax.jit", "nnx.jit"])
def test_explain_sees_through_jit(model, x, wrap):
    assert str(explain(wrap(loss), model, x)) == TABLE


def test_explain_takes_shapes_for_arrays(model, x):
    shapes = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    assert str(explain(loss, model, shapes)) == TABLE
    abstract = nnx.merge(*(jax.tree.map(_shape, part) for part in nnx.split(model)))
    assert str(explain(loss, abstract, shapes)) == TABLE


def _shape(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def test_explain_takes_a_module_for_a_function(model, x):
    assert explain(model, x).lines == explain(lambda model, x: model(x), model, x).lines
    assert explain(model, x, backward=False).counts() == {"all_reduce": 1}


def test_explain_takes_split_state_and_pytrees_and_keywords(model, x):
    graph, state = nnx.split(model)

    def f(batch, *, state, scale, name):
        assert (scale, name) == (2.0, "test")
        return loss(nnx.merge(graph, state), batch["x"])

    assert str(explain(f, {"x": x, "nothing": None}, state=state, scale=2.0, name="test")) == TABLE


def test_explain_reads_a_training_step_as_it_is_and_equal_to_the_compiled_bytes(model, x):
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step(model, optimizer, x):
        value, gradients = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, gradients)
        return value

    ledger = explain(step, model, optimizer, x)
    lines = str(ledger).splitlines()
    assert lines[:-5] == TABLE.splitlines()[:-2]  # nobody asks for x's gradient
    assert lines[-4:] == [
        "mlp.yaml:5  layer2  at rest   parameters 80 B   gradients 80 B  optimizer state 160 B    320 B",
        "-           -       at rest                                       optimizer state 8 B      8 B",
        "memory: 904 B at rest per device (parameters 224 B, gradients 224 B, optimizer state 456 B)",
        ledger.summary(),
    ]
    assert ledger.summary() == "total: 6 collectives, 324 B on the wire per device (forward 100 B, backward 224 B)"
    graph, state = nnx.split((model, optimizer))

    @jax.jit
    def pure(state, x):
        model, optimizer = nnx.merge(graph, state)
        value = step(model, optimizer, x)
        return value, nnx.split((model, optimizer))[1]

    assert ledger.total == wire_bytes(pure.lower(state, x).compile()) == 324


def test_explain_changes_nothing(model, x):
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    before = jax.tree.map(np.asarray, nnx.split((model, optimizer))[1])

    @nnx.jit
    def step(model, optimizer, x):
        gradients = nnx.grad(loss)(model, x)
        optimizer.update(model, gradients)

    explain(step, model, optimizer, x)
    after = jax.tree.map(np.asarray, nnx.split((model, optimizer))[1])
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_explain_runs_nothing(model, x):
    ran = []

    def f(model, x):
        jax.debug.callback(lambda: ran.append(1))
        return loss(model, x)

    explain(f, model, x)
    jax.effects_barrier()
    assert ran == []


def test_explain_forward_only_and_backward_on_demand(model, x):
    assert explain(loss, model, x, backward=False).by("phase") == {"forward": 100}
    step = jax.grad(lambda x: loss(model, x))
    assert set(explain(step, x).by("phase")) == {"forward", "backward"}


def test_explain_of_integers_has_no_backward(mesh):
    grid = mesh(data=8)
    f = jax.shard_map(lambda x: all_reduce(x, "data"), mesh=grid, in_specs=P("data"), out_specs=P())
    x = jax.device_put(np.arange(8), jax.NamedSharding(grid, P("data")))
    assert explain(f, x).by("phase") == {"forward": 7}
    with pytest.raises(JShardError) as error:
        explain(f, x, backward=True)
    assert str(error.value) == (
        "backward=True, but the function has no floating-point argument or result; use backward=False"
    )


def test_explain_without_a_configuration_names_no_place(mesh):
    unload()
    grid = mesh(data=8)

    def f(x):
        with scope(signal="out"):
            return jax.shard_map(lambda x: all_reduce(x, "data"), mesh=grid, in_specs=P("data"), out_specs=P())(x)

    (line,) = explain(f, jax.device_put(jnp.ones(8), jax.NamedSharding(grid, P("data"))))
    assert (line.place, line.signal, line.total) == (None, "out", 7)


def test_explain_counts_a_module_that_is_shared_once(model, x):
    def both(first, second, x):
        assert first.up is second.up
        return loss(first, x)

    assert str(explain(both, model, model, x)) == TABLE


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            "row: data\n  store: data",
            {("forward", "all_gather", ("data",)): "store", ("backward", "reduce_scatter", ("data",)): "store"},
        ),
        (
            "row: data\n  column: tensor\n  output: gather",
            {
                ("forward", "all_gather", ("tensor",)): "output",
                ("backward", "all_reduce", ("data",)): "row",
                ("backward", "all_reduce", ("tensor",)): "column",
            },
        ),
        (
            "column: data\n  reduction: tensor",
            {("forward", "all_reduce", ("tensor",)): "reduction", ("backward", "all_reduce", ("data",)): "column"},
        ),
    ],
)
def test_line_of_a_collective_is_that_of_the_key_that_asked(tmp_path, monkeypatch, keys, expected):
    monkeypatch.chdir(tmp_path)
    text = f"jshard:\n  mesh: {{data: 2, tensor: 4}}\nonly:\n  {keys}\n"
    (tmp_path / "one.yaml").write_text(text)
    number = {line.split(":")[0].strip(): str(n) for n, line in enumerate(text.splitlines(), 1)}
    jshard.load("one.yaml")
    try:
        with jshard.signal("only"):
            layer = jshard.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
        lines = [line for line in explain(layer, jnp.ones((8, 8))) if line.via == ""]
        found = {(line.phase, line.collective, line.mesh_axes): str(line.place) for line in lines}
        assert found == {asked: f"one.yaml:{number[key]}" for asked, key in expected.items()}
    finally:
        unload()


# -- what nobody asked for, and what nobody uses --


def test_explain_marks_what_no_signal_asked_for(model, x, tmp_path):
    def f(x):
        with jshard.signal("layer1"):  # names data and tensor
            a = jnp.sin(x).sum()
        with jshard.signal("other"):  # names tensor, and x lies over data
            b = jnp.cos(x).sum()
        return a + b + jnp.tan(x).sum()

    path = tmp_path / "mlp.yaml"
    path.write_text(YAML + "other: {row: tensor}\n")
    jshard.load("mlp.yaml")
    ledger = explain(f, x, backward=False)
    assert [(line.signal, line.via) for line in ledger] == [
        ("layer1", "sharding in types"),
        ("other", "sharding in types, no signal asked"),
        ("-", "sharding in types, no signal asked"),
    ]
    assert [line.asked for line in ledger] == [True, False, False]


def test_explain_tells_of_signals_that_nothing_uses(model, x):
    jshard.load("mlp.yaml", ["layer1.backward=layer2"])
    only_layer1 = explain(lambda up, x: up(x), model.up, x, backward=False)
    assert only_layer1.unused == ()  # layer2 says where the cotangents of layer1 lie
    jshard.load("mlp.yaml")
    only_layer1 = explain(lambda up, x: up(x), model.up, x, backward=False)
    assert list(map(str, only_layer1.unused)) == ["mlp.yaml:5  layer2  unused: nothing in this program is under it"]
    assert "mlp.yaml:5  layer2  unused: nothing in this program is under it" in str(only_layer1).splitlines()


def test_explain_counts_signals_that_built_a_layer_or_placed_an_array_as_used(model, x):
    assert explain(lambda model, x: model.up(x), model, x, backward=False).unused == ()  # layer2 built model.down
    jshard.signal.tensor(np.ones((8, 8), np.float32), name="layer2")
    assert explain(lambda up, x: up(x), model.up, x, backward=False).unused == ()
    jshard.load("mlp.yaml")
    assert [each.signal for each in explain(lambda up, x: up(x), model.up, x, backward=False).unused] == ["layer2"]


def test_explain_counts_a_glob_as_used_by_any_name_it_matches(x):
    jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 4}}, "layer*": {"row": "data"}, "block*": {"row": "data"}})

    def f(x):
        with jshard.signal("layer17"):
            return jnp.sin(x)

    assert [each.signal for each in explain(f, x).unused] == ["block*"]


# -- failures in tracing --


def test_explain_tells_the_users_line_and_signal_when_tracing_fails(model, x):
    def f(model, x):
        with jshard.signal("layer1"):
            return model.up(x) @ jnp.ones((3, 3))  # the line that fails

    with pytest.raises(JShardError) as told:
        explain(f, model, x)
    line = f.__code__.co_firstlineno + 2
    assert str(told.value) == (
        f'{__file__}:{line} (in f, under signal "layer1" (mlp.yaml:4)) fails while it is traced: TypeError: dot_general '
        "requires contracting dimensions to have the same shape, got (16,) and (3,); "
        f"fix {__file__}:{line}"
    )
    assert isinstance(told.value.__cause__, TypeError)


def test_explain_tells_the_users_line_outside_every_signal(model, x):
    def f(x):
        return x.nothing

    with pytest.raises(JShardError) as told:
        explain(f, x)
    line = f.__code__.co_firstlineno + 1
    assert str(told.value).startswith(f"{__file__}:{line} (in f) fails while it is traced: AttributeError: ")


# -- one document --


def test_explain_document_comes_back_as_it_was(model, x):
    optimizer = jshard.Optimizer(model, optax.adam(1e-3))

    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(loss)(model, x))

    ledger = explain(step, model, optimizer, x)
    assert ledger.memory and ledger.lines


def test_explain_document_has_a_version(model, x):
    document = json.loads(explain(loss, model, x).to_json())
    assert document["schema"] == "jshard.explain/1"
    assert sorted(document) == [
        "choices", "claims", "compiler", "is_auto", "left", "lines", "memory", "schema", "stages", "total", "unsplit", "unused",
    ]  # fmt: skip
    assert sorted(document["total"]) == ["axis", "count", "line", "memory", "phase", "signal", "wire"]
    assert sum(line["total"] for line in document["lines"]) == document["total"]["wire"] == 516


@pytest.mark.parametrize("width", [24, 40, 60, 80, 100])
def test_explain_folds_to_the_width_of_a_window(model, x, width):
    ledger = explain(loss, model, x)
    folded = fitted(str(ledger), width)
    assert max(map(len, folded.splitlines())) <= width
    assert folded.split() == " ".join(str(ledger).split()).split()  # not a word is lost


@pytest.mark.parametrize(("key", "rows"), [("signal", 3), ("axis", 2), ("line", 4), ("phase", 2)])
def test_explain_sums_by_signal_axis_line_and_phase(model, x, key, rows):
    ledger = explain(loss, model, x)
    assert len(ledger.text_by(key).splitlines()) == rows + 1
    assert sum(ledger.by(key).values()) == ledger.total
    assert sum(ledger.counts(key).values()) == ledger.count

"""The scope is right wherever JAX traces, and decides what is traced again: proven by counting traces."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jshard
from jshard.errors import JShardError
from jshard.inspect.ledger.ledger import read
from jshard.layers import MLP, Linear
from jshard.layouts import Layout, redistribute
from jshard.signals import active_config
from jshard.signals.active_config import load, mesh, unload
from jshard.signals.scope import active, failed_under, signal

MESH = {"mesh": {"data": 2, "tensor": 4}}


@pytest.fixture(autouse=True)
def nothing_loaded():
    yield
    unload()
    assert signal.current() is None


def config(**signals):
    return {"jshard": MESH, **signals}


def rows() -> float:
    """How many mesh axes split rows here: 1.0 under `a`, 2.0 under `b`, 0.0 elsewhere."""
    here = active()
    return 0.0 if here is None else float(len(here.row))


AB = config(a={"row": "data"}, b={"row": ["data", "tensor"]})


def test_current_names_the_nesting_and_the_outer_signal_is_back_after_an_inner_one():
    load(AB)
    assert signal.current() is None
    with signal("a"):
        assert signal.current() == "a"
        with signal("b"):
            assert signal.current() == "a/b"
            assert rows() == 2
        assert signal.current() == "a"
        assert rows() == 1
    assert signal.current() is None


def test_signal_is_popped_after_an_exception():
    load(AB)
    with pytest.raises(RuntimeError), signal("a"):
        raise RuntimeError
    assert signal.current() is None


def test_an_exception_remembers_the_innermost_signal():
    load(AB)
    error = RuntimeError()
    with pytest.raises(RuntimeError), signal("a"), signal("b"):
        raise error
    assert failed_under(error) == ("a", "b")


def test_signal_decorates_a_function_that_calls_itself():
    load(AB)

    @signal("a")
    def f(n):
        return [signal.current()] + (f(n - 1) if n else [])

    assert f(2) == ["a", "a/a", "a/a/a"]


def test_enter_and_exit_are_the_same_scope():
    load(AB)
    signal.enter("a")
    with signal("b"):
        assert signal.current() == "a/b"
    signal.exit("a")
    assert signal.current() is None


def test_exit_out_of_order_is_an_error():
    load(AB)
    with pytest.raises(JShardError) as caught:
        signal.exit("a")
    assert str(caught.value) == 'signal "a" is left, but none is entered; call jshard.signal.enter("a") first'
    for name in ("a", "c"):
        with signal("a"), signal("b"), pytest.raises(JShardError) as caught:
            signal.exit(name)
        assert (
            str(caught.value)
            == f'signal "{name}" is left while "b" is the innermost; call jshard.signal.exit("b") first'
        )


def test_one_entry_is_entered_once():
    load(AB)
    entry = signal("a/b")
    with entry, pytest.raises(JShardError) as caught, entry:
        pass
    assert (
        str(caught.value)
        == 'signal "a/b" is entered twice through one object; write `with jshard.signal("a/b"):` again'
    )


@pytest.mark.parametrize("name", [3, "", "a//b"])
def test_a_signal_is_named_by_text(name):
    with pytest.raises(JShardError) as caught:
        signal(name)
    assert str(caught.value) == f'a signal is named by {name!r}; give it a name, like jshard.signal("layer1")'


def test_unknown_signal_names_the_nearest():
    load(config(attn={"row": "data"}))
    with pytest.raises(JShardError) as caught, signal("atn"):
        pass
    assert str(caught.value) == 'signal "atn" is not in <dict>; did you mean "attn"?'
    assert signal.current() is None


def test_without_a_configuration_every_signal_is_a_no_op():
    with signal("anything"):
        assert active() is None
        layer = Linear(4, 8, rngs=nnx.Rngs(0))
        y = layer(np.ones((2, 4), np.float32))
        x = np.ones(3)
        assert signal.tensor(x) is x
    np.testing.assert_array_equal(y, nnx.Linear(4, 8, rngs=nnx.Rngs(0))(np.ones((2, 4), np.float32)))
    assert len(y.sharding.device_set) == 1


def test_the_environment_names_the_configuration_at_the_first_question(tmp_path, monkeypatch):
    (tmp_path / "c.yaml").write_text("a: {}\n")
    for named, signals in ((str(tmp_path / "c.yaml"), ["a"]), ("", None)):
        monkeypatch.setenv("JSHARD_CONFIG", named)
        monkeypatch.setattr(active_config, "_loaded", active_config._Loaded())
        found = active_config.configuration()
        assert (None if found is None else [*found.signals]) == signals
        unload()


def test_nested_names_are_looked_up_whole_first():
    load(config(**{"attn": {"row": "data"}, "decoder": {}, "decoder/attn": {"row": ["data", "tensor"]}, "encoder": {}}))
    with signal("attn"):
        assert rows() == 1
    with signal("decoder"), signal("attn"):
        assert rows() == 2
    with signal("decoder/attn"):
        assert signal.current() == "decoder/attn"
        assert rows() == 2
    with signal("encoder"), signal("attn"):
        assert rows() == 1


# -- inside JAX --


def seen(transform):
    """What `rows()` is in a function that `transform` traces, called under a, then b, then a again, then nothing."""
    found = []
    for name in ("a", "b", "a", None):
        if name is None:
            found.append(float(transform(jnp.float32(0))))
        else:
            with signal(name):
                found.append(float(transform(jnp.float32(0))))
    return found


def plus_rows(x):
    return x + rows()


def by_custom_vjp():
    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (f(x), rows()), lambda kept, ct: (ct * kept,))
    return lambda x: jax.grad(f)(x)


def in_shard_map(x):
    return jax.shard_map(plus_rows, mesh=mesh(), in_specs=P(), out_specs=P())(x)


BOUNDARIES = {
    "jit": jax.jit(plus_rows),
    "jit of jit": jax.jit(jax.jit(plus_rows)),
    "scan": lambda x: jax.lax.scan(lambda c, _: (c + rows() / 2, None), x, length=2)[0],
    "while": lambda x: jax.lax.while_loop(lambda c: c[1] < 1, lambda c: (plus_rows(c[0]), c[1] + 1), (x, 0))[0],
    "cond": lambda x: jax.lax.cond(x > 1, lambda x: x, plus_rows, x),
    "remat": jax.jit(jax.checkpoint(plus_rows)),
    "vmap": lambda x: jax.vmap(plus_rows)(x[None])[0],
    "jit of scan": jax.jit(lambda x: jax.lax.scan(lambda c, _: (c + rows() / 2, None), x, length=2)[0]),
    "grad": jax.grad(lambda x: x * rows()),
    "jit of grad of remat": jax.jit(jax.grad(jax.checkpoint(lambda x: x * rows()))),
    "custom_vjp": by_custom_vjp(),
    "jit of custom_vjp": jax.jit(by_custom_vjp()),
    "shard_map": in_shard_map,
    "jit of shard_map": jax.jit(in_shard_map),
    "nnx.jit": nnx.jit(plus_rows),
}


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_scope_is_right_inside(boundary):
    load(AB)
    assert seen(BOUNDARIES[boundary]) == [1, 2, 1, 0]


def test_scope_inside_jit_is_right_and_ends_with_it():
    load(AB)

    @jax.jit
    def f(x):
        with signal("a"):
            x = x + rows()
            with signal("b"):
                x = x + 10 * rows()
            return x + 100 * rows()

    assert float(f(0.0)) == 1 + 20 + 100
    assert signal.current() is None


def test_loading_another_configuration_changes_a_jitted_function_and_the_same_one_retraces_nothing():
    traces = []

    @jax.jit
    def f(x):
        traces.append(1)
        with signal("a"):
            return x + rows()

    load(AB)
    assert float(f(0.0)) == 1
    load(AB)
    assert float(f(0.0)) == 1
    assert len(traces) == 1
    load(config(a={"row": ["data", "tensor"]}))
    assert float(f(0.0)) == 2
    assert len(traces) == 2
    load(AB)
    assert float(f(0.0)) == 1
    assert len(traces) == 2
    unload()
    assert float(f(0.0)) == 0


def test_unload_makes_every_signal_mean_nothing_again():
    jshard.load(AB)
    jshard.unload()
    x = np.ones(8, np.float32)
    with jshard.signal("nothing is called so"):
        assert active() is None
        assert jshard.signal.tensor(x) is x
    with pytest.raises(JShardError) as told:
        jshard.mesh()
    assert str(told.value) == ('no configuration is loaded; call jshard.load("configs/mlp.yaml") or set JSHARD_CONFIG')


def test_tensor_takes_lists_and_numbers_and_says_when_no_signal_holds():
    load({**AB, "whole": {}})
    y = jshard.signal.tensor([[1.0], [2.0]], name="a")
    assert (y.sharding.spec, y.addressable_shards[0].data.tolist()) == (P("data", None), [[1.0]])
    assert jshard.signal.tensor(3, name="whole").sharding.is_fully_replicated
    with pytest.raises(JShardError) as told:
        jshard.signal.tensor(np.ones(4))
    assert str(told.value) == (
        'jshard.signal.tensor(x) is under no signal of <dict>; write `with jshard.signal("a"):` around it'
    )


def test_default_is_the_signal_of_what_stands_outside_every_scope():
    signals = {"a": {"row": "data", "column": "tensor"}, "b": {"column": "tensor"}}
    load({"jshard": {**MESH, "default": "a"}, **signals})
    linear, block = Linear(8, 8, rngs=nnx.Rngs(0)), MLP(8, 16, 8, signals=("b", "z"), rngs=nnx.Rngs(0))
    with signal("b"):
        under_b = Linear(8, 8, rngs=nnx.Rngs(0))
    for layer, columns in ((linear, "tensor"), (block.up, "tensor"), (block.down, "tensor")):
        assert layer.kernel[...].sharding.spec == P(None, columns)
    assert (linear.signal_path, block.up.signal_path, under_b.signal_path) == (("a",), ("a", "b"), ("b",))
    x = jshard.signal.tensor(np.ones((8, 8), np.float32))
    assert x.sharding.spec == P("data", "tensor")
    assert linear(x).sharding.spec == P("data", "tensor")
    assert under_b(x).sharding.spec == P(None, "tensor")  # the signal that it was built under comes first
    assert signal.current() is None
    whole = jnp.ones((8, 8))
    for f, under in ((lambda x: linear(x), "a"), (lambda x: jshard.matmul(x, whole), "a"), (lambda x: jshard.mean(x), "a"),
                     (lambda x: block(x), "a/b"), (lambda x: block(x), "a/z")):  # fmt: skip
        assert under in jshard.explain(f, x).counts("signal")
    unload()
    assert linear(np.ones((8, 8), np.float32)).shape == (8, 8)


def test_another_mesh_alone_retraces():
    traces = []

    @jax.jit
    def f(x):
        traces.append(1)
        return x

    load(AB)
    f(0.0)
    load({**AB, "jshard": {"mesh": {"data": 4, "tensor": 2}}})
    f(0.0)
    assert len(traces) == 2


def test_the_experiment_takes_no_part_in_what_is_traced():
    traces = []

    @jax.jit
    def f(x):
        traces.append(1)
        return x

    load({**AB, "jshard": {**MESH, "train": {"steps": 10}}})
    f(0.0)
    load({**AB, "jshard": {**MESH, "train": {"steps": 20}}})
    f(0.0)
    assert len(traces) == 1


def test_48_equal_layers_under_48_names_trace_once(monkeypatch):
    names = [f"layer{i}" for i in range(48)]
    load(config(**{name: {"row": "data", "column": "tensor", "output": "gather"} for name in names}))
    layers = []
    for name in names:
        with signal(name):
            layers.append(Linear(8, 8, rngs=nnx.Rngs(0)))
    from jshard.layers.body import Body

    traces = []
    run = Body._run
    monkeypatch.setattr(Body, "_run", lambda self, *operands: traces.append(1) or run(self, *operands))

    def model(layers, x):
        for name, layer in zip(names, layers, strict=True):
            with signal(name):
                x = layer(x)
        return x

    x = redistribute(np.ones((8, 8), np.float32), Layout(mesh(), "data", None))  # as every layer hands it on
    lines = read(jax.make_jaxpr(model)(layers, x)).lines
    assert len(traces) == 1
    assert [line.signal for line in lines if line.collective == "all_gather"] == names


def test_equal_signals_share_a_jitted_function_and_different_ones_below_do_not():
    traces = []

    @jax.jit
    def f(x):
        traces.append(1)
        with signal("attn"):
            return x + rows()

    load(config(**{"encoder": {}, "decoder": {}, "other": {}, "attn": {"row": "data"}}))
    for name in ("encoder", "decoder", "other"):
        with signal(name):
            assert float(f(0.0)) == 1
    assert len(traces) == 1
    load(
        config(
            **{
                "encoder": {},
                "decoder": {},
                "other": {},
                "attn": {"row": "data"},
                "decoder/attn": {"row": ["data", "tensor"]},
            }
        )
    )
    found = []
    for name in ("encoder", "decoder", "other"):
        with signal(name):
            found.append(float(f(0.0)))
    assert found == [1, 2, 1]
    assert len(traces) == 3


# -- threads --


def test_a_thread_does_not_inherit_the_scope_of_another():
    load(AB)
    found = []
    with signal("a"):
        thread = threading.Thread(target=lambda: found.append((signal.current(), rows())))
        thread.start()
        thread.join()
    assert found == [(None, 0)]


def test_two_threads_trace_different_signals_at_once():
    load(AB)
    both_inside = threading.Barrier(2, timeout=30)
    found = {}

    def work(name):
        @jax.jit
        def f(x):
            both_inside.wait()
            value = x + rows()
            both_inside.wait()
            return value + 10 * rows()

        with signal(name):
            found[name] = float(f(0.0))

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"a": 11, "b": 22}


# -- what a layer remembers --


def test_a_layer_remembers_its_signal_and_the_active_one_wins():
    load(config(a={"row": "data"}, b={"column": "tensor"}))
    with signal("a"):
        layer = Linear(8, 8, rngs=nnx.Rngs(0))
    x = np.ones((8, 8), np.float32)
    assert layer(x).sharding.spec == P("data", None)
    with signal("b"):
        assert layer(x).sharding.spec == P(None, "tensor")
    assert layer(x).sharding.spec == P("data", None)


def test_a_layer_outside_every_signal_is_plain_flax():
    load(config(a={"row": "data"}))
    layer = Linear(8, 8, rngs=nnx.Rngs(0))
    assert len(layer(np.ones((8, 8), np.float32)).sharding.device_set) == 1


def test_mlp_finds_its_own_signals_below_the_outer_one():
    load(
        config(
            **{
                "up": {},
                "down": {},
                "block0": {},
                "block0/up": {"column": "tensor"},
                "block0/down": {"reduction": "tensor"},
                "block1": {},
            }
        )
    )
    kernels = []
    for name in ("block0", "block1"):
        with signal(name):
            kernels.append(MLP(8, 16, 8, rngs=nnx.Rngs(0)).up.kernel[...])
    assert kernels[0].sharding.spec == P(None, "tensor")
    assert kernels[1].sharding.spec == P(None, None)


@pytest.mark.slow
def test_compile_true_makes_one_program_of_a_call_outside_jit():
    x = jnp.ones((8, 8))
    for compiled, programs in ((False, 3), (True, 1)):
        load(config(mlp={"compile": compiled}, up={"column": "tensor"}, down={"reduction": "tensor"}))
        with signal("mlp"):
            mlp = MLP(8, 16, 8, rngs=nnx.Rngs(0))
            mlp(x)
            with _dispatches() as count:
                mlp(x)
        assert len(count) == programs, count  # layer, relu, layer


class _dispatches:
    """The programs that run inside: counted where JAX enters a compiled one."""

    def __enter__(self):
        self.names = []
        from jax._src.interpreters import pxla

        self.before, names = pxla.ExecuteReplicated.__call__, self.names

        def call(program, *operands):
            names.append(program.name)
            return self.before(program, *operands)

        pxla.ExecuteReplicated.__call__ = call
        jax.clear_caches()
        return self.names

    def __exit__(self, *reason):
        from jax._src.interpreters import pxla

        pxla.ExecuteReplicated.__call__ = self.before

"""Which devices one program or gradient spans, and the sentence where it would span others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jshard.errors import JShardError
from jshard.signals.active_config import load, unload
from jshard.signals.device_sets import apart, check_reach, devices_in_words, differ, is_elsewhere
from jshard.signals.scope import signal

X = np.arange(32, dtype=np.float32).reshape(8, 4)
WORKERS = {
    "none": {},
    "b": {"shard": {"axis": 0, "workers": [2, 3]}},
    "a": {"shard": {"axis": 0, "workers": [0, 1]}},
    "with a backward": {"shard": {"axis": 0, "workers": [0, 1]}, "backward": "b"},
}
STAGES = "call jshard.shard(model), which makes their workers stages of one mesh, or name the same workers for both"


@pytest.fixture(autouse=True)
def loaded():
    load(WORKERS)
    yield
    unload()


def on(*workers: int) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array([jax.devices()[worker] for worker in workers]), ("d",))


def placed(name: str):
    return lambda x: jnp.sum(signal.tensor(x, name=name))


def sentence(f, *operands) -> str:
    with pytest.raises(JShardError) as told:
        f(*operands)
    return str(told.value)


def test_only_what_somebody_placed_lies_elsewhere():
    x, there = jnp.ones(2), jax.device_put(jnp.ones(2), jax.devices()[0])
    assert [is_elsewhere(there, each) for each in (on(0), on(1), on(0, 1))] == [False, True, True]
    assert not is_elsewhere(x, on(1)) and not is_elsewhere(np.ones(2), on(1)) and not is_elsewhere(there, None)
    assert is_elsewhere(jax.device_put(X, jax.NamedSharding(on(0, 1), jax.P("d"))), on(0))


def test_meshes_differ_by_their_devices_and_their_order():
    assert not differ(on(0, 1), on(0, 1))
    assert all(differ(on(0, 1), on(*workers)) and differ(on(*workers), on(0, 1)) for workers in ([1, 0], [2, 3], [0]))
    assert devices_in_words(on(3, 1)) == "workers 3, 1"


@pytest.mark.parametrize(
    ("said", "mend"),
    [
        (WORKERS, STAGES),
        ({"a": {"shard": {"axis": 0, "workers": [0, 1]}}}, "name the same workers for both, or mesh axes"),
        (None, "name the same workers for both, or mesh axes"),
    ],
    ids=["stages", "no stages", "nothing"],
)
def test_two_places_that_no_program_spans_are_one_sentence(said, mend):
    ours = load(WORKERS).signals["a"]
    load(said) if said else unload()
    assert str(apart(ours, on(0, 1), "its input", on(2, 3))) == (
        'signal "a" (<dict>) is on workers 0, 1 and its input on workers 2, 3, but one program or gradient can\'t span '
        f"both; {mend}"
    )


def test_a_gradient_of_what_lies_elsewhere_tells_who_placed_it():
    lies = 'signal "b" (<dict>) is on workers 2, 3 and {}, but one program or gradient can\'t span both; ' + STAGES
    placed_there = {
        'signal "a" (<dict>) on workers 0, 1': signal.tensor(X, name="a"),
        "its input on workers 4, 6": jax.device_put(X, jax.NamedSharding(on(4, 6), jax.P("d"))),
        "its input on workers 5": jax.device_put(X, jax.devices()[5]),
    }
    for words, x in placed_there.items():
        assert sentence(jax.grad(placed("b")), x) == lies.format(words)
    for x in (X, signal.tensor(X, name="b")):
        np.testing.assert_array_equal(jax.grad(placed("b"))(x), np.ones_like(X))


def test_a_gradient_goes_where_its_signal_says_by_itself():
    gradient = jax.grad(placed("with a backward"))(signal.tensor(X, name="b"))
    assert {device.id for device in gradient.devices()} == {2, 3}


@pytest.mark.parametrize("how", [lambda f: f, jax.grad, jax.vmap], ids=["itself", "grad", "vmap"])
def test_a_program_is_on_the_devices_of_the_first_signal_in_it(how):
    def program(x, *, first):
        placed(first)(x)
        return how(placed("a"))(x)

    assert sentence(jax.make_jaxpr(lambda x: program(x, first="b")), X) == (
        'signal "a" (<dict>) is on workers 0, 1 and signal "b" (<dict>) on workers 2, 3, but one program or gradient can\'t '
        f"span both; {STAGES}"
    )
    assert jax.make_jaxpr(lambda x: program(x, first="a"))(X)


def test_no_program_is_traced_where_one_maps_arrays_at_hand():
    rows = jax.vmap(lambda x: (check_reach(x, on(2, 3), None), check_reach(x, on(0, 1), None), x)[2])(X)
    np.testing.assert_array_equal(rows, X)

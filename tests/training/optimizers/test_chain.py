"""The optimizer of an experiment as a chain: what optax makes of the same, what it moves, and each mistake in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from jshard.cli import main
from jshard.signals import active_config as current
from jshard.signals.config import load_configuration
from jshard.training.experiments.experiment import Experiment
from jshard.training.optimizers.chain import SCHEDULES, Chain
from jshard.training.optimizers.clipping import clip_by_global_norm
from jshard.training.settings import Settings
from tests.support import cases, plain

OWN = """
import optax

def halved(factor=0.5): return optax.scale(factor)
def mine(learning_rate, momentum=0.9): return optax.sgd(learning_rate, momentum)
def steps_of(peak, steps): return lambda step: peak * (1 - step / steps)
def fixed(): return optax.sgd(0.25)
"""
FULL = """{clip: 1.0, adamw: {b2: 0.95, weight_decay: 0.1}, schedule: {warmup_cosine: {peak: 3e-4, warmup: 10}},
  decay: {match: ["**/kernel"]}}"""
MODEL = {
    "up": {"kernel": np.ones((2, 3), np.float32), "bias": np.ones(3, np.float32)},
    "down": {"kernel": np.full((3, 2), 0.5, np.float32)},
}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("own.py").write_text(OWN)


def chain(text: str, *overrides: str) -> Chain:
    Path("f.yaml").write_text(f"jshard:\n  train:\n    steps: 100\n    optimizer: {text}\n")
    return Chain.of(Settings(load_configuration("f.yaml", overrides)))


def moved(tx: optax.GradientTransformation):
    """What four updates make of parameters, the gradients of which are above any clip."""
    params, state = MODEL, tx.init(MODEL)
    for number in range(4):
        gradients = jax.tree.map(lambda x, n=number: x * (1.0 + n), MODEL)
        updates, state = tx.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params


KERNELS = {"up": {"kernel": True, "bias": False}, "down": {"kernel": True}}
WARM = optax.warmup_cosine_decay_schedule(0.0, 3e-4, 10, 100)
SAME = [
    ("adamw", optax.adamw(1e-3)),
    ("{name: sgd, learning_rate: 0.1, momentum: 0.9}", optax.sgd(0.1, 0.9)),
    ("{sgd: {learning_rate: 0.1}}", optax.sgd(0.1)),
    ("{sgd: 0.1}", optax.sgd(0.1)),
    (
        "{adamw: {weight_decay: 0.1}, decay: {match: ['**/kernel', '!down/*']}}",
        optax.adamw(
            1e-3,
            weight_decay=0.1,
            mask=jax.tree.map(lambda _: False, KERNELS) | {"up": {"kernel": True, "bias": False}},
        ),
    ),
    (FULL, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(WARM, b2=0.95, weight_decay=0.1, mask=KERNELS))),
    ("{adamw: {}, clip: 0.5}", optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3))),
    ("{name: adamw, clip: 0.5, b1: 0.8}", optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3, b1=0.8))),
    (
        "{add_decayed_weights: 0.1, sgd: {learning_rate: 0.2}, schedule: linear, decay: {match: down/*}}",
        optax.chain(
            optax.add_decayed_weights(0.1, mask=jax.tree.map(lambda _: False, KERNELS) | {"down": {"kernel": True}}),
            optax.sgd(optax.linear_schedule(0.2, 0.0, 100)),
        ),
    ),
    (
        "{scale_by_adam: {b1: 0.8}, scale_by_learning_rate: 0.1}",
        optax.chain(optax.scale_by_adam(0.8), optax.scale(-0.1)),
    ),
    (
        "{sgd: {}, schedule: {'optax:cosine_decay_schedule': {init_value: 0.1, decay_steps: 100}}}",
        optax.sgd(optax.cosine_decay_schedule(0.1, 100)),
    ),
    (
        '{"own:halved": {}, "own:mine": {momentum: 0.5}, schedule: {"own:steps_of": {peak: 0.1}}}',
        optax.chain(optax.scale(0.5), optax.sgd(lambda step: 0.1 * (1 - step / 100), 0.5)),
    ),
    ("own:fixed", optax.sgd(0.25)),
    ('{"own:fixed": {}, clip: 1.0}', optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.25))),
]


@pytest.mark.parametrize(("text", "tx"), SAME, ids=[text for text, _ in SAME])
def test_a_chain_is_what_optax_makes_of_it(text, tx):
    ours, theirs = moved(chain(text).tx), moved(tx)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, theirs)
    assert not np.allclose(ours["up"]["kernel"], MODEL["up"]["kernel"], rtol=1e-7)


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (
            FULL,
            ["optimizer.adamw.b2=0.9", "optimizer.clip=2"],
            optax.adamw(WARM, b2=0.9, weight_decay=0.1, mask=KERNELS),
        ),
        ("adamw", ["optimizer.clip=2", "optimizer.b2=0.9"], optax.adamw(1e-3, b2=0.9)),
        ("adamw", ["optimizer.clip=2", "optimizer.adamw.b2=0.9"], optax.adamw(1e-3, b2=0.9)),
    ],
)
def test_overrides_change_a_link(text, overrides, expected):
    expected = optax.chain(optax.clip_by_global_norm(2.0), expected)
    ours, theirs = moved(chain(text, *overrides).tx), moved(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, theirs)


@pytest.mark.parametrize(
    ("word", "arguments", "at"),
    [
        ("constant", {}, {0: 1.0, 99: 1.0}),
        ("linear", {"steps": 100, "end": 0.1}, {0: 1.0, 50: 0.55, 100: 0.1}),
        ("cosine", {"steps": 100, "end": 0.1}, {0: 1.0, 50: 0.55, 100: 0.1}),
        ("warmup_constant", {"warmup": 10}, {0: 0.0, 5: 0.5, 10: 1.0, 99: 1.0}),
        ("warmup_linear", {"warmup": 10, "steps": 110}, {0: 0.0, 5: 0.5, 10: 1.0, 60: 0.5, 110: 0.0}),
        ("warmup_cosine", {"warmup": 10, "steps": 110}, {0: 0.0, 5: 0.5, 10: 1.0, 60: 0.5, 110: 0.0}),
        (
            "warmup_stable_decay",
            {"warmup": 10, "decay": 20, "steps": 100},
            {5: 0.5, 10: 1.0, 80: 1.0, 90: 0.5, 100: 0.0},
        ),
    ],
)
def test_a_schedule_by_a_short_word(word, arguments, at):
    schedule = SCHEDULES[word](peak=1.0, **arguments)
    np.testing.assert_allclose([schedule(step) for step in at], list(at.values()), atol=1e-6)


def test_the_learning_rate_and_the_key_that_says_it():
    full = chain(FULL)
    assert (full.key, full.peak) == ("optimizer.schedule.warmup_cosine.peak", 3e-4)
    np.testing.assert_allclose([full.learning_rate(done) for done in (0, 5, 10, 100)], [0, 1.5e-4, 3e-4, 0], atol=1e-12)
    beside = chain("{adamw: {learning_rate: 2e-3}, schedule: cosine}")
    assert (beside.key, beside.peak) == ("optimizer.adamw.learning_rate", 2e-3)
    assert (chain("adamw").key, chain("adamw").learning_rate(7)) == ("optimizer.learning_rate", 1e-3)
    assert chain("own:fixed").learning_rate(0) is None


HERE = "jshard.train.optimizer"
SENTENCES = [
    ("adamx", f'{HERE} (f.yaml:4) is "adamx", which is no optimizer of optax; did you mean "adamax"?'),
    ("{adamx: {}}", f'{HERE}.adamx (f.yaml:4) is no optimizer or transformation of optax; did you mean "adamax"?'),
    (
        "{xyz: {}}",
        f"{HERE}.xyz (f.yaml:4) is no optimizer or transformation of optax; use adamw, adam, sgd or another of optax",
    ),
    (
        "{adamw: {nesterv: true}}",
        f'{HERE}.adamw (f.yaml:4), which takes no argument "nesterv"; did you mean "nesterov"?',
    ),
    ("{adamw: {b1: high}}", f'{HERE}.adamw.b1 (f.yaml:4) is "high", which is not a number; write b1: 0.9'),
    (
        "{adamw: {}, sgd: {}}",
        f"{HERE} (f.yaml:4) names two optimizers, adamw (f.yaml:4) and sgd (f.yaml:4); keep one",
    ),
    ("{clip: 1.0}", f"{HERE} (f.yaml:4) names no optimizer; write adamw: {{}} in it"),
    (
        "{learning_rate: 1e-3}",
        f"{HERE}.learning_rate (f.yaml:4) is no optimizer or transformation of optax; did you mean "
        '"scale_by_learning_rate"?',
    ),
    (
        "{adamw: {}, schedule: warmup_cosin}",
        f'{HERE}.schedule (f.yaml:4) is "warmup_cosin", which is no schedule of jshard; did you mean "warmup_cosine"?',
    ),
    (
        "{adamw: {}, schedule: steep}",
        f'{HERE}.schedule (f.yaml:4) is "steep", which is no schedule of jshard; use constant, linear, cosine, '
        "warmup_constant, warmup_linear, warmup_cosine, warmup_stable_decay or optax:NAME",
    ),
    (
        "{adamw: {}, schedule: {warmup_cosine: {warmups: 3}}}",
        f'{HERE}.schedule (f.yaml:4) is "warmup_cosine", which takes no argument "warmups"; did you mean "warmup"?',
    ),
    (
        "{adamw: {}, schedule: warmup_cosine}",
        f'{HERE}.schedule (f.yaml:4) is "warmup_cosine", which needs an argument "warmup"; write warmup: beside it, in a mapping',
    ),
    (
        "{adamw: {}, schedule: {warmup_cosine: {warmup: ten}}}",
        f'{HERE}.schedule.warmup_cosine.warmup (f.yaml:4) is "ten", which is not a number; write warmup: 100',
    ),
    (
        "{adamw: {}, schedule: {warmup_cosine: {warmup: 200}}}",
        f'{HERE}.schedule (f.yaml:4) is "warmup_cosine" with warmup 200, of only 100 steps; use more steps, or smaller numbers',
    ),
    (
        "{adamw: {}, schedule: {linear: {}, cosine: {}}}",
        f"{HERE}.schedule (f.yaml:4) names linear and cosine; write one schedule, as in schedule: "
        "{warmup_cosine: {peak: 3e-4, warmup: 100}}",
    ),
    (
        "{adamw: {learning_rate: 1e-3}, schedule: {cosine: {peak: 1e-3}}}",
        f"{HERE}.adamw.learning_rate (f.yaml:4) is set, and a schedule (f.yaml:4) sets it too; remove one of the two",
    ),
    (
        '{"own:fixed": {}, schedule: cosine}',
        f"{HERE}.schedule (f.yaml:4) is beside own:fixed, which takes no learning_rate; add the parameter learning_rate to "
        "own:fixed, or remove schedule",
    ),
    (
        "{sgd: {}, decay: {match: '**'}}",
        f"{HERE}.decay (f.yaml:4) selects the parameters that decay, and sgd has no weight decay; write add_decayed_weights: "
        "{weight_decay: 0.1} before it",
    ),
    ('{"own:fxed": {}}', f'{HERE}.own:fxed (f.yaml:4) is named, but own has no "fxed"; did you mean "own:fixed"?'),
    ("own:fxed", f'{HERE} (f.yaml:4) is "own:fxed", but own has no "fxed"; did you mean "own:fixed"?'),
]


@pytest.mark.parametrize(("text", "sentence"), SENTENCES, ids=[text for text, _ in SENTENCES])
def test_what_is_wrong_with_a_chain_is_one_sentence(text, sentence):
    with pytest.raises(jshard.JShardError) as error:
        chain(text)
    assert str(error.value) == sentence


# -- on a mesh --

SIGNALS = {
    "wide": {"row": "data", "column": "tensor", "match": ["up/**"]},
    "rest": {"row": "data", "store": "data", "match": ["**"]},
}


def built(optimizer, **train):
    settings = {
        "model": "tests.support.plain:Dense",
        "data": "tests.support.plain:data",
        "batch": 16,
        "steps": 4,
        "optimizer": optimizer,
        **train,
    }
    Path("m.yaml").write_text(json.dumps({"jshard": {"mesh": {"data": 2, "tensor": 4}, "train": settings}, **SIGNALS}))
    return Experiment.build(current.load("m.yaml"), current.mesh())


def test_a_clip_by_the_norm_of_split_gradients_is_that_of_whole_ones():
    signals = {"up": {"row": "data", "column": "tensor"}, "down": {"row": "data", "store": "data"}}
    with cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 4}}, **signals}):
        model = jshard.MLP(16, 32, 8, rngs=nnx.Rngs(0))
        parts = nnx.to_pure_dict(nnx.state(model))
        tx = clip_by_global_norm(0.5)
        ours = jax.jit(lambda x: tx.update(x, tx.init(x))[0])(parts)
        theirs, _ = optax.clip_by_global_norm(0.5).update(jax.tree.map(np.asarray, parts), optax.EmptyState())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, theirs)
        jax.tree.map(lambda a, b: cases.assert_lies(a, b.sharding.spec), ours, parts)
        asked = cases.collectives_asked(jshard.explain(lambda x: tx.update(x, tx.init(x))[0], parts, backward=False))
        assert asked == {("all_reduce", 2): 1, ("all_reduce", 4): 1}


P = jax.P


@pytest.mark.quick(4)
@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
@pytest.mark.parametrize(
    "specs",
    [[P("data", "tensor")], [P(("tensor", "data"))], [P("tensor", "data"), P("data"), P(None, "tensor"), P()],
     [P("data", "tensor"), P("tensor", "data"), P(None, ("data", "tensor"))]],
    ids=["FSDP and tensor", "two on an axis", "each way", "all over two"],
)  # fmt: skip
def test_a_gradient_that_is_split_over_two_mesh_axes_counts_once(axis_types, specs):
    with cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 4}, "axis_types": axis_types}}):
        whole = [np.random.default_rng(n).normal(size=(8, 16)).astype(np.float32) for n in range(len(specs))]
        parts = [
            jax.device_put(x, jax.NamedSharding(jshard.mesh(), spec)) for x, spec in zip(whole, specs, strict=True)
        ]
        tx = clip_by_global_norm(0.5)
        ours, gradients = jax.jit(
            lambda x: (tx.update(x, tx.init(x))[0], jax.grad(lambda x: sum(y.sum() for y in tx.update(x, None)[0]))(x))
        )(parts)
        plain = lambda x: optax.clip_by_global_norm(0.5).update(x, optax.EmptyState())[0]
        for own, expected in zip(ours, plain(whole), strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-5)
        np.testing.assert_allclose(np.sqrt(sum((np.asarray(x) ** 2).sum() for x in ours)), 0.5, rtol=1e-5)
        for own, expected in zip(gradients, jax.grad(lambda x: sum(y.sum() for y in plain(x)))(whole), strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_clip_is_counted_with_its_cause_and_the_step_is_verified():
    experiment = built({"clip": 0.1, "adamw": {"weight_decay": 0.1}, "decay": {"match": "**/kernel"}})
    plain_one = built("adamw")
    ours, without = experiment.explain(), plain_one.explain()
    lines = [line for line in ours if line.cause.key == "optimizer.clip"]
    assert [(line.collective, line.count, line.phase) for line in lines] == [("all_reduce", 1, "update")] * 2
    assert {line.mesh_axes for line in lines} == {("data",), ("tensor",)}
    assert all(line.wire < 16 for line in lines)  # one number
    assert ours.total - without.total == sum(line.wire * line.count for line in lines)
    assert experiment.verify()


def test_a_glob_of_decay_that_fits_no_parameter():
    with pytest.raises(jshard.JShardError) as error:
        built({"adamw": {}, "decay": {"match": ["**/kernel", "up/kernl"]}})
    assert str(error.value) == (
        'jshard.train.optimizer.decay (m.yaml:1) has match "up/kernl", which fits no parameter; did you mean "up/kernel"?'
    )


@pytest.mark.seconds
def test_the_learning_rate_is_shown_and_recorded(capsys):
    built({"sgd": {}, "schedule": {"warmup_linear": {"peak": 0.1, "warmup": 2}}}, output="run", log={"every": 1})
    assert main(["train", "m.yaml"]) == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    np.testing.assert_allclose(
        [line["learning_rate"] for line in lines if "loss" in line], [0, 0.05, 0.1, 0.05], rtol=1e-6
    )
    assert "   learning rate 0.05   " in capsys.readouterr().out
    assert plain.drawn

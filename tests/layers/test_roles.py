"""Where claimed parameters lie, by the words of their signals and the roles of their axes; and each sentence."""

from __future__ import annotations

import pytest

from jshard.errors import JShardError
from jshard.layers import Linear
from jshard.layers.roles import Use, layout_in_use, not_stored, parameter_layouts
from jshard.signals.active_config import configuration, load, unload
from jshard.signals.claims import claims, staged

CONFIG = """\
jshard:
  mesh: {data: 2, tensor: 4}
columns:
  row: data
  column: tensor
  match: ["columns/**"]
sums: {reduction: tensor, match: ["sums/**"]}
both:
  column: [tensor]
  store: data
  match:
    - both/**
stored: {row: data, store: data, match: ["stored/**"]}
split: {store: [data, tensor], match: ["split/**"]}
zero1: {row: data, store: {optimizer: data}, match: ["zero1/**"]}
axis: {shard: {axis: 1, mesh: tensor}, store: data, match: ["axis/**"]}
last: {shard: {axis: -1, mesh: [data, tensor]}, match: ["last/**"]}
twice:
  shard: {axis: 0, mesh: data}
  store: data
  match: ["twice/**"]
everywhere: {shard: {replicated: true}, match: ["everywhere/**"]}
rest: {match: ["**"]}
"""
D, T = ("data",), ("tensor",)
R, C, B, S = "reduction", "column", "batch", "scan"


@pytest.fixture(autouse=True)
def loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)
    load("c.yaml")
    yield
    unload()


def used(*uses) -> list[Use]:
    """Of (path, shape, roles); what is not claimed here has a claim by another path of its signal."""
    paths = {path for path, *_ in uses}
    present = configuration()
    assert present is not None
    others = [f"{name}/-" for name in present.signals]
    found = claims(present, [*paths, *others])
    return [Use(path, found[path], shape, roles) for path, shape, roles in uses]


def laid(path, shape, roles):
    ((_, rest),) = parameter_layouts(used((path, shape, roles))).items()
    assert layout_in_use(used((path, shape, roles))[0].claim.signal, roles) == rest.in_use
    return rest.in_use.axes, rest.at_rest.axes


CASES = {
    "a kernel by columns": ("columns/w", (8, 16), (R, C), ((), T), ((), T)),
    "a kernel stored transposed": ("columns/w", (16, 8), (C, R), (T, ()), (T, ())),
    "heads": ("columns/w", (8, 4, 16), (R, C, C), ((), T, ()), ((), T, ())),
    "a bias of heads": ("columns/b", (4, 16), (C, C), (T, ()), (T, ())),
    "heads summed": ("sums/w", (4, 16, 8), (R, R, C), (T, (), ()), (T, (), ())),
    "a bias after a sum": ("sums/b", (8,), (C,), ((),), ((),)),
    "rows of a table": ("sums/embedding", (16, 8), (R, C), (T, ()), (T, ())),
    "stacked experts": ("columns/w", (6, 8, 16), (B, R, C), ((), (), T), ((), (), T)),
    "no use that tells": ("columns/w", (8, 16), (None, None), ((), ()), ((), ())),
    "a number": ("stored/scale", (), (), (), ()),
    "kept beside stored": ("both/w", (8, 16), (R, C), ((), T), (D, T)),
    "stored along what is whole": ("both/w", (16, 8), (C, R), (T, ()), (T, D)),
    "stored where it divides": ("both/w", (3, 16), (R, C), ((), T), ((), (*T, *D))),
    "a bias stored on top": ("both/b", (16,), (C,), (T,), ((*T, *D),)),
    "a filter, stored where it divides": ("stored/w", (3, 3, 6, 8), (R, R, R, C), ((), (), (), ()), ((), (), D, ())),
    "layers of a scan stay whole": ("stored/w", (4, 6, 8), (S, R, C), ((), (), ()), ((), D, ())),
    "a number of each layer": ("stored/w", (4,), (S,), ((),), ((),)),
    "columns alone where both do not divide": ("both/w", (3, 12), (R, C), ((), T), ((), T)),
    "a number of each column": ("both/b", (4,), (C,), (T,), (T,)),
    "stored nowhere": ("stored/w", (3, 5), (R, C), ((), ()), ((), ())),
    "stored over one of two": ("split/b", (6,), (C,), ((),), (D,)),
    "stored over each of two": ("split/w", (6, 4), (R, C), ((), ()), (D, T)),
    "stored over two": ("split/w", (4, 16), (R, C), ((), ()), ((), (*D, *T))),
    "shard": ("axis/w", (8, 16), (R, C), ((), T), (D, T)),
    "shard of no use": ("last/w", (8, 16, 8), (None, None, None), ((), (), (*D, *T)), ((), (), (*D, *T))),
    "shard whole": ("everywhere/w", (7, 5), (R, C), ((), ()), ((), ())),
    "others": ("w", (7, 5), (R, C), ((), ()), ((), ())),
}


@pytest.mark.parametrize("case", CASES)
def test_parameter_lies_as_the_words_and_its_roles_say(case):
    path, shape, roles, in_use, at_rest = CASES[case]
    assert laid(path, shape, roles) == (in_use, at_rest)


REPLICATED = {
    ("stored/w", (3, 5), (R, C)): "store: replicated over data, as 3 and 5 do not divide by 2",
    ("stored/w", (4, 7), (S, C)): "store: replicated over data, as 7 does not divide by 2",
    ("stored/w", (), ()): "store: replicated over data, as it is one number",
    ("both/b", (4,), (C,)): "store: replicated over data, as 1 does not divide by 2",
    ("split/b", (6,), (C,)): "store: replicated over tensor, as 3 does not divide by 4",
    ("zero1/b", (5,), (C,)): "store.optimizer: replicated over data, as 5 does not divide by 2",
    ("zero1/w", (5, 4), (R, C)): "",
    ("stored/w", (4, 5), (R, C)): "",
    ("w", (3, 5), (R, C)): "",
}


@pytest.mark.parametrize("use", REPLICATED)
def test_store_gives_the_reason_why_it_replicates(use):
    ((path, lies),) = parameter_layouts(used(use)).items()
    assert not_stored(used(use)[0], lies) == REPLICATED[use]


def test_linear_is_one_row_of_the_table():
    from flax import nnx

    from jshard.signals.scope import signal

    for name in ("columns", "sums", "both", "stored"):
        with signal(name):
            layer = Linear(16, 16, rngs=nnx.Rngs(0))
        roles = {"kernel": (R, C), "bias": (C,)}
        uses = used(*((f"{name}/{each}", (16,) * len(role), role) for each, role in roles.items()))
        rests = parameter_layouts(uses).values()
        assert [rest.at_rest for rest in rests] == list(layer.parameter_layouts().values())


def faults_of(*uses) -> tuple[str, ...]:
    with pytest.raises(JShardError) as told:
        parameter_layouts(used(*uses))
    return told.value.faults


def test_what_does_not_divide_is_one_sentence_for_all_that_are_alike():
    assert faults_of(
        *((f"columns/{layer}/attn/k_proj/w", (8, 2, 16), (R, C, C)) for layer in range(3)),
        ("columns/mlp/w", (8, 10), (R, C)),
        ("columns/ok", (8, 16), (R, C)),
        ("sums/w", (6, 8), (R, C)),
        ("axis/w", (4, 9), (None, None)),
        ("columns/3/attn/k_proj/w", (8, 6, 16), (R, C, C)),
        ("columns/three", (8, 3, 16), (R, C, C)),
    ) == (
        'signal "columns" (c.yaml:5) splits axis 1 of "columns/0/attn/k_proj/w" (8, 2, 16) and 2 more claimed at c.yaml:6 over '
        'mesh axis "tensor" of size 4; write {kv: 2, group: 2} for tensor: 4 in jshard.mesh, column: kv here, and column: [kv, '
        "group] where it divides",
        'signal "columns" (c.yaml:5) splits axis 1 of "columns/mlp/w" (8, 10) claimed at c.yaml:6 over mesh axis "tensor" of '
        "size 4; use 8 or 12, or claim it without column",
        'signal "sums" (c.yaml:7) splits axis 0 of "sums/w" (6, 8) claimed at c.yaml:7 over mesh axis "tensor" of size 4; use 4 '
        "or 8, or claim it without reduction",
        'signal "axis" (c.yaml:16) splits axis 1 of "axis/w" (4, 9) claimed at c.yaml:16 over mesh axis "tensor" of size 4; use '
        "8 or 12, or claim it without shard",
        'signal "columns" (c.yaml:5) splits axis 1 of "columns/3/attn/k_proj/w" (8, 6, 16) claimed at c.yaml:6 over mesh axis '
        '"tensor" of size 4; write {kv: 2, group: 2} for tensor: 4 in jshard.mesh, column: kv here, and column: [kv, group] where '
        "it divides",
        'signal "columns" (c.yaml:5) splits axis 1 of "columns/three" (8, 3, 16) claimed at c.yaml:6 over mesh axis "tensor" of '
        "size 4; use 4, or claim it without column",
    )


def test_two_mesh_axes_are_what_few_heads_take():
    load({
        "jshard": {"mesh": {"data": 2, "kv": 2, "group": 2}},
        "q": {"column": ["kv", "group"], "match": "q"}, "k": {"column": "kv", "match": "k"},
    })  # fmt: skip
    present = configuration()
    assert present is not None
    found = claims(present, ["q", "k"])
    uses = [Use(path, found[path], (8, heads, 16), (R, C, C)) for path, heads in (("q", 8), ("k", 2))]
    assert [rest.in_use.axes[1] for rest in parameter_layouts(uses).values()] == [("kv", "group"), ("kv",)]


def test_few_heads_of_a_sum_or_over_two_mesh_axes_are_told_as_other_sizes_are():
    load({
        "jshard": {"mesh": {"data": 8}},
        "q": {"column": "data", "match": "q/**"}, "o": {"reduction": "data", "match": "o/**"},
    })  # fmt: skip
    assert faults_of(("q/w", (4, 2, 16), (R, C, C)), ("o/w", (2, 8, 16), (R, C, C))) == (
        'signal "q" (<dict>) splits axis 1 of "q/w" (4, 2, 16) claimed at <dict> over mesh axis "data" of size 8; write {kv: 2, '
        "group: 4} for data: 8 in jshard.mesh, column: kv here, and column: [kv, group] where it divides",
        'signal "o" (<dict>) splits axis 0 of "o/w" (2, 8, 16) claimed at <dict> over mesh axis "data" of size 8; use 8, or claim it '
        "without reduction",
    )
    load({"jshard": {"mesh": {"kv": 2, "group": 4}}, "q": {"column": ["kv", "group"], "match": "q/**"}})
    assert faults_of(("q/w", (4, 2, 16), (R, C, C))) == (
        'signal "q" (<dict>) splits axis 1 of "q/w" (4, 2, 16) claimed at <dict> over mesh axes "kv" x "group" of size 8; use 8, or '
        "claim it without column",
    )


def test_an_axis_that_is_not_there_and_a_mesh_axis_twice_are_one_sentence_each():
    assert faults_of(("axis/b", (8,), (C,)), ("twice/w", (8, 8), (R, C))) == (
        'signal "axis" (c.yaml:16) shards axis 1 of "axis/b" (8,); use 0',
        'signal "twice" (c.yaml:20) names mesh axis "data" for store and for shard (c.yaml:19), which would split "twice/w" (8, 8) '
        "claimed at c.yaml:21 over it twice; use another mesh axis for one of them",
    )


# -- layers of a pipeline --

STAGES = {"mesh": {"data": 2, "stage": 2, "tensor": 2}, "train": {"microbatches": 2}, "pipeline": {"axis": "stage"}}
ST, LAYERS = ("stage",), (S, R, C)


def on_stages(stage, shape, roles, **keys):
    """What lies in a stack whose layers one signal splits, claimed by another: how, or the sentence that says why not."""
    load({"jshard": STAGES, "blocks": {"stage": stage, "match": "blocks/**"}, "own": {"match": "blocks/**", **keys}})
    present = configuration()
    assert present is not None
    use = Use("blocks/w", staged(present, claims(present, ["blocks/w"]))["blocks/w"], shape, roles)
    try:
        (rest,) = parameter_layouts([use]).values()
    except JShardError as fault:
        return str(fault)
    return rest.in_use.axes, rest.at_rest.axes


STAGED = {
    "as many layers on each": (("equal", (4, 8, 6), LAYERS, {"column": "tensor"}), (ST, (), T), (ST, (), T)),
    "stored beside": (("equal", (4, 8, 6), LAYERS, {"store": "data"}), (ST, (), ()), (ST, D, ())),
    "sharded beside": (("equal", (4, 8, 6), LAYERS, {"shard": {"axis": 1, "mesh": "tensor"}}), (ST, T, ()), (ST, T, ())),
    "about as much": (("balance", (3, 7, 6), LAYERS, {}), ((), (), ()), ((), (), ST)),
    "beside what is split": (("balance", (3, 8, 6), LAYERS, {"reduction": "tensor"}), ((), T, ()), ((), T, ST)),
    "where it does not divide": (("balance", (3, 7, 5), LAYERS, {}), ((), (), ()), ((), (), ())),
    "stored nowhere": (("equal", (4, 7, 5), LAYERS, {"store": "data"}), (ST, (), ()), (ST, (), ())),
    "stored over stages": (("balance", (4, 8, 6), LAYERS, {"store": "stage"}), ((), (), ()), ((), ST, ())),
    "a number of each layer": (("balance", (4,), (S,), {}), ((),), ((),)),
    "layers on stages by name": (({"0..1": 0, "2": 1}, (3, 8, 6), LAYERS, {}), ((), (), ()), ((), ST, ())),
    "on one stage": ((1, (8, 6), (R, C), {"store": "data"}), ((), ()), (D, ST)),
    "on one stage, whole": ((0, (7,), (C,), {}), ((),), ((),)),
}  # fmt: skip


@pytest.mark.parametrize("case", STAGED)
def test_layers_of_a_pipeline_lie_on_their_stages_or_rest_over_all(case):
    (stage, shape, roles, keys), in_use, at_rest = STAGED[case]
    assert on_stages(stage, shape, roles, **keys) == (in_use, at_rest)


SHARD_LAYERS = {"shard": {"axis": 0, "mesh": "tensor"}}
AT = 'of "blocks/w"'
WRONG_STAGES = {
    "no loop": (
        ("equal", (8, 6), (R, C), {}),
        'signal "blocks" (<dict>) says stage (<dict>), and "blocks/w" (8, 6) claimed at <dict> is in no loop over layers; build '
        "the layers with jshard.stack, or give stage to the stack alone",
    ),
    "layers": (
        ("equal", (3, 8, 6), LAYERS, {}),
        f'signal "blocks" (<dict>) splits axis 0 {AT} (3, 8, 6) claimed at <dict> over mesh axis "stage" of size 2; use 2 or 4, or '
        "claim it without stage",
    ),
    "layers, sharded beside": (
        ("equal", (3, 8, 6), LAYERS, {"shard": {"axis": 1, "mesh": "tensor"}}),
        f'signal "blocks" (<dict>) splits axis 0 {AT} (3, 8, 6) claimed at <dict> over mesh axis "stage" of size 2; use 2 or 4, or '
        "claim it without stage",
    ),
    "layers that a shard splits too": (
        ("equal", (4, 8, 6), LAYERS, SHARD_LAYERS),
        f'signal "own" (<dict>) shards axis 0 {AT} (4, 8, 6) claimed at <dict>, which signal "blocks" (<dict>) splits over stages '
        "(<dict>); shard another axis",
    ),
    "a shard of layers that go where they are needed": (
        ("balance", (3, 8, 6), LAYERS, SHARD_LAYERS),
        f'signal "own" (<dict>) splits axis 0 {AT} (3, 8, 6) claimed at <dict> over mesh axis "tensor" of size 2; use 2 or 4, or '
        "claim it without shard",
    ),
    "columns": (
        ("equal", (4, 8, 5), LAYERS, {"column": "tensor"}),
        f'signal "own" (<dict>) splits axis 2 {AT} (4, 8, 5) claimed at <dict> over mesh axis "tensor" of size 2; use 4 or 6, or '
        "claim it without column",
    ),
    "stored over stages": (
        ("equal", (4, 8, 6), LAYERS, {"store": "stage"}),
        'signal "own" (<dict>) names mesh axis "stage" for store and signal "blocks" (<dict>) for stage (<dict>), which would '
        f"split {AT[3:]} (4, 8, 6) claimed at <dict> over it twice; claim the layers apart from what all stages have",
    ),
    **{
        f"shard and store over {name}": (
            ("equal", (4, 8, 6), LAYERS, {"shard": {"axis": 1, "mesh": name}, "store": name}),
            f'signal "own" (<dict>) names mesh axis "{name}" for store and for shard (<dict>), which would split {AT[3:]} (4, 8, 6) '
            "claimed at <dict> over it twice; use another mesh axis for one of them",
        )
        for name in ("data", "tensor")
    },
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG_STAGES)
def test_what_can_not_lie_on_stages_is_one_sentence(fault):
    (stage, shape, roles, keys), sentence = WRONG_STAGES[fault]
    assert on_stages(stage, shape, roles, **keys) == sentence


def test_stacked_experts_are_split_by_expert_and_say_so():
    load({"jshard": {"mesh": {"data": 2, "tensor": 4}}, "e": {"expert": "tensor", "column": "data", "match": "e"}})
    present = configuration()
    assert present is not None
    claim = claims(present, ["e"])["e"]
    for shape, roles, axes in (((8, 6, 16), (B, R, C), (T, (), D)), ((6, 16), (R, C), ((), D))):
        (rest,) = parameter_layouts([Use("e", claim, shape, roles)]).values()
        assert rest.in_use.axes == rest.at_rest.axes == axes
    with pytest.raises(JShardError) as told:
        parameter_layouts([Use("e", claim, (6, 6, 16), (B, R, C))])
    assert str(told.value) == (
        'signal "e" (<dict>) splits axis 0 of "e" (6, 6, 16) claimed at <dict> over mesh axis "tensor" of size 4; use 4 or 8, or '
        "claim it without expert"
    )

"""What a configuration means: signals by name and glob, what two share, includes, overrides, GT's form."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jshard.errors import JShardError, Location
from jshard.signals.config import MeshPlan, Pipeline, load_configuration
from jshard.signals.signal import DTypes, Shard, Signal

GT = Path(__file__).parents[2] / "examples" / "gt"
MLP = """\
jshard:
  mesh: {data: 2, tensor: 4}
  train:
    model: {path: "examples.digits:Model", hidden: 256}
    batch: 64
    optimizer: adamw
layer1: {row: data, column: tensor}
layer2: {row: data, reduction: tensor}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mlp.yaml").write_text(MLP)
    return tmp_path / "configs"


def loaded(text: str, *overrides: str):
    Path("configs/here.yaml").write_text(text)
    return load_configuration("configs/here.yaml", overrides)


def test_config_of_a_file_is_read_with_its_places():
    configuration = load_configuration("configs/mlp.yaml")
    assert configuration.source == "configs/mlp.yaml"
    assert configuration.mesh == MeshPlan(("data", "tensor"), (2, 4), Location("elsewhere"))
    assert str(configuration.mesh.place) == "configs/mlp.yaml:2"
    assert str(configuration.mesh.places["tensor"]) == "configs/mlp.yaml:2"
    assert (configuration.axis_types, configuration.strict, configuration.default) == ("explicit", True, None)
    assert list(configuration.signals) == ["layer1", "layer2"]
    signal = configuration.signals["layer2"]
    assert signal == Signal("any name", row=("data",), reduction=("tensor",))
    assert str(signal) == 'signal "layer2" (configs/mlp.yaml:8)'
    assert signal.at("reduction") == Location("configs/mlp.yaml", 8, 21)
    assert configuration.train["model"] == {"path": "examples.digits:Model", "hidden": 256}
    assert configuration.train["optimizer"] == "adamw"
    assert str(configuration.train_places["model.hidden"]) == "configs/mlp.yaml:4"
    assert str(configuration.train_places["batch"]) == "configs/mlp.yaml:5"
    assert configuration.devices == 8


def test_config_keeps_the_places_of_arguments_however_deep():
    train = "jshard:\n  train:\n    optimizer:\n      adamw:\n        b1: 0.9\n        more:\n          x: 1\n"
    keys = ["optimizer", "optimizer.adamw", "optimizer.adamw.b1", "optimizer.adamw.more", "optimizer.adamw.more.x"]
    assert {key: place.line for key, place in loaded(train).train_places.items()} == dict(
        zip(keys, range(3, 8), strict=True)
    )


def test_config_takes_a_path_object_and_a_mapping():
    assert load_configuration(Path("configs/mlp.yaml")).source == os.path.join("configs", "mlp.yaml")
    configuration = load_configuration({"jshard": {"mesh": {"data": 8}}, "layer1": {"row": ("data",), "remat": True}})
    assert configuration.source == "<dict>"
    assert configuration.signals["layer1"] == Signal("x", row=("data",), remat="full")
    assert str(configuration.signals["layer1"]) == 'signal "layer1" (<dict>)'


@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": -1}, {"data": -1, "tensor": 2}, {"data": 2**31 - 1}])
def test_config_takes_one_open_size_and_any_number_of_devices(sizes: dict):
    configuration = load_configuration({"jshard": {"mesh": sizes}, "a": {"shard": {"axis": 0, "workers": [1]}}})
    assert configuration.mesh == MeshPlan(tuple(sizes), tuple(sizes.values()), Location(""))
    assert configuration.devices == max(sizes.values())


def test_config_takes_mesh_axes_that_cross_slices():
    said = {"a": {"size": 2, "over": "dcn"}, "data": 4, "b": {"size": 3, "over": "dcn"}}  # which come first
    configuration = load_configuration({"jshard": {"mesh": said}, "x": {"row": ["a", "data"]}})
    mesh = configuration.mesh
    assert mesh == MeshPlan(("a", "b", "data"), (2, 3, 4), Location(""), across=("a", "b"))
    assert mesh != load_configuration({"jshard": {"mesh": {"a": 2, "b": 3, "data": 4}}, "x": {"row": "data"}}).mesh
    assert (mesh.slices, configuration.devices) == (6, 24)
    assert str(mesh) == "{a: {size: 2, over: dcn}, b: {size: 3, over: dcn}, data: 4}"
    changed = load_configuration({"jshard": {"mesh": said}, "x": {"row": "data"}}, ["jshard.mesh.a.size=5"])
    assert changed.mesh and changed.mesh.slices == 15


def test_config_takes_any_number_of_a_device():
    configuration = load_configuration({"layer1": {"shard": {"axis": 0, "workers": [2**31 - 1]}}})
    assert configuration.devices == 2**31


def test_config_of_workers_is_a_mesh_that_stands_where_the_first_do():
    text = "layer1: {shard: {axis: 0, workers: [0, 1]}}\nlayer2: {shard: {axis: 0, workers: null}}\n"
    mesh = loaded(text).mesh
    assert mesh == MeshPlan(("workers",), (-1,), Location("")) and str(mesh.place) == "configs/here.yaml:1"


@pytest.mark.parametrize(
    "mesh, words",
    [("{data: 2, tensor: 4}", "8 devices"), ("{data: 1}", "1 device"), ("{data: 2, tensor: -1}", "all devices")],
)
def test_config_says_what_it_means(mesh: str, words: str):
    assert loaded(f"jshard: {{mesh: {mesh}, topology: 'v5e:4x4'}}\n\nlayer1: {{row: data}}\n").meaning() == [
        ("configs/here.yaml:1", f"mesh {mesh} of {words}, explicit"),
        ("configs/here.yaml:1", "plans are made for v5e:4x4"),
        ("configs/here.yaml:3", "layer1: rows over data"),
    ]


def test_config_reads_every_key_of_a_signal():
    configuration = loaded(
        "jshard: {mesh: {data: 2, tensor: 2, pipe: 2}}\n"
        "all: {row: data, column: [tensor, pipe], sequence: tensor, store: data, output: gather, backward: other,\n"
        "      compile: true, dtype: {param: float32, compute: bfloat16, reduce: float32}, remat: true,\n"
        "      expect: {all_gather: 2, bytes: 1.5KiB, reduce_scatter: 1}}\n"
        "other: {reduction: tensor, store: {optimizer: [data, pipe]}, output: scatter}\n"
        "kept: {store: {parameters: data, keep: true}}\n"
        "array: {shard: {axis: -1, mesh: [data, tensor]}}\n"
    )
    signal = configuration.signals["all"]
    assert signal == Signal(
        "all", row=("data",), column=("tensor", "pipe"), sequence=("tensor",), store=("data",), output="gather",
        backward="other", compile=True, dtype=DTypes("float32", "bfloat16", "float32"), remat="full",
    )  # fmt: skip
    assert signal.expect == (("all_gather", 2), ("bytes", 1536), ("reduce_scatter", 1))
    assert configuration.signals["other"].store_optimizer == ("data", "pipe")
    assert configuration.signals["kept"] == Signal("kept", store=("data",), store_keep=True)
    assert configuration.signals["other"].store == ()
    assert configuration.signals["array"].shard == Shard(-1, None, ("data", "tensor"), False)


def test_config_looks_up_the_longest_name_and_exact_before_globs():
    configuration = loaded(
        "jshard: {mesh: {a: 2}}\n"
        "attn: {row: a}\n"
        "decoder/attn: {column: a}\n"
        "'block*/attn': {reduction: a}\n"
        "block7/attn: {remat: true}\n"
        "'*': {compile: true}\n"
    )
    assert configuration.lookup(("attn",)).row == ("a",)
    assert configuration.lookup(("decoder", "attn")).column == ("a",)
    assert configuration.lookup(("decoder/attn",)).column == ("a",)
    assert configuration.lookup(("model", "decoder", "attn")).column == ("a",)
    assert configuration.lookup(("encoder", "attn")).row == ("a",)
    assert configuration.lookup(("decoder", "block3", "attn")).reduction == ("a",)
    assert configuration.lookup(("block7", "attn")).remat
    assert configuration.lookup(("anything",)).compile
    assert configuration.lookup(("attn", "inner")).compile  # `*` is one component of the name, never two
    glob = configuration.lookup(("decoder", "block3", "attn"))
    assert glob.name == "block3/attn" and str(glob.place) == "configs/here.yaml:4"
    assert configuration.lookup(("decoder", "attn")) is configuration.lookup(("decoder", "attn"))
    assert loaded("'layer?': {remat: true}\n").lookup(("layer1",)).name == "layer1"
    with pytest.raises(JShardError) as told:
        loaded("'a*': {}\n'*b': {}\n'?b': {}\n").lookup(("ab",))
    assert str(told.value) == (
        'signal "ab" is matched by both "a*" (configs/here.yaml:1) and "*b" (configs/here.yaml:2); write "ab" itself'
    )


def test_config_answers_for_places_that_nothing_names():
    strict = loaded("layer1: {remat: true}\n")
    with pytest.raises(JShardError, match='^signal "layer" is not in configs/here.yaml; did you mean "layer1"\\?$'):
        strict.lookup(("layer",))
    assert loaded("jshard: {strict: false}\nlayer1: {remat: true}\n").lookup(("layer",)) == Signal("layer")
    by_default = loaded("jshard: {default: layer1}\nlayer1: {remat: true}\n")
    assert by_default.lookup(("layer",)).remat
    assert by_default.digest(("layer",)) == by_default.digest(("layer1",))


def test_digest_is_shared_by_equal_layers_and_by_nothing_else():
    configuration = loaded(
        "jshard: {mesh: {a: 2}}\n"
        + "".join(f"layer{number}: {{row: a}}\n" for number in range(48))
        + "other: {column: a}\nencoder: {row: a}\ndecoder: {row: a}\ndecoder/attn: {column: a}\n"
        + "encoder/attn: {row: a}\n"
        + "'stack/block*': {row: a}\n'stack/block*/attn': {column: a}\nstack/block1/mlp: {remat: true}\nmlp: {}\n"
    )
    layers = {configuration.digest((f"layer{number}",)) for number in range(48)}
    assert len(layers) == 1
    assert configuration.digest(("other",)) not in layers
    assert configuration.digest(("encoder",)) != configuration.digest(("decoder",))
    assert configuration.digest(("layer1", "encoder")) == configuration.digest(("encoder",))
    assert configuration.digest(()) == configuration.digest(()) != configuration.digest(("layer1",))
    blocks = {configuration.digest(("stack", f"block{number}")) for number in (2, 3, 4)}
    assert len(blocks) == 1
    assert configuration.digest(("stack", "block1")) not in blocks


def test_digest_tells_apart_what_only_precedence_does():
    by_length = loaded(
        "jshard: {mesh: {a: 2}, strict: false}\nx/y/z: {row: a}\ny/z: {column: a}\np/q/z: {column: a}\nq/z: {row: a}\n"
    )
    assert by_length.digest(("x", "y")) != by_length.digest(("p", "q"))
    by_globs = loaded(
        "jshard: {mesh: {a: 2}, strict: false}\n"
        "x/z: {row: a}\n'[x]/z': {column: a}\np/z: {column: a}\n'[p]/z': {row: a}\n"
    )
    assert by_globs.digest(("x",)) != by_globs.digest(("p",))


PLACEMENTS = st.sampled_from([{"row": "a"}, {"column": "a"}, {"remat": True}])
NAMES = st.lists(st.sampled_from(["a", "b", "*", "?"]), min_size=1, max_size=3).map("/".join)


@settings(max_examples=150, deadline=None, database=None)
@given(st.dictionaries(NAMES, PLACEMENTS, max_size=6))
def test_digest_decides_every_lookup_below_it(named: dict):
    """Two paths of equal digest find equal signals, or none, under every further nesting."""
    configuration = load_configuration({"jshard": {"mesh": {"a": 2}, "strict": False}, **named})
    words = ["a", "b", "c"]
    paths = [(), *((x,) for x in words), *((x, y) for x in words for y in words)]

    def found(path):
        try:
            return configuration.lookup(path)
        except JShardError:  # two globs
            return None

    def digest(path):
        try:
            return configuration.digest(path)
        except JShardError:
            return path

    for first in paths:
        for second in paths:
            if digest(first) == digest(second):
                for below in paths[1:]:
                    assert found(first + below) == found(second + below), (first, second, below)


def test_fingerprint_is_equal_for_what_places_alike():
    alike = [
        "jshard: {mesh: {a: 2}}\nx: {row: a}\ny: {}\n",
        "# a comment\n\ny: {}\nx:\n  row: [a]\njshard: {train: {steps: 3}, strict: true, mesh: {a: 2}}\n",
        "jshard: {mesh: {a: 2}}\n_t: {row: a}\nx: {extends: _t, expect: {all_reduce: 1}}\ny: {}\n",
    ]
    others = [
        "jshard: {mesh: {a: 4}}\nx: {row: a}\ny: {}\n",
        "jshard: {mesh: {a: 2}, axis_types: auto}\nx: {row: a}\ny: {}\n",
        "jshard: {mesh: {a: 2}, strict: false}\nx: {row: a}\ny: {}\n",
        "jshard: {mesh: {a: 2}, default: x}\nx: {row: a}\ny: {}\n",
        "jshard: {mesh: {a: 2}}\nx: {column: a}\ny: {}\n",
        "jshard: {mesh: {a: 2}}\nx: {row: a}\nz: {}\n",
    ]
    assert len({loaded(text).fingerprint for text in alike}) == 1
    assert len({loaded(text).fingerprint for text in [*alike, *others]}) == 1 + len(others)
    assert loaded(alike[0]) != loaded(alike[0])


def test_extends_lays_the_later_over_the_earlier_and_own_keys_over_all():
    configuration = loaded(
        "jshard: {mesh: {a: 2, b: 2}}\n"
        "_one: {row: a, dtype: {param: float32, compute: float32}, remat: true}\n"
        "_two: {extends: _one, dtype: {compute: bfloat16}}\n"
        "x: {extends: [_one, _two], column: b, remat: false}\n"
        "y: {extends: x, row: []}\n"
    )
    x = configuration.signals["x"]
    assert x == Signal("x", row=("a",), column=("b",), dtype=DTypes(compute="bfloat16"))
    assert str(x.at("row")) == "configs/here.yaml:2" and str(x.at("dtype.compute")) == "configs/here.yaml:3"
    assert "dtype.param" not in x.places
    assert configuration.signals["y"].row == ()
    assert list(configuration.signals) == ["x", "y"]


def test_include_composes_files_and_keeps_their_places(folder: Path):
    (folder / "parts").mkdir()
    (folder / "parts" / "mesh.yaml").write_text("jshard:\n  mesh: {data: 2}\n  train: {steps: 5, batch: 8}\n")
    (folder / "parts" / "a.yaml").write_text("jshard: {include: mesh.yaml}\nlayer1: {row: data, remat: true}\n")
    (folder / "parts" / "b.yaml").write_text("jshard: {include: mesh.yaml}\nlayer2: {row: data}\n")
    configuration = loaded(
        "jshard:\n  include: [parts/a.yaml, parts/b.yaml]\n  mesh: {tensor: 2}\n  train: {steps: 7}\n"
        "layer1: {column: tensor, remat: false}\nlayer3: {}\n"
    )
    assert configuration.mesh == MeshPlan(("data", "tensor"), (2, 2), Location(""))
    assert dict(configuration.train) == {"steps": 7, "batch": 8}
    assert str(configuration.train_places["batch"]) == "configs/parts/mesh.yaml:3"
    assert list(configuration.signals) == ["layer1", "layer2", "layer3"]
    layer1 = configuration.signals["layer1"]
    assert layer1 == Signal("layer1", row=("data",), column=("tensor",))
    assert str(layer1.at("row")) == "configs/parts/a.yaml:2" and str(layer1) == 'signal "layer1" (configs/here.yaml:5)'
    by_name = {"jshard": {"include": str(folder / "parts" / "a.yaml")}}
    assert load_configuration(by_name).signals["layer1"].row == ("data",)
    assert load_configuration({"jshard": {"include": "configs/parts/b.yaml"}}).signals["layer2"].row == ("data",)


@pytest.mark.parametrize(
    ("top", "names"),
    [
        ("{stage: 2, tensor: 4, data: 1}", ("stage", "tensor", "data")),
        ("{stage: 2, tensor: 4}", ("data", "tensor", "stage")),
    ],
)
def test_a_mesh_is_in_the_order_of_the_file_that_has_all_its_axes(folder: Path, top: str, names: tuple[str, ...]):
    (folder / "base.yaml").write_text("jshard: {mesh: {data: 8, tensor: 1}}\n")
    mesh = loaded(f"jshard: {{include: base.yaml, mesh: {top}}}\n").mesh
    assert mesh is not None and mesh.names == names


def test_include_is_laid_under_a_signal_key_by_key_and_no_deeper(folder: Path):
    (folder / "base.yaml").write_text(
        "data: {dtype: {param: float32}, remat: true}\nlayer1: {dtype: {param: float32}, remat: true}\nlayer2: 3\n"
        "layer3: {remat: true}\n"
    )
    text = "jshard: {include: base.yaml}\ndata: {dtype: {compute: bfloat16}}\nlayer1: {dtype: {compute: bfloat16}}\nlayer2: {}\n"
    configuration = loaded(text)
    for name in ("data", "layer1"):  # the first is no data of an experiment
        assert configuration.signals[name] == Signal(name, remat="full", dtype=DTypes(compute="bfloat16"))
    assert configuration.signals["layer2"] == Signal("layer2")
    with pytest.raises(JShardError, match=r'^signal "layer3" \(configs/here.yaml:5\) has no value; '):
        loaded(text + "layer3:\n")


@pytest.mark.parametrize(
    ("base", "top", "means"),
    [
        (
            "{path: a:B, x: 1, y: {z: 1}}",
            "{path: a:B, y: {w: 2}, v: 3}",
            {"path": "a:B", "x": 1, "y": {"w": 2}, "v": 3},
        ),
        ("{path: a:B, x: 1}", "{path: a:C, y: 2}", {"path": "a:C", "y": 2}),
        ("{path: a:B, x: 1}", "{path: a:A, y: 2}", {"path": "a:A", "y": 2}),
        ("{text: one, length: 8}", "{text: two, tokens: bytes}", {"text": "two", "length": 8, "tokens": "bytes"}),
        ("{text: one, length: 8}", "{path: a:B, x: 1}", {"path": "a:B", "x": 1}),
        ("{path: a:B, x: 1}", "{text: one}", {"text": "one"}),
    ],
)
def test_include_is_laid_under_the_same_model_or_data_argument_by_argument(
    folder: Path, base: str, top: str, means: dict
):
    (folder / "base.yaml").write_text(f"jshard: {{train: {{data: {base}, log: {{every: 3, tensorboard: true}}}}}}\n")
    train = loaded(f"jshard: {{include: base.yaml, train: {{data: {top}, log: {{every: 5}}}}}}\n").train
    assert train["data"] == means and train["log"] == {"every": 5}


def test_override_goes_to_the_experiment_a_signal_or_jshard():
    configuration = load_configuration(
        "configs/mlp.yaml",
        ["steps=1e3", "optimizer.learning_rate=1e-3", "model.hidden=017", "layer1.column=[]", "layer2={row: [data]}"]
        + ["jshard.mesh.data=4", "jshard.strict=false", "evaluation=10", "evaluation.every=20"]
        + ["jshard.kernel.matmul=xla", "layer2.dtype.compute=bfloat16"],
    )
    assert load_configuration("configs/mlp.yaml", ["jshard.mesh={tensor: 2, data: 2}"]).devices == 4
    assert configuration.mesh is not None and str(configuration.mesh.place) == "configs/mlp.yaml:2"
    assert str(configuration.train_places["optimizer"]) == "configs/mlp.yaml:6"
    assert configuration.train["steps"] == 1000 and isinstance(configuration.train["steps"], int)
    assert configuration.train["optimizer"] == {"name": "adamw", "learning_rate": 1e-3}
    assert configuration.train["model"] == {"path": "examples.digits:Model", "hidden": 17}
    assert configuration.train["evaluation"] == {"every": 20}
    kernel = (("matmul", "xla"),)
    assert configuration.signals["layer1"] == Signal("layer1", row=("data",), kernel=kernel)
    assert configuration.signals["layer2"] == Signal(
        "layer2", row=("data",), kernel=kernel, dtype=DTypes(compute="bfloat16")
    )
    assert configuration.mesh == MeshPlan(("data", "tensor"), (4, 4), Location(""))
    assert not configuration.strict
    command = Location("the command line")
    assert configuration.signals["layer1"].at("column") == command
    assert configuration.signals["layer1"].at("row") == Location("configs/mlp.yaml", 7, 10)
    assert configuration.train_places["optimizer.learning_rate"] == command
    assert str(configuration.train_places["batch"]) == "configs/mlp.yaml:5"
    assert load_configuration("configs/mlp.yaml").signals["layer1"].column == ("tensor",)


def test_override_finds_names_with_dots_slashes_and_stars():
    configuration = loaded(
        "jshard: {mesh: {tensor: 2}}\nlayer: {}\nlayer.1: {}\ndecoder/attn: {}\n'block*/mlp': {}\n"
        "_t: {}\nx: {extends: _t}\n",
        "layer.1.column=tensor",
        "decoder/attn.column=tensor",
        "block*/mlp.reduction=tensor",
        "_t.row=tensor",
    )
    assert configuration.signals["layer"] == Signal("layer")
    assert configuration.signals["layer.1"].column == ("tensor",)
    assert configuration.signals["decoder/attn"].column == ("tensor",)
    assert configuration.lookup(("block1", "mlp")).reduction == ("tensor",)
    assert configuration.signals["x"].row == ("tensor",)


def test_override_leaves_other_holders_of_an_alias_alone():
    configuration = loaded("jshard: {mesh: {a: 2}}\nx: &x {row: a}\ny: *x\n", "x.row=[]")
    assert configuration.signals["x"].row == () and configuration.signals["y"].row == ("a",)


def test_config_refuses_to_be_changed():
    configuration = load_configuration("configs/mlp.yaml")
    with pytest.raises(dataclasses.FrozenInstanceError):
        configuration.strict = False
    with pytest.raises(TypeError):
        configuration.signals["layer3"] = Signal("layer3")


def test_gt_files_load_unchanged_and_mean_what_they_say():
    stages = load_configuration(GT / "stages.yaml")
    assert stages.mesh == MeshPlan(("workers",), (-1,), Location(""))
    assert stages.devices == 4
    assert stages.lookup(("encoder",)).shard == Shard(axis=0, workers=(0, 1))
    assert stages.lookup((stages.lookup(("encoder",)).backward or "",)).shard == Shard(axis=0, workers=(2, 3))
    arrays = load_configuration(GT / "arrays.yaml")
    assert arrays.signals["batch"].shard == Shard(axis=0, workers=None)
    assert arrays.signals["features"].shard == Shard(axis=1, workers=(0, 1))
    assert arrays.signals["weights"].shard == Shard(axis=None, workers=None, replicated=True)
    compiled = load_configuration(GT / "compiled.yaml")
    assert compiled.signals["hot"] == Signal("hot", compile=True)
    assert compiled.signals["hot_batch"] == Signal("hot_batch", compile=True, shard=Shard(0, (0, 1, 2, 3)))
    assert loaded("hot: {compile: true}\n").mesh is None
    assert {path.name for path in GT.glob("*.yaml")} == {"stages.yaml", "arrays.yaml", "compiled.yaml", "pipeline.yaml"}


def test_a_pipeline_says_its_stages_and_is_what_it_says_wherever_it_stands():
    pipeline = Pipeline("stage", 4, place=Location("a.yaml", 3))
    assert str(pipeline) == "stages over stage, 4 microbatches by 1f1b" and pipeline == Pipeline("stage", 4)
    assert str(Pipeline("stage", 4, chunks=2)) == "stages over stage, 2 chunks each, 4 microbatches by 1f1b"


def test_data_that_is_no_mapping_is_a_sentence_beside_an_include_of_one(folder: Path):
    (folder / "base.yaml").write_text("jshard: {train: {data: {path: a:B}}}\n")
    with pytest.raises(JShardError, match="data"):
        loaded("jshard: {include: base.yaml, train: {data: 3}}\n")


def test_lists_of_workers_are_stages_of_one_mesh_where_they_can_be():
    said = load_configuration(GT / "pipeline.yaml").by_stages
    assert said is not None and said.mesh == MeshPlan(("stage", "workers"), (4, 2), Location(""))
    assert (said.workers, said.devices, said.axis_types) == (((0, 1), (2, 3), (4, 5), (6, 7)), 8, "explicit")
    rows = said.signals["stage2_rows"]
    assert (rows.stage, rows.shard) == ("2", Shard(axis=0, mesh=("workers",)))
    assert "one after the other, of one microbatch" in str(said)
    (place,) = (place for place, says in said.meaning() if "one after the other" in says)
    assert place.endswith("pipeline.yaml:3")
    far = {name: {"shard": {"axis": 0, "workers": workers}} for name, workers in {"a": [0, 1], "b": [6, 7]}.items()}
    assert load_configuration(far).by_stages.devices == 8
    assert load_configuration({"a": {}}).by_stages is None
    assert load_configuration(GT / "stages.yaml").by_stages is not None
    for apart in ({"a": [0, 1], "b": [1, 2]}, {"a": [0, 1], "b": [2]}, {"a": [0, 1]}):  # they overlap, or are not alike
        said = {name: {"shard": {"axis": 0, "workers": workers}} for name, workers in apart.items()}
        assert load_configuration(said).by_stages is None
        with pytest.raises(JShardError) as told:
            load_configuration({"jshard": {"train": {"microbatches": 2}, "pipeline": {"axis": "stage"}}, **said})
        assert str(told.value) == (
            "jshard.pipeline (<dict>) has no jshard.mesh, and the signals name no workers that could be its stages; write "
            "mesh: {stage: 4, tensor: 2} beside it, or disjoint lists of workers of one length"
        )


@pytest.mark.usefixtures("fresh")
def test_config_loads_without_jax():
    program = (
        "import sys\nfrom jshard.signals.config import load_configuration\n"
        "from jshard.signals.schema import json_schema\n"
        "load_configuration('configs/mlp.yaml', ['steps=3']).lookup(('layer1',)); json_schema()\n"
        "assert not {'jax', 'flax', 'numpy', 'pydantic', 'omegaconf'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": str(GT.parent.parent)})


@pytest.mark.parametrize(
    ("said", "means"),
    [("true", "full"), ("full", "full"), ("products", "products"), ("{save: [q, k]}", ("q", "k")), ("false", "")],
)
def test_remat_is_a_word_or_the_names_that_are_kept(said, means, tmp_path):
    (tmp_path / "f.yaml").write_text(f"a: {{remat: {said}}}\n")
    assert load_configuration(tmp_path / "f.yaml").signals["a"].remat == means

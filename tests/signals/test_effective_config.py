"""A configuration key by key, each with the line that says it."""

from __future__ import annotations

from jshard.signals.config import load_configuration
from jshard.signals.effective_config import flat, lines

TEXT = """\
jshard:
  mesh: {data: 2, tensor: 4, pipe: 1}
  train:
    model: m:f
    batch: 16
    optimizer: {name: adamw, b1: 0.9, nesterov: true}
a:
  row: data
  column: [tensor]
  store: {optimizer: [data, pipe]}
  remat: true
  dtype: {compute: bfloat16}
  kernel: {matmul: xla, all_reduce: one_shot}
  expect:
    all_reduce: 1
    all_gather: 2
    permute: 3
b: {}
"""


def test_every_key_that_says_something_is_a_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.yaml").write_text(TEXT)
    found = [
        (str(place), key, value) for place, key, value in lines(load_configuration("f.yaml", ["jshard.train.batch=32"]))
    ]
    assert found == [
        ("f.yaml:2", "jshard.mesh.data", "2"),
        ("f.yaml:2", "jshard.mesh.tensor", "4"),
        ("f.yaml:2", "jshard.mesh.pipe", "1"),
        ("f.yaml:4", "jshard.train.model", "m:f"),
        ("the command line", "jshard.train.batch", "32"),
        ("f.yaml:6", "jshard.train.optimizer.name", "adamw"),
        ("f.yaml:6", "jshard.train.optimizer.b1", "0.9"),
        ("f.yaml:6", "jshard.train.optimizer.nesterov", "true"),
        ("f.yaml:8", "a.row", "data"),
        ("f.yaml:9", "a.column", "tensor"),
        ("f.yaml:10", "a.store.optimizer", "data, pipe"),
        ("f.yaml:12", "a.dtype.compute", "bfloat16"),
        ("f.yaml:11", "a.remat", "full"),
        ("f.yaml:13", "a.kernel.all_reduce", "one_shot"),
        ("f.yaml:13", "a.kernel.matmul", "xla"),
        ("f.yaml:16", "a.expect.all_gather", "2"),
        ("f.yaml:15", "a.expect.all_reduce", "1"),
        ("f.yaml:17", "a.expect.permute", "3"),
        ("f.yaml:18", "b", "{}"),
    ]
    assert [(str(place), key) for place, key, _ in lines(load_configuration({"a": {"remat": True}}))] == [
        ("<dict>", "a.remat")
    ]


def test_a_pipeline_is_a_line_for_each_of_its_keys():
    pipeline = {"axis": "pipe", "schedule": "gpipe"}
    said = {
        "jshard": {"mesh": {"pipe": 2}, "pipeline": pipeline, "train": {"microbatches": 4}},
        "a": {"stage": "equal"},
    }
    assert [(key, value) for _, key, value in lines(load_configuration(said))] == [
        ("jshard.mesh.pipe", "2"),
        *((f"jshard.pipeline.{key}", str(value)) for key, value in pipeline.items()),
        ("jshard.train.microbatches", "4"),
        ("a.stage", "equal"),
    ]


def test_nested_keys_are_joined_by_dots():
    assert [*flat({"a": {"b": 1, "c": {"d": 2}}, "e": 3})] == [("a.b", 1), ("a.c.d", 2), ("e", 3)]
    assert [*flat(1, "a")] == [("a", 1)]

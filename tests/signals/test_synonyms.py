"""Words of other frameworks in a configuration, each with its whole hint."""

from __future__ import annotations

import re

import pytest

from jshard.errors import JShardError
from jshard.signals.config import load_configuration
from jshard.signals.schema import COLLECTIVES, DTYPES, JSHARD, SIGNAL, TRAIN
from jshard.signals.synonyms import MESH_AXES, WORDS, meant

HEAD = "jshard:\n  mesh: {data: 2, tensor: 4}\n"
RULES = 'write mesh, and a signal for each rule: up: {column: tensor, match: ["**/up/**"]}'


def hint_of(tmp_path, text: str) -> str:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(JShardError) as told:
        load_configuration(tmp_path / "c.yaml")
    [fault] = told.value.faults
    return fault.partition("; ")[2]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("spec", 'did you mean "shard"?'),
        ("partition_spec", 'did you mean "shard"?'),
        ("fsdp", 'did you mean "store"?'),
        ("zero", 'did you mean "store"?'),
        ("zero3", 'did you mean "store"?'),
        ("zero1", "write store: {optimizer: data}"),
        ("colwise", 'did you mean "column"?'),
        ("rowwise", 'did you mean "reduction"?'),
        ("row_parallel", 'did you mean "reduction"?'),
        ("tp", "write column or reduction"),
        ("dp", 'did you mean "row"?'),
        ("sp", 'did you mean "sequence"?'),
        ("cp", 'did you mean "ring"?'),
        ("ep", 'did you mean "expert"?'),
        ("pp", 'did you mean "stage"?'),
        ("ulysses", "write attention: ulysses"),
        ("checkpoint-policy", 'did you mean "remat"?'),
        ("param_dtype", "write dtype: {param: bfloat16}"),
        ("bf16", "write dtype: {compute: bfloat16}"),
        ("params", 'did you mean "match"?'),
        ("Row", 'did you mean "row"?'),
    ],
)
def test_key_of_another_framework_in_a_signal_has_the_key_of_ours_for_a_hint(key, hint, tmp_path):
    assert hint_of(tmp_path, f"{HEAD}layer: {{{key}: data}}\n") == hint


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("remat: dots_saveable", 'did you mean "products"?'),
        ("remat: minimal", 'did you mean "products"?'),
        ("remat: nothing_saveable", 'did you mean "full"?'),
        ("remat: everything_saveable", 'did you mean "false"?'),
        ("dtype: {compute: float8}", "write bfloat16 or float16, the narrowest there are"),
        ("dtype: {param: float8_e4m3fn}", "write bfloat16 or float16, the narrowest there are"),
        ("dtype: {compute: bf16}", 'did you mean "bfloat16"?'),
        ("dtype: {compute: half}", 'did you mean "float16"?'),
        ("column: tensor, output: all_gather", 'did you mean "gather"?'),
        ("row: dp", 'did you mean "data"?'),
        ("column: mp", 'did you mean "tensor"?'),
    ],
)
def test_value_of_another_framework_has_the_word_of_ours_for_a_hint(line, hint, tmp_path):
    assert hint_of(tmp_path, f"{HEAD}layer: {{{line}}}\n") == hint


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("mesh_shape: 8", "write mesh: {data: 2, tensor: 4}"),
        ("logical_axis_rules: [a]", RULES),
        ("pipeline_parallel: 2", "write pipeline: {axis: stage}"),
        ("train: {lr: 0.1}", "write optimizer: {name: adamw, learning_rate: 1.0e-3}"),
        ("train: {max_grad_norm: 1}", "write optimizer: {name: adamw, clip: 1.0}"),
        ("train: {accumulate: 3}", 'did you mean "microbatches"?'),
        ("train: {gradient_accumulation_steps: 3}", 'did you mean "microbatches"?'),
        ("train: {epochs: 3}", 'did you mean "steps"?'),
        ("train: {eval_every: 3}", 'did you mean "evaluation"?'),
    ],
)
def test_key_of_another_framework_under_jshard_has_a_hint(line, hint, tmp_path):
    assert hint_of(tmp_path, f"{HEAD}  {line}\nlayer: {{}}\n") == hint


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("mesh_axes: {data: 8}", 'write mesh: {data: 2, tensor: 4} under "jshard:"'),
        ("logical_axis_rules: [a]", f'{RULES} under "jshard:"'),
        ("tp: 4", 'write mesh: {data: 2, tensor: 4} under "jshard:"'),
        ("batch_size: 4", "write batch under jshard.train"),
        ("steps: 4", "write steps under jshard.train"),
    ],
)
def test_key_of_another_framework_beside_signals_has_its_place_for_a_hint(line, hint, tmp_path):
    assert hint_of(tmp_path, f"{line}\nlayer: {{}}\n") == hint


def test_signals_may_have_the_names_of_other_frameworks(tmp_path):
    (tmp_path / "c.yaml").write_text(HEAD + "tp: {}\nfsdp: {row: data}\nmesh_axes: {row: data}\nlr: {}\n")
    assert [*load_configuration(tmp_path / "c.yaml").signals] == ["tp", "fsdp", "mesh_axes", "lr"]


def test_each_row_begins_with_a_word_of_ours():
    ours = {*SIGNAL, *JSHARD, *TRAIN, *DTYPES, "full", "products", "false", "gather", "sum", "scatter", "ulysses"}
    ours |= {"auto", "explicit", "zero_bubble", *COLLECTIVES}
    heads = {row: re.split(r"\W", row)[0] for row in WORDS}
    assert {*heads.values()} <= ours
    assert [row for row, theirs in WORDS.items() if row in theirs.split()] == []
    assert meant("tp", ["tensor"], MESH_AXES) == ["tensor"]

"""One table of keys: what the loader takes is what the schema tells editors."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from jshard.errors import JShardError
from jshard.signals.config import load_configuration
from jshard.signals.schema import JSHARD, SHARD, SIGNAL, TRAIN, json_schema
from jshard.signals.value_types import Key, Keys, flag

DESIGN_KEYS = """row column reduction shard sequence store output expert stage ring attention backward compile dtype remat kernel
match allow extends expect""".split()
JSHARD_KEYS = "mesh axis_types include strict default topology kernel pipeline budget train".split()
TRAIN_KEYS = (
    "metrics model data batch microbatches steps optimizer seed checkpoint log loss evaluation output watchdog".split()
)


def test_schema_has_every_key_of_the_design():
    assert set(SIGNAL) == set(DESIGN_KEYS)
    assert set(JSHARD) == set(JSHARD_KEYS)
    assert set(TRAIN) == set(TRAIN_KEYS)
    assert set(SHARD) == {"axis", "workers", "replicated", "mesh"}


def test_schema_is_json_with_a_description_for_every_key():
    schema = json_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert "# yaml-language-server: $schema=jshard.schema.json" in schema["$comment"]

    def described(table: dict) -> None:
        for choice in [table, *table.get("anyOf", [])]:
            for name, key in choice.get("properties", {}).items():
                assert key["description"], name
                described(key)

    described(schema["properties"]["jshard"])
    described(schema["$defs"]["signal"])
    assert "workers" in schema["$defs"]["signal"]["properties"]["shard"]["properties"]


def accepts(schema: dict, value: object, root: dict) -> bool:
    """The part of JSON Schema that ours uses."""
    kinds = {
        "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int,
        "number": (int, float),
    }  # fmt: skip
    if "$ref" in schema:
        return accepts(root["$defs"][schema["$ref"].split("/")[-1]], value, root)
    if "not" in schema or ("enum" in schema and value not in schema["enum"]):
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if "anyOf" in schema and not any(accepts(each, value, root) for each in schema["anyOf"]):
        return False
    kind = schema.get("type")
    if kind is not None and (
        not isinstance(value, kinds[kind]) or (kind in ("integer", "number") and isinstance(value, bool))
    ):
        return False
    if isinstance(value, (int, float)) and not (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and schema.get("exclusiveMinimum", -math.inf) < value < schema.get("exclusiveMaximum", math.inf)
    ):
        return False
    if isinstance(value, str):
        return len(value) >= schema.get("minLength", 0) and re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, list):
        if (schema.get("uniqueItems") and len(set(map(str, value))) < len(value)) or len(value) < schema.get(
            "minItems", 0
        ):
            return False
        return all(accepts(schema.get("items", {}), each, root) for each in value)
    if isinstance(value, dict):
        if len(value) < schema.get("minProperties", 0) or set(schema.get("required", ())) - set(value):
            return False
        further = schema.get("additionalProperties", True)
        for name, each in value.items():
            patterns = schema.get("patternProperties", {}).items()
            other = next((inside for pattern, inside in patterns if re.search(pattern, name)), further)
            inside = schema.get("properties", {}).get(name, other)
            if inside is False or (inside is not True and not accepts(inside, each, root)):
                return False
    return True


PIPELINE, PARTS = {"axis": "a"}, {"microbatches": 2}
VALUES = [
    None, True, False, 0, 1, -1, 3, "a", "", "b", ["a"], ["a", "b"], ["a", "a"], [], [0, 1], [0, 0], {}, {"a": 2},
    {"a": 0}, {"optimizer": "a"}, {"every": 5}, {"every": 0}, {"name": "adamw", "b1": 0.9}, {"path": "m:f", "x": [1]},
    "m:f", "64MiB", "v5e:4x4", "V5e:4x4", "h100:8", "tpu7x:2x2x2", "explicit", "auto", "gather", "float32", {"compute": "bfloat16"}, {"compute": "int8"},
    {"psum": 1}, {"psum": -1}, {"axis": 0, "workers": None}, {"axis": 0, "workers": [0, 1]}, {"axis": "0"},
    {"mesh": "a", "axis": 0}, {"strict": True}, "ulysses", "equal", PIPELINE, {**PIPELINE, "schedule": "tables/mine.txt"},
    {**PIPELINE, "schedule": "gpip"},
]  # fmt: skip


@pytest.mark.parametrize(
    "key", [*SIGNAL, *(f"jshard.{name}" for name in JSHARD), *(f"jshard.train.{name}" for name in TRAIN)]
)
def test_schema_takes_all_that_the_loader_takes(key: str):
    """What the editor marks as wrong is wrong; the loader knows more (names, sizes, what contradicts)."""
    schema = json_schema()
    taken = 0
    for value in VALUES:
        written: dict = {"jshard": {"mesh": {"a": 2, "b": 2}}, "a": {}}
        if key.startswith("jshard.train."):
            written["jshard"]["train"] = {key.removeprefix("jshard.train."): value}
        elif key.startswith("jshard."):
            written["jshard"][key.removeprefix("jshard.")] = value
            if key == "jshard.pipeline":
                written["a"] |= {"stage": "equal"}
                written["jshard"]["train"] = PARTS
        else:
            needs = {"output": {"reduction": "b", "column": "b"}, "attention": {"ring": "b"}}
            written["x"] = {key: value, **needs.get(key, {})}
            written["jshard"] |= {"pipeline": PIPELINE, "train": PARTS} if key == "stage" else {}
        try:
            load_configuration(written)
        except JShardError:
            continue
        taken += 1
        assert accepts(schema, written, schema), (key, value)
    assert taken or key.split(".")[-1] in {"include", "output"}


@pytest.mark.parametrize(
    ("key", "written", "found"),
    [
        ("metrics", "m:f", ("m:f",)),
        ("metrics", ["m:f", "m:g"], ("m:f", "m:g")),
        ("loss", {"path": "m:f", "smoothing": 0.1}, {"path": "m:f", "smoothing": 0.1}),
    ],
)
def test_words_of_an_experiment_are_kept(key, written, found):
    assert load_configuration({"jshard": {"mesh": {"a": 2}, "train": {key: written}}}).train[key] == found


@pytest.mark.parametrize("axis", ["a", ""])
def test_an_axis_of_stages_has_a_name(axis):
    assert accepts(json_schema(), {"jshard": {"pipeline": {**PIPELINE, "axis": axis}}}, json_schema()) == bool(axis)


@pytest.mark.parametrize("file", ["table.txt", "tables/mine", "tables/mine.txt"])
def test_a_schedule_may_be_a_file(file):
    pipeline = {"pipeline": {**PIPELINE, "schedule": file}, "train": PARTS}
    written = {"jshard": {"mesh": {"a": 2}, **pipeline}, "a": {"stage": "equal"}}
    assert load_configuration(written).pipeline.schedule == file


def test_schema_refuses_wrong_types_and_unknown_keys():
    schema = json_schema()
    for wrong in (
        {"a": {"rwo": "data"}}, {"a": {"row": True}}, {"a": {"shard": {"axis": True}}},
        {"jshard": {"mesh": {"a": 0}}}, {}, {"jshard": {"mehs": {}}}, {"a": {"output": "gathr"}},
        {"a": {"stage": "x"}}, {"jshard": {"train": {"batch": 0}}}, {"jshard": {"mesh": {}}}, {"jshard": {"mesh": {"a": -2}}},
        *({"a": {"shard": {"axis": 0, "workers": workers}}} for workers in ([], [-1], [0, 0])), {"a": {"row": ["a", "a"]}},
        {"a": {"row": ""}}, {"jshard": {"budget": -1}}, {"jshard": {"default": ""}},
        {"a": {"expect": {"all_reduce": -1}}},
    ):  # fmt: skip
        assert not accepts(schema, wrong, schema), wrong
    for right in (
        {"a": {"shard": {"axis": 0, "workers": [0]}}},
        {"jshard": {"mesh": {"a": 1}, "default": "a"}},
        {"jshard": {"budget": 0}},
        {"a": {"expect": {"all_reduce": 0}}},
    ):
        assert accepts(schema, right, schema), right


SIZES = {
    "1B": 1, "2KB": 2_000, "3MB": 3_000_000, "4GB": 4_000_000_000, "5KiB": 5_120, "6MiB": 6_291_456, "7GiB": 7_516_192_768,
    "1.5KiB": 1_536, "12 MB": 12_000_000, "0": None, 0: 0, 2**63 - 1: 2**63 - 1, 2**63: None, -1: None, True: None, "1TiB": None,
    "1" * 15 + "B": int("1" * 15), "1" * 16 + "B": None, 2**63 + 1: None,
}  # fmt: skip


@pytest.mark.parametrize("written", SIZES)
def test_sizes_are_bytes(written: object):
    if SIZES[written] is None:
        with pytest.raises(JShardError, match="which is not a size; write budget: 64MiB$"):
            load_configuration({"jshard": {"budget": written}})
    else:
        assert load_configuration({"jshard": {"budget": written}}).budget == SIZES[written]


def test_whole_numbers_are_those_of_64_bits():
    assert load_configuration({"jshard": {"train": {"steps": 2**63 - 1}}}).train["steps"] == 2**63 - 1
    for steps in (2**63, -(2**63), 1.5, True, "3"):
        with pytest.raises(
            JShardError, match="^jshard.train.steps .* is not a whole number of 1 or more; write steps: 1000$"
        ):
            load_configuration({"jshard": {"train": {"steps": steps}}})
    assert load_configuration({"a": {"shard": {"axis": 1 - 2**63}}}).signals["a"].shard.axis == 1 - 2**63
    with pytest.raises(JShardError, match="which is not a whole number; write axis: 0$"):
        load_configuration({"a": {"shard": {"axis": -(2**63)}}})


LEAST = {
    "train.data": {"path": "m:f", "ahead": 0}, "train.seed": 0, "train.batch": 1, "train.steps": 1,
    "train.evaluation": {"every": 1}, "train.log": {"every": 1}, "train.checkpoint": {"every": 1, "keep": 1},
    "train.watchdog": {"step_timeout": 1, "start_timeout": 1}, "budget": 0,
}  # fmt: skip


@pytest.mark.parametrize("key", LEAST)
def test_schema_and_loader_take_the_least_number_and_none_below(key: str):
    def written(value: object) -> dict:
        for name in reversed(key.split(".")):
            value = {name: value}
        return {"jshard": value}

    assert load_configuration(written(LEAST[key])) and accepts(json_schema(), written(LEAST[key]), json_schema())
    for name, least in LEAST[key].items() if isinstance(LEAST[key], dict) else [(None, LEAST[key])]:
        if isinstance(least, int):
            wrong = written(least - 1 if name is None else LEAST[key] | {name: least - 1})
            assert not accepts(json_schema(), wrong, json_schema()), wrong
            with pytest.raises(JShardError, match=" is -?[0-9], which is not a "):
                load_configuration(wrong)


# Of each key what both take, with what it is once read, and what neither does.
BOTH = {
    "stage": (
        {
            "balance": "balance",
            0: "0",
            2**31 - 1: str(2**31 - 1),
            "0: 0, 1..3: 1": "0..0: 0, 1..3: 1",
            "0..1: 2147483647": "0..1: 2147483647",
        },
        [-1, 2**31, 2**31 + 1, 1.5, True, "", "0: -1", f"0: {2**31}", f"0: {2**31 + 1}", "0-5: 0"],
    ),
    "clip": ({each: each for each in (1e-9, 0.5, 3)}, [0, 0.0, -0.5, True, "1", [1]]),
    "held_out": ({0.5: 0.5, "x": "x", "rows.txt": "rows.txt"}, [0, 0.0, 1, 1.0, 1.5, -0.5, True, "", [0.5]]),
}


def with_key(key: str, value: Any) -> dict:
    if key == "stage":
        if value == "" or ":" in str(value):  # ranges
            value = {
                words: int(on) for words, _, on in (each.partition(": ") for each in filter(None, value.split(", ")))
            }
        return {"jshard": {"mesh": {"a": 2}, "pipeline": PIPELINE, "train": PARTS}, "x": {"stage": value}}
    train = (
        {"optimizer": {"name": "adamw", "clip": value}} if key == "clip" else {"data": {"text": "t", "held_out": value}}
    )
    return {"jshard": {"train": train}}


@pytest.mark.parametrize("key", BOTH)
def test_schema_and_loader_take_the_same_numbers(key: str):
    right, wrong = BOTH[key]
    for value, means in right.items():
        written = with_key(key, value)
        found = load_configuration(written)
        read = found.signals["x"].stage if key == "stage" else next(iter(found.train.values()))[key]
        assert read == means and accepts(json_schema(), written, json_schema()), value
    for value in wrong:
        assert not accepts(json_schema(), with_key(key, value), json_schema()), value
        with pytest.raises(JShardError):
            load_configuration(with_key(key, value))


def test_numbers_are_those_of_a_float():
    most = sys.float_info.max
    assert load_configuration(with_key("clip", most)).train["optimizer"]["clip"] == most
    for value in (math.inf, math.nan, 10**400):
        with pytest.raises(JShardError, match="which is not a number above 0; write clip: 1.0$"):
            load_configuration(with_key("clip", value))


@pytest.mark.parametrize(
    ("count", "wants"), [(6, "a mapping of a, b, c, d, e and f"), (7, "a mapping of keys such as a, b and c")]
)
def test_a_table_of_more_than_six_keys_is_told_by_three(count: int, wants: str):
    assert Keys({name: Key(flag(), name) for name in "abcdefg"[:count]}).wants == wants


def test_schema_takes_every_configuration_of_the_repository():
    yaml = pytest.importorskip("yaml")
    root = Path(__file__).parents[2]
    schema = json_schema()
    files = [path for folder in ("configs", "examples") for path in (root / folder).rglob("*.yaml")]
    files = [path for path in files if path.parent.name != "cluster"]  # those are Kubernetes' own
    assert files
    for path in files:
        load_configuration(path)
        assert accepts(schema, yaml.safe_load(path.read_text()), schema), path

"""Whatever is given, `load_configuration` loads it or raises one JShardError of well-formed sentences.

`JSHARD_FUZZ_EXAMPLES` says how many examples to try (100 unless said).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jshard.errors import JShardError
from jshard.signals.config import Configuration, load_configuration
from jshard.signals.schema import JSHARD, SHARD, SIGNAL, TRAIN

EXAMPLES = int(os.environ.get("JSHARD_FUZZ_EXAMPLES", "100"))

VALID = """\
jshard:
  mesh: {data: 2, tensor: 4}
  strict: true
  default: layer2
  train: {model: "examples.digits:Model", batch: 64, optimizer: {name: adamw, learning_rate: 1e-3}, evaluation: 10}
_base: &base {row: data, dtype: {compute: bfloat16}}
layer1: {extends: _base, column: [tensor], output: keep}
layer2: {extends: _base, reduction: tensor, output: scatter, backward: layer1}
block*/attn: {store: {optimizer: data}, remat: true, expect: {all_reduce: 1, bytes: 64MiB}}
"decoder/mlp":
  shard:
    axis: 0
    workers: [0, 1, 2, 3]
  compile: true
"""
WORDS = [
    *JSHARD, *SIGNAL, *SHARD, *TRAIN, "jshard", "data", "tensor", "layer1", "layer2", "_base", "block*/attn", "<<",
    "&base", "*base", "null", "true", "no", "~", "-1", "0", "2", "017", "0x1F", "1e-4", "1e999", ".inf", ".nan",
    "12:30", "2024-01-01", "[", "]", "{", "}", ": ", "- ", "? ", ", ", "\n", "\n  ", "\t", "'", '"', "|", ">", "#",
    "%YAML 1.1", "---", "...", "!!python/name:os.system", "!", "&a", "*a", "*", "@", "`", "\\", "\\U99999999",
    "\u2028", "\x85", "\ufeff", "\0", "\r", "\U0001f600",
]  # fmt: skip

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 9),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=8),
)
keys = st.one_of(st.sampled_from(WORDS), st.text(max_size=5))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
signals = st.dictionaries(st.sampled_from([*SIGNAL]), values, max_size=4)
heads = st.fixed_dictionaries(
    {},
    optional={
        "mesh": st.dictionaries(st.sampled_from(["data", "tensor"]), scalars, max_size=2) | values,
        "train": st.dictionaries(st.sampled_from([*TRAIN]), values, max_size=4) | values,
        "default": scalars,
        "strict": scalars,
        "include": values,
        "axis_types": scalars,
    },
)
mesh_axes = st.sampled_from(["data", "tensor", "pipe", ["data", "tensor"], []])
names = st.sampled_from(["layer1", "layer2", "_base", "a/b", "*/b", "a/*", "block*/attn", "x/a/b"])
worker_lists = st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True)
plausible_signals = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("row", "column", "reduction", "sequence"), mesh_axes),
        "store": mesh_axes
        | st.fixed_dictionaries({"optimizer": mesh_axes})
        | st.fixed_dictionaries({"parameters": mesh_axes, "keep": st.booleans()}),
        "output": st.sampled_from(["keep", "gather", "sum", "scatter"]),
        "extends": names,
        "backward": names,
        "remat": st.booleans(),
        "allow": st.lists(st.sampled_from(["fft", "sort"]), max_size=2),
        "match": st.lists(st.sampled_from(["**", "a/*", "{a,b}/**", "a}", "b**", "/"]), max_size=2),
        "dtype": st.fixed_dictionaries({}, optional={"compute": st.sampled_from(["float32", "bfloat16"])}),
    },
) | st.fixed_dictionaries({"shard": st.fixed_dictionaries({"axis": st.integers(-1, 2), "workers": worker_lists})})
plausible = st.dictionaries(names, plausible_signals, min_size=1, max_size=5).map(
    lambda named: {"jshard": {"mesh": {"data": 2, "tensor": 2, "pipe": 2}, "strict": False}, **named}
)
mappings = st.one_of(
    plausible,
    plausible,
    st.dictionaries(keys | st.none() | st.integers() | st.binary(max_size=2), values, max_size=4),
    st.dictionaries(st.sampled_from(["layer1", "layer2", "_base", "a/b", "*/b"]), signals | values, max_size=4).flatmap(
        lambda named: heads.map(lambda head: {"jshard": head, **named})
    ),
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid file with a few pieces cut, doubled or put in."""
    text = VALID
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.integers(0, 12)))
        piece = draw(st.one_of(st.just(""), st.sampled_from(WORDS), st.just(text[start:stop] * 2), st.text(max_size=3)))
        text = text[:start] + piece + text[stop:]
    return text.encode("utf-8", "surrogatepass")


files = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.lists(st.sampled_from(WORDS), max_size=30).map(lambda words: "".join(words).encode()),
    st.lists(st.sampled_from(WORDS), max_size=30).map(lambda words: " ".join(words).encode()),
    mutated(),
    mutated(),
)
assignments = st.tuples(
    st.lists(keys, min_size=1, max_size=4).map(".".join), st.text(max_size=6) | st.sampled_from(WORDS)
).map("=".join)
overrides = st.lists(st.text(max_size=12) | assignments, max_size=2)
paths = st.lists(st.sampled_from(["layer1", "a", "b", "block1", "attn", "decoder", "x"]), max_size=3).map(tuple)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
@given(source=files | mappings, words=overrides | st.just([]), path=paths)
def test_fuzz_anything_loads_or_is_one_error(
    folder: Path, source: bytes | Mapping, words: list[str], path: tuple[str, ...]
):
    if isinstance(source, bytes):
        (folder / "mlp.yaml").write_bytes(source)
    try:
        configuration = load_configuration(source if isinstance(source, Mapping) else folder / "mlp.yaml", words)
        assert isinstance(configuration, Configuration)
        assert configuration.fingerprint == configuration.fingerprint and hash(configuration.fingerprint) is not None
        hash(configuration.digest(path))
    except JShardError as error:
        assert error.faults
        for sentence in error.faults:
            assert "; " in sentence and len(sentence) < 2000
            assert sentence.splitlines() == [sentence]


def test_fuzz_starts_from_a_file_that_loads(folder: Path):
    (folder / "valid.yaml").write_text(VALID)
    assert list(load_configuration(folder / "valid.yaml").signals) == ["layer1", "layer2", "block*/attn", "decoder/mlp"]

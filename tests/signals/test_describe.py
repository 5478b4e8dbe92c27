"""A signal in words, key by key."""

from __future__ import annotations

import pytest

from jshard.signals.describe import component_words, signal_words
from jshard.signals.globs import OTHERS
from jshard.signals.signal import DTypes, Shard, Signal

WORDS = [
    ({}, ["replicated"]),
    ({"row": ("d",), "column": ("t", "p"), "reduction": ("x",)},
     ["rows over d, columns over t x p, reduction over x", "y is summed by an all-reduce"]),
    ({"reduction": ("x",), "sequence": ("x", "d")},
     ["reduction over x", "activations between layers split by sequence over x x d"]),
    ({"column": ("t",), "output": "keep"}, ["columns over t", "y stays split"]),
    ({"column": ("t",), "output": "gather"}, ["columns over t", "y is gathered by an all-gather"]),
    ({"reduction": ("t",), "sequence": ("t",), "output": "sum"},
     ["reduction over t", "y is summed by an all-reduce", "activations between layers split by sequence over t"]),
    ({"reduction": ("t",), "output": "scatter"}, ["reduction over t", "y is summed and split by a reduce-scatter"]),
    ({"expert": ("d", "t")}, ["replicated", "experts over d x t"]),
    ({"ring": ("d", "t")}, ["replicated", "places split over d x t, attention by ring"]),
    ({"ring": ("d",), "attention": "ulysses"}, ["replicated", "places split over d, attention by ulysses"]),
    ({"store": ("d", "t")}, ["replicated", "parameters and optimizer state rest split over d x t"]),
    ({"store": ("d",), "store_keep": True},
     ["replicated", "parameters and optimizer state rest split over d, and what is gathered of them is kept for backward"]),
    ({"store": ("d",), "store_prefetch": True},
     ["replicated", "parameters and optimizer state rest split over d, gathered one layer ahead"]),
    ({"store_prefetch": True}, ["replicated", "gradients of layers summed one layer late"]),
    ({"store_optimizer": ("d", "t")}, ["replicated", "optimizer state rests split over d x t"]),
    ({"dtype": DTypes("float16", "bfloat16", "float32")},
     ["replicated", "kept in float16", "computed in bfloat16", "summed over devices in float32"]),
    ({"remat": "full"}, ["replicated", "activations recomputed in backward"]),
    ({"remat": "products"}, ["replicated", "activations recomputed in backward, except products"]),
    ({"remat": "chunk"}, ["replicated", "activations recomputed in backward of each chunk of layers"]),
    ({"remat": ("q", "k")}, ["replicated", "activations recomputed in backward, except q, k"]),
    ({"stage": "equal"}, ["replicated", "layers split over the stages of the pipeline"]),
    ({"stage": "balance"}, ["replicated", "layers on stages of about equal FLOP"]),
    ({"stage": "0..5: 0, 6..7: 1"}, ["replicated", "layers on stages (0..5: 0, 6..7: 1)"]),
    ({"stage": "1"}, ["replicated", "on stage 1 of the pipeline"]),
    ({"compile": True}, ["replicated", "each layer compiled as one program, its backward as another"]),
    ({"kernel": (("matmul", "ring"), ("all_reduce", "one_shot"))}, ["replicated", "kernels: matmul ring, all_reduce one_shot"]),
    ({"match": ("a/*", OTHERS, "*")}, ["replicated", "claims a/*, all other parameters, *"]),
    ({"expect": (("bytes", 64), ("all_reduce", 2), ("permute", 3))},
     ["replicated", "at most 64 bytes on the wire", "2 all_reduce expected", "3 permute expected"]),
    ({"shard": Shard(0, (0, 1))}, ["axis 0 of every array over workers 0, 1"]),
    ({"shard": Shard(1, mesh=("d", "t"))}, ["axis 1 of every array over mesh axis d x t"]),
    ({"shard": Shard(0)}, ["axis 0 of every array over all workers"]),
    ({"shard": Shard(None, (2,))}, ["whole on workers 2"]),
    ({"shard": Shard(0, replicated=True)}, ["whole on all workers"]),
    ({"shard": Shard(0, (0, 1)), "backward": "there", "compile": True},
     ["axis 0 of every array over workers 0, 1", 'cotangents laid out as "there"',
      "not compiled as one program, as the backward is on other workers"]),
    ({"shard": Shard(0, (2, 3)), "backward": "there", "compile": True},
     ["axis 0 of every array over workers 2, 3", 'cotangents laid out as "there"',
      "each layer compiled as one program, its backward as another"]),
]  # fmt: skip
THERE = Signal("there", shard=Shard(1, (2, 3)))


@pytest.mark.parametrize(("keys", "words"), WORDS, ids=["-".join(keys) for keys, _ in WORDS])
def test_a_signal_is_told_key_by_key(keys, words):
    signal = Signal("a", **keys)
    assert [*signal_words(signal, THERE if signal.backward else signal)] == words


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("mine:f", "mine:f"),
        ({"path": "mine:f", "name": "b"}, "mine:f"),
        ({"name": "adamw", "b1": 0.9}, "adamw"),
        ({"text": "docs", "length": 8}, "docs"),
        ({"clip": 1.0, "adamw": {}}, "clip + adamw"),
    ],
)
def test_a_component_is_named_by_its_path_its_name_or_its_parts(named, words):
    assert component_words(named) == words

"""Text to train on: token files, rows of documents, what is held out, and every mistake in one sentence."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jshard.cli import main
from jshard.errors import JShardError
from jshard.signals import active_config as current
from jshard.signals.config import load_configuration
from jshard.training.data import text
from jshard.training.data.text import packed_rows
from jshard.training.data.tokens import Bytes, tokenizer
from jshard.training.experiments.experiment import Experiment
from jshard.training.settings import Settings

WORDS = {"<end>": 0, "a": 1, "b": 2, "c": 3, "d": 4}


class Toy(nnx.Module):
    """Guesses a token from the one before."""

    def __init__(self, vocabulary: int = 256, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocabulary, vocabulary, rngs=rngs)

    def __call__(self, x):
        return self.embed(x["tokens"])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder `docs` of two documents, of 11 and 4 letters, in the one where the test runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs/b").mkdir(parents=True)
    (tmp_path / "docs/a.txt").write_text("hello world")
    (tmp_path / "docs/b/c.txt").write_text("four")
    return tmp_path


def written(folder: Path, data: str, **train: object) -> Path:
    path = folder / "lm.yaml"
    rest = "".join(f"    {key}: {json.dumps(value)}\n" for key, value in train.items())
    path.write_text(f"jshard:\n  train:\n    model: tests.training.data.test_text:Toy\n    data: {data}\n{rest}")
    return path


def rows(folder: Path, data: str, **train: object) -> dict:
    return packed_rows(Settings(load_configuration(written(folder, data, **train))))


def sentence(folder: Path, data: str) -> str:
    with pytest.raises(JShardError) as told:
        rows(folder, data)
    return str(told.value)


def test_row_holds_parts_of_documents_that_do_not_meet(folder):
    packed = rows(folder, "{text: docs, length: 6}")["train"]
    assert len(packed) == 2  # 17 tokens with an end behind each document: 2 rows of 6, each with the next token
    x, y = packed.take(np.array([1, 0]))
    assert bytes(x["tokens"][0].tolist()) == b"world\0"
    assert x["segments"].tolist() == [[1] * 6, [1] * 6]
    assert bytes(x["tokens"][1].tolist()) == b"hello "
    assert x["positions"].tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert y.tolist() == [
        [*b"orld\0", -1],
        [*b"ello w"],
    ]  # the end is learned, what another document begins with is not
    x, y = rows(folder, "{text: docs, length: 16}")["train"].take(np.array([0]))
    assert x["segments"].tolist() == [[1] * 12 + [2] * 4]
    assert x["positions"].tolist() == [[*range(12), *range(4)]]
    assert y.tolist() == [[*b"ello world\0", -1, *b"our\0"]]
    assert all(part.dtype == np.int32 for part in (*x.values(), y))


def test_lines_of_jsonl_are_documents(folder):
    (folder / "two.jsonl").write_text('{"text": "ab\\ncd", "from": "x"}\n\n{"text": "ef"}\n{"text": ""}\n')
    packed = rows(folder, "{text: two.jsonl, length: 8}")["train"]
    assert bytes(packed.tokens) == b"ab\ncd\0ef\0"
    assert packed.starts.tolist() == [0, 6]


def test_tokens_are_made_once_and_anew_for_other_text(folder, monkeypatch):
    made = []
    write = text._write
    monkeypatch.setattr(text, "_write", lambda *args: (made.append(args), write(*args)))
    for _ in range(2):
        packed = rows(folder, "{text: docs, length: 4}", output="runs/one")["train"]
    assert len(made) == 1 and isinstance(packed.tokens, np.memmap)
    (kept,) = (folder / "runs/tokens").iterdir()  # beside the output folder, and nothing half made beside it
    assert kept.name.startswith("docs-") and sorted(each.name for each in kept.iterdir()) == ["documents.npy", "tokens"]
    (folder / "docs/a.txt").write_text("jello world")  # as long as it was
    os.utime(folder / "docs/a.txt", (1, 1))
    assert bytes(rows(folder, "{text: docs, length: 4}", output="runs/one")["train"].tokens[:5]) == b"jello"
    rows(folder, "{text: docs, length: 4, cache: mine}", output="runs/one")
    assert (len(made), len([*(folder / "mine").iterdir()])) == (3, 1)


def test_one_makes_tokens_and_the_rest_wait(folder, monkeypatch):
    made, begun = [], threading.Barrier(3)
    write = text._write
    monkeypatch.setattr(text, "_write", lambda *args: (made.append(args), time.sleep(0.3), write(*args)))
    settings = Settings(load_configuration(written(folder, "{text: docs, length: 4, cache: mine}")))
    found = []

    def read():
        begun.wait()
        found.append(bytes(packed_rows(settings)["train"].tokens))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(made), found) == (1, [b"hello world\0four\0"] * 3)


def test_what_fails_leaves_nothing_behind(folder):
    (folder / "docs/z.txt").write_bytes(b"fine\nnot \xff")
    sentence(folder, "{text: docs, cache: mine}")
    assert [*(folder / "mine").iterdir()] == []


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 1 << 20])
def test_text_is_numbered_by_pieces_that_cut_no_letter(folder, monkeypatch, piece):
    monkeypatch.setattr(Bytes, "piece", piece)
    (folder / "docs/a.txt").write_text("héllo €uro 🙂\n" * 3)
    (folder / "docs/empty.txt").touch()
    packed = rows(folder, "{text: docs, length: 4}")["train"]
    expected = ("héllo €uro 🙂\n" * 3).encode()
    assert bytes(packed.tokens) == expected + b"\0four\0"
    assert packed.starts.tolist() == [0, len(expected) + 1]
    (folder / "docs/a.txt").write_bytes("a\nb\n€".encode()[:-1])
    assert "docs/a.txt:3 is not UTF-8 text: it holds the byte 0xe2" in sentence(folder, "{text: docs, length: 4}")


def test_a_long_file_is_not_held_while_it_is_numbered(folder):
    (folder / "docs/a.txt").write_text("All work and no play makes Jack a dull boy.\n" * 1_000_000)
    tracemalloc.start()
    try:
        packed = rows(folder, "{text: docs, length: 4}")["train"]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    rows_of_it = packed.chosen.nbytes
    assert len(packed.tokens) == 44_000_006 and peak - rows_of_it < 24 << 20


@pytest.mark.parametrize(("part", "held"), [(0.25, [3, 7]), (0.5, [1, 3, 5, 7])])
def test_part_held_out_is_spread_over_the_text(folder, part, held):
    (folder / "docs/a.txt").write_text("".join(f"{n:04}" for n in range(8)))
    found = rows(folder, f"{{text: docs/a.txt, length: 4, held_out: {part}}}")
    assert found["test"].chosen.tolist() == held
    assert sorted([*found["train"].chosen, *held]) == [*range(8)]
    tokens = found["test"].take(np.arange(len(held)))[0]["tokens"]
    assert [bytes(row.tolist()).decode() for row in tokens] == [f"{n:04}" for n in held]


def test_text_held_out_by_name_is_none_of_the_text_to_learn(folder):
    found = rows(folder, "{text: docs/a.txt, held_out: docs/b, length: 4}")
    assert bytes(found["train"].tokens) == b"hello world\0"
    assert bytes(found["test"].tokens) == b"four\0"


def test_bytes_come_back_as_text_and_a_cut_letter_as_a_mark():
    (tokens,) = Bytes().encode(["née"])
    assert Bytes().decode([*tokens, 0]) == "née"
    assert Bytes().decode(tokens[:2]) == "n\ufffd"


def test_tokenizer_of_the_library_numbers_text(folder, extra):
    extra("tokenizers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel(WORDS, unk_token="d"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<end>"])
    made.enable_truncation(2)
    made.save("words.json")
    (folder / "docs/a.txt").write_text("a b c a b c")
    (folder / "docs/b/c.txt").write_text("c b")
    data = "{text: docs, tokens: words.json, end: <end>, length: 3}"
    packed = rows(folder, data)["train"]
    assert (packed.tokens.tolist(), packed.starts.tolist()) == ([1, 2, 3, 1, 2, 3, 0, 3, 2, 0], [0, 7])
    numbering = tokenizer(Settings(load_configuration(written(folder, data))))
    assert (numbering.vocabulary, numbering.end, numbering.decode([1, 3])) == (5, 0, "a c")
    assert rows(folder, "{text: docs, tokens: words.json, length: 3}")["train"].tokens.tolist() == [
        1,
        2,
        3,
        1,
        2,
        3,
        3,
        2,
    ]
    assert sentence(folder, "{text: docs, tokens: words.json, end: <ende>}") == (
        f'jshard.train.data.end ({folder}/lm.yaml:4) is "<ende>", and words.json has no such token; did you mean "<end>"?'
    )
    (folder / "words.json").write_text("{}")
    assert sentence(folder, "{text: docs, tokens: words.json}").startswith(
        f'jshard.train.data.tokens ({folder}/lm.yaml:4) is "words.json", which is no tokenizer: '
    )
    assert sentence(folder, "{text: docs, tokens: word.json}") == (
        f'jshard.train.data.tokens ({folder}/lm.yaml:4) is "word.json", which can\'t be read: no such file or directory; write '
        "tokens: bytes, or the tokenizer.json of a model"
    )


def test_tokenizer_of_a_library_that_is_not_there_is_told(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    assert sentence(folder, "{text: docs, tokens: words.json}") == (
        f'jshard.train.data.tokens ({folder}/lm.yaml:4) is "words.json", and the library tokenizers, which reads it, is not '
        'installed; type: pip install "jshard[text]"'
    )


def test_configurations_name_the_command_that_makes_their_text():
    """A fresh clone has no text."""
    paths = [*(Path(__file__).parents[3] / "configs").rglob("*.yaml")]
    data = {path.stem: load_configuration(path).train.get("data") for path in paths}
    texts = {name: each for name, each in data.items() if isinstance(each, dict) and "text" in each}
    assert {"english", "pod", "pipe-1f1b", "pipe-pod", "fsdp", "placement"} <= set(texts)
    assert [name for name, each in texts.items() if each["text"] not in each.get("made_by", "")] == []


MISTAKES = [
    ("{text: dosc}", '.text (FILE) is "dosc", which is not there; name a file or a folder of text'),
    (
        "{text: runs/it, made_by: make it OUT=runs/it}",
        '.text (FILE) is "runs/it", which is not there; type: make it OUT=runs/it',
    ),
    ("{text: dosc, made_by: make it}", '.text (FILE) is "dosc", which is not there; name a file or a folder of text'),
    ("{text: empty}", '.text (FILE) is "empty", which holds no text; name a file or a folder of text'),
    (
        "{text: bad.txt}",
        '.text (FILE) is "bad.txt", and bad.txt:2 is not UTF-8 text: it holds the byte 0xff; leave it out, or convert it: '
        "iconv -f LATIN1 -t UTF-8 bad.txt",
    ),
    (
        "{text: nul.jsonl}",
        '.text (FILE) is "nul.jsonl", and nul.jsonl:2 is "{"txt": "b"}", which is no document; write each as '
        '{"text": "..."}',
    ),
    ("{text: docs, end: x}", '.end (FILE) is "x", but with bytes as tokens 0 ends a document; remove it'),
    ("{text: docs, length: 17}", ".length (FILE) is 17, and docs has 17 tokens; use 16 or less, or give more text"),
    ("{text: docs}", ".length (FILE) is 256, and docs has 17 tokens; use 16 or less, or give more text"),
    (
        "{text: docs, length: 4, held_out: 0.1}",
        ".held_out (FILE) is 0.1, which is 0 of 4 rows of 4 tokens; use 0.25 to 0.5",
    ),
    (
        "{text: docs, held_out: 2}",
        ".held_out (FILE) is 2, which is not a number between 0 and 1, or a file or a folder; write held_out: 0.05",
    ),
    (
        "{text: docs, lenght: 4}",
        ' (FILE) has an unknown key "lenght"; did you mean "length"?',
    ),
    ("{text: docs, length: 0}", ".length (FILE) is 0, which is not a whole number of 1 or more; write length: 256"),
]


@pytest.mark.parametrize(("data", "says"), MISTAKES, ids=[data for data, _ in MISTAKES])
def test_mistake_is_one_sentence_with_its_line(folder, data, says):
    (folder / "empty").mkdir()
    (folder / "empty/.hidden").write_text("x")
    (folder / "bad.txt").write_bytes(b"fine\nna\xffve")
    (folder / "nul.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    expected = says.replace("FILE", f"{folder}/lm.yaml:4")
    assert sentence(folder, data) == f"jshard.train.data{expected}"


def test_tokens_that_can_not_be_kept_are_told(folder):
    (folder / "mine").write_text("a file")
    assert sentence(folder, "{text: docs, length: 4, cache: mine}") == (
        'tokens are kept in "mine", which can\'t be written to: file exists; write cache: and another folder'
    )


def test_model_of_a_smaller_vocabulary_is_told_both_numbers(folder, capsys):
    path = written(folder, "{text: docs, length: 4}", batch=2, steps=1)
    path.write_text(path.read_text() + "  mesh: {data: 1}\nrest: {row: data, match: ['**']}\n")
    assert main(["train", str(path), "model.vocabulary=200"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f'jshard.train.data ({path}:4) is "docs", whose tokenizer has 256 tokens, and tests.training.data.test_text:Toy has 200 '
        "outputs; give the model a vocabulary of 256"
    )


@pytest.mark.slow
def test_training_goes_on_to_the_bit_and_each_device_has_its_rows(folder):
    (folder / "docs/a.txt").write_text("the quick brown fox jumps over the lazy dog " * 8)
    path = written(
        folder, "{text: docs, length: 8, held_out: 0.2}", batch=8, checkpoint=2, log={"every": 1}, output="out"
    )
    path.write_text(path.read_text() + "  mesh: {data: 8}\nrest: {row: data, match: ['**']}\n")
    losses = {}
    for name, commands in {
        "at once": [["train", "steps=5"]],
        "again": [["train", "steps=2"], ["resume", "steps=5", "--trust"]],
    }.items():
        for command, *more in commands:
            assert main([command, *([str(path)] if command == "train" else [name]), *more, f"output={name}"]) == 0
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line}
    assert losses["at once"] == losses["again"] and len(losses["again"]) == 5
    experiment = Experiment.build(current.load(path), current.mesh())
    x, y = experiment.first_batch()
    assert {part.sharding.spec for part in (*x.values(), y)} == {jax.P("data")}
    assert [shard.data.shape for shard in y.addressable_shards] == [(1, 8)] * 8
    described = Experiment.build(current.load(path), current.mesh(), only_shapes=True).first_batch()
    assert jax.tree.map(jnp.shape, described) == jax.tree.map(jnp.shape, (x, y))


def test_plan_of_text_reads_none(folder, monkeypatch):
    monkeypatch.setattr(text, "_write", None)
    packed = packed_rows(
        Settings(load_configuration(written(folder, "{text: elsewhere, length: 4}"))), only_shapes=True
    )
    assert packed["train"].take(np.arange(1))[0]["tokens"].shape == (1, 4)


def test_training_says_what_a_step_is_and_its_figures(folder, capsys):
    path = written(folder, "{text: docs, length: 4}", batch=2, steps=3, log={"every": 1}, output="out")
    path.write_text(path.read_text() + "  mesh: {data: 2}\nrest: {row: data, match: ['**']}\n")
    assert main(["train", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    says = "a step: 8 tokens, 0 FLOP in products on each of 2 devices, without what remat computes again; "
    assert f"{says}no peak of cpu is known" in lines
    assert re.fullmatch(
        r"step 2/3   loss \d\.\d{4}   perplexity \d+\.?\d*   learning rate 0.001   [\d,]+ tokens/s   \S+ [KMG]iB memory   \d+ s left",
        lines[-2],
    )
    first, _, last = map(json.loads, (folder / "out/metrics.jsonl").read_text().splitlines())
    assert first.keys() == last.keys() == {
        "step", "loss", "perplexity", "learning_rate", "examples_per_second", "tokens_per_second", "memory",
    }  # fmt: skip

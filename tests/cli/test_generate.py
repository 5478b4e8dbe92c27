"""`jshard generate`: the same text from a run on every mesh, streamed."""

from __future__ import annotations

from pathlib import Path

import pytest

from jshard.cli import main
from jshard.cli.generate import streamed
from jshard.training.tokens import Bytes

ROOT = Path(__file__).parents[2]
TEXT = "the cat sat on the mat and the dog sat on the cat. "


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run: a decoder of bytes that has learned one sentence."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text.txt").write_text(TEXT * 40)
    (folder / "lm.yaml").write_text(f"""
jshard:
  include: {ROOT}/configs/decoder/placement.yaml
  train:
    model: {{path: "jshard:Decoder", vocabulary: 256, width: 32, depth: 2, heads: 4, hidden: 64, dropout: 0.1, rope: {{theta: 1000}}}}
    data: {{text: {folder}/text.txt, tokens: bytes, length: 32}}
    batch: 8
    steps: 60
    optimizer: {{name: adamw, learning_rate: 0.01}}
    checkpoint: 60
    output: {folder}/run
head: {{extends: _split, column: tensor, match: ["head/**"]}}
""")
    assert main(["train", str(folder / "lm.yaml")]) == 0
    return str(folder / "run")


MESHES = {
    "2x4": [],
    "8": ["jshard.mesh.data=8", "jshard.mesh.tensor=1"],
    "1": ["jshard.mesh.data=1", "jshard.mesh.tensor=1"],
}


def said(capsys, *words):
    capsys.readouterr()
    assert main(["generate", *words]) == 0
    return capsys.readouterr().out


def test_a_run_goes_on_from_prompts_alike_on_every_mesh(trained, capsys):
    prompts = ["--prompt", "the cat s", "--prompt", "the d", "--tokens", "24"]
    drawn = ["--temperature", "5", "--top-k", "40", "--top-p", "0.99", "--seed", "5"]
    found = {
        name: [said(capsys, trained, *prompts, *how, *mesh) for how in ([], drawn)] for name, mesh in MESHES.items()
    }
    first, *others = found.values()
    assert others == [first, first]
    greedy, other = first
    assert greedy == "the cat sat on the mat and the do\n\nthe dog sat on the cat. the c\n"
    assert other.startswith("the cat s")
    assert other != greedy


def test_a_row_ends_behind_a_token_to_stop_at(trained, capsys):
    assert said(capsys, trained, "--prompt", "on the m", "--stop", "t") == "on the mat\n"


@pytest.mark.parametrize(("words", "sentence"), [
    ([], 'jshard generate needs a prompt to go on from; type: jshard generate {run} --prompt "Once"'),
    (["--prompt", "a", "--stop", "ab"], '--stop "ab" is 2 tokens; give it the text of one token'),
    (["--prompt", ""], "prompt 0 is empty; begin with a token at least"),
    (["--prompt", "a", "--from", "7"],
     '{run}/checkpoints holds no checkpoint "7"; use --from latest, previous or a step of 60'),
], ids=["no prompt", "stop", "empty", "step"])  # fmt: skip
def test_a_mistake_is_told(trained, capsys, words, sentence):
    capsys.readouterr()
    assert main(["generate", trained, *words]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == sentence.format(run=trained)


def test_a_letter_of_several_bytes_is_said_whole():
    letters = [[number] for number in "aé€".encode()]
    assert list(streamed(Bytes(), ["x"], iter(letters))) == ["x", "a", "é", "€", "\n"]
    assert list(streamed(Bytes(), ["x", "y"], iter([[98, 99], [None, 100]]))) == ["x", "b", "", "\n", "\nycd\n"]

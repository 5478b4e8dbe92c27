"""`jshard generate`: the same text from a run on every mesh, streamed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jshard.cli import main
from jshard.cli.generate import streamed
from jshard.training.data.tokens import Bytes

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
    assert main(["train", str(folder / "lm.yaml"), *MESHES["1"]]) == 0
    return str(folder / "run")


MESHES = {
    name: [f"jshard.mesh.data={data}", f"jshard.mesh.tensor={tensor}"]
    for name, data, tensor in (("2x4", 2, 4), ("8", 8, 1), ("1", 1, 1))
}


PROMPTS = ["--prompt", "the cat s", "--prompt", "the d", "--tokens", "24"]
GREEDY = "the cat sat on the mat and the do\n\nthe dog sat on the cat. the c\n"


def said(capsys, *words):
    capsys.readouterr()
    assert main(["generate", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_run_goes_on_from_prompts_alike_on_every_mesh(trained, capsys):
    drawn = ["--temperature", "5", "--top-k", "40", "--top-p", "0.99", "--seed", "5"]
    first, *others = (said(capsys, trained, *PROMPTS, *drawn, *mesh) for mesh in MESHES.values())
    assert others == [first, first]
    assert first.startswith("the cat s")
    assert first != GREEDY


@pytest.mark.slow
def test_a_run_goes_on_greedily_unless_said(trained, capsys):
    assert said(capsys, trained, *PROMPTS) == said(capsys, trained, *PROMPTS, "--temperature", "0") == GREEDY


@pytest.mark.slow
def test_what_is_drawn_depends_on_each_word(trained, capsys):
    hot = [trained, *PROMPTS, "--temperature", "5"]
    assert said(capsys, *hot, "--top-k", "1") == said(capsys, *hot, "--top-p", "0") == GREEDY
    assert said(capsys, *hot, "--seed", "5") != said(capsys, *hot)


@pytest.mark.slow
def test_a_row_ends_behind_a_text_to_stop_at(trained, capsys):
    two = said(capsys, trained, *PROMPTS, "--stop", "t", "--stop", "og", "--stop", "on th")
    assert two == "the cat sat\n\nthe dog\n"


@pytest.mark.slow
def test_two_processes_say_it_once(trained):
    words = [trained, *PROMPTS, *MESHES["2x4"]]
    launched = [sys.executable, "-m", "jshard", "launch", "-n", "2", "generate", *words]
    ended = subprocess.run(launched, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "".join(f"[0] {line}\n" for line in GREEDY.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize(("words", "sentence"), [
    ([], 'jshard generate needs a prompt; type: jshard generate {run} --prompt "Once"'),
    (["--prompt", "a", "--stop", ""], '--stop "" is empty; remove it'),
    (["--prompt", ""], "prompt 0 is empty; give at least one token"),
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


def test_a_text_to_stop_at_may_be_several_bytes_of_several_letters():
    def made():
        yield from map(list, zip("a€b".encode(), "éabc".encode(), strict=True))
        raise AssertionError("no row goes on")

    assert "".join(streamed(Bytes(), ["x", "y"], made(), ["€b", "é"])) == "xa€b\n\nyé\n"

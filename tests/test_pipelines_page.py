"""The pages on pipelines and their schedules: their tables are written to files, their commands typed, and they print what the pages show."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from examples import english
from jshard.cli import main
from jshard.schedules import generate, load
from jshard.signals.active_config import unload
from tests.test_language_model_page import SMALL, pattern

ROOT = Path(__file__).parent.parent
PAGE = "".join((ROOT / f"docs/{name}.md").read_text() for name in ("pipelines", "schedules"))
SHOWN = re.findall(r"^```console\n\$ jshard ([^\n]+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
IN_SENTENCES = [shlex.split(words) for words in re.findall(r"`jshard (\w+ [^`]+)`", PAGE)]
OPTIONS = [words.split() for words in re.findall(r"`(--?\w[\w-]* [^`]+)`", PAGE)]
OF_RUNS = {"train": (), "resume": ("steps=12",), "launch": ("output=runs/launched",)}  # with fewer and smaller steps


@pytest.mark.parametrize(("words", "says"), [each for each in SHOWN if each[0].startswith("schedule")])
def test_page_prints_what_its_command_prints(tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    Path("tables").mkdir()
    for name, text in re.findall(r"^```text\n# (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        Path(name).write_text(f"# {name}\n{text}")
    main(words.split())
    out, err = capsys.readouterr()
    assert doctest.OutputChecker().check_output(says, out + err, doctest.ELLIPSIS), out + err


def test_options_that_the_page_names_are_those_of_a_schedule(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert len(OPTIONS) >= 3
    for option in OPTIONS:
        name = "interleaved" if "--chunks" in option else "1f1b"
        main(["schedule", name, "--stages", "4", "--microbatches", "8", *option])
        out, err = capsys.readouterr()
        assert out and not err
    assert load("mine.txt").when == generate("1f1b", 4, 8).when
    assert "<svg" in Path("1f1b.svg").read_text()


@pytest.fixture
def there(tmp_path, monkeypatch):
    """A folder with the configurations, and some English."""
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    english.main("runs/english")
    for path in sorted(Path("runs/english").iterdir())[12:]:
        path.unlink()
    yield
    unload()


@pytest.mark.slow
@pytest.mark.parametrize(("words", "says"), [each for each in SHOWN if each[0].startswith("explain")])
def test_page_prints_what_it_explains(there, capsys, words, says):
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    assert doctest.OutputChecker().check_output(says, out, doctest.ELLIPSIS), out


@pytest.mark.slow
def test_commands_in_sentences_run_in_their_order(there, capsys):
    """Those that train with a small model, for fewer steps."""
    assert {words[0] for words in IN_SENTENCES} >= {"train", "diff", "resume", "launch"}
    for name, *words in IN_SENTENCES:
        said = [name, *words, *((*SMALL, "model.depth=4", *OF_RUNS[name]) if name in OF_RUNS else ())]
        if name == "launch":
            command = [sys.executable, "-m", "jshard", *said]
            variables = {**os.environ, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
        else:
            assert main(said) == (1 if name == "diff" else 0), capsys.readouterr()
    assert {path.name for path in Path("runs").iterdir()} >= {"pipe", "launched"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("words", "says"), [each for each in SHOWN if each[0].startswith("plan")])
def test_page_prints_what_its_plan_prints_but_for_numbers(there, capsys, extra, kept_plans, words, says):
    extra("v5e:16x16")
    assert main(words.split()) == 0
    # A machine that made this plan before looks it up, and says so.
    said = re.sub(r", cached \(it took (.+) to compile\)", r" in \1", capsys.readouterr().out)
    printed = re.sub(r" +", " ", said.strip())
    assert re.fullmatch(pattern(re.sub(r" +", " ", says)), printed, re.DOTALL), printed

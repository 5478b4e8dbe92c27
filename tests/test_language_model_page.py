"""The page on a language model: its commands run, with a small model and few steps, and print what the page shows but for numbers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from examples import english
from jshard.cli import main
from jshard.signals.config import load_configuration

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/language-model.md").read_text()
BLOCKS = re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d[\d,.]*(e[+-]\d+)?")
SMALL = (
    "model.width=32", "model.depth=2", "model.hidden=64", "data.length=32", "steps=6", "log.every=2", "checkpoint.every=6",
    "optimizer.schedule.warmup_cosine.warmup=1", "evaluation.every=6",
)  # fmt: skip


def shown(block: str) -> list[tuple[str, str]]:
    return re.findall(r"^\$ ([^\n]+)\n(.*?)(?=^\$ |\Z)", block, re.MULTILINE | re.DOTALL)


def pattern(says: str) -> str:
    """What is shown, with any number for each, of any unit, and anything for `...`."""
    marked = re.sub(r"(?<=#) [kKMGT](?=iB|FLOP)", " §", NUMBER.sub("#", says.strip()))
    parts = (re.escape(part).replace(r"\#", r"[\d,.e+-]+").replace("§", "[kKMGT]?") for part in marked.split("..."))
    return ".*".join(parts)


@pytest.fixture
def there(tmp_path, monkeypatch, capsys):
    """A folder with the configurations and some English."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    english.main("runs/english")
    for path in sorted(Path("runs/english").iterdir())[12:]:
        path.unlink()
    capsys.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize("block", [n for n, block in enumerate(BLOCKS) if "jshard plan" not in block])
def test_page_prints_what_its_commands_print(block, there, capsys):
    prints_what_it_shows(BLOCKS[block], capsys)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", [n for n, block in enumerate(BLOCKS) if "jshard plan" in block])
def test_page_prints_what_its_plan_prints(block, there, capsys, extra, kept_plans):
    """And again without the compiler, for 6.9 billion parameters on 256 chips."""
    extra("v5e:16x16")
    [first] = prints_what_it_shows(BLOCKS[block], capsys)
    [again] = prints_what_it_shows(BLOCKS[block], capsys)
    assert "cached" in again.splitlines()[0] and again.splitlines()[1:] == first.splitlines()[1:]


def prints_what_it_shows(block: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    every = []
    for command, says in shown(block):
        name, *words = shlex.split(command)
        if name == "python":
            english.main(words[-1])
        else:
            assert main([*words, *(SMALL if words[0] == "train" else ())]) == 0
        printed = re.sub(r" +", " ", capsys.readouterr().out.strip())
        assert re.fullmatch(pattern(re.sub(r" +", " ", says)), printed, re.DOTALL), printed
        every.append(printed)
    return every


def test_page_names_the_data_of_its_configuration():
    data = re.search(r"^data: \{(.*)\}$", PAGE, re.MULTILINE)
    assert data is not None and f"data: {{{data[1]}}}" in (ROOT / "configs/lm/english.yaml").read_text()
    english, pod = (load_configuration(ROOT / f"configs/lm/{name}.yaml") for name in ("english", "pod"))
    assert english.signals.keys() == pod.signals.keys() and pod.mesh is not None and pod.mesh.sizes == (64, 4)

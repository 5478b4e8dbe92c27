"""The page on speed: its commands, of compilers for chips that are not here, print what the page shows."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from jshard.cli import main
from jshard.signals.active_config import unload

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/speed.md").read_text()
SHOWN = re.findall(r"^```console\n\$ ([^\n]+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command for command, _ in SHOWN])
def test_page_shows_what_its_commands_print(command, shown, extra, kept_plans, monkeypatch, capsys):
    extra("h100:8" if "h100" in command else "v5e:4x4")
    name, *words = shlex.split(command)
    if name == "jshard":
        monkeypatch.chdir(ROOT)
        assert main(words) == 0
    else:
        importlib.import_module(words[1]).main(words[2:])
    unload()
    printed = capsys.readouterr().out.splitlines()
    for line in shown.splitlines():
        alike = [each for each in printed if bare(each) == bare(line)]
        assert any(near(each, line) for each in alike), (line, alike)


def bare(line: str) -> str:
    return " ".join(NUMBER.sub("#", line).split())


def near(printed: str, shown: str) -> bool:
    """Whether all numbers are alike within a twentieth: compilers of another version make other schedules."""
    numbers = ([float(n.replace(",", "")) for n in NUMBER.findall(line)] for line in (printed, shown))
    return all(a == pytest.approx(b, rel=0.05, abs=1) for a, b in zip(*numbers, strict=True))


def test_page_has_a_bound_behind_every_modelled_step():
    tables = [shown for command, shown in SHOWN if "benchmarks" in command]
    assert tables
    for shown in tables:
        _, head, *lines = shown.splitlines()
        assert head.split()[-1] == "bound"
        for row in [line for line in lines if not line.startswith(("bound: ", "over tensor: "))]:
            step, bound = (float(number.replace(",", "")) for number in NUMBER.findall(row)[-2:])
            assert step >= bound - 0.1, row  # as they are rounded


def test_speed_page_is_linked():
    assert "](docs/speed.md)" in (ROOT / "README.md").read_text()

"""The page on pipelines: its tables are written to files, its commands typed, and they print what the page shows."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from jshard.cli import main

PAGE = (Path(__file__).parent.parent / "docs/pipelines.md").read_text()
SHOWN = re.findall(r"^```console\n\$ jshard ([^\n]+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("words", "says"), SHOWN, ids=[words for words, _ in SHOWN])
def test_page_prints_what_its_command_prints(tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    Path("tables").mkdir()
    for name, text in re.findall(r"^```text\n# (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        Path(name).write_text(f"# {name}\n{text}")
    main(words.split())
    out, err = capsys.readouterr()
    assert doctest.OutputChecker().check_output(says, out + err, doctest.ELLIPSIS), out + err

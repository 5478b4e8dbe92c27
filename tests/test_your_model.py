"""The pages on your model, large models and XLA's partitioner: their files run, and print what the pages show."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.outside import users_environment

DOCS = Path(__file__).parent.parent / "docs"
PAGE = "".join((DOCS / f"{name}.md").read_text() for name in ("your-model", "large-models", "left-to-xla"))
SHOWN = re.findall(r"^```console\n\$ (python|jshard) ([^\n]+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
CREATED = [
    (command, f"created.py {words[9:]}", says) for command, words, says in SHOWN if words.startswith("train.py ")
]


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "words", "says"), [*SHOWN, *CREATED], ids=[words for _, words, _ in [*SHOWN, *CREATED]]
)
def test_page_prints_what_its_program_prints(tmp_path, command, words, says):
    files = ["model.py", "train.py", "data.py", "created.py", "fsdp.yaml", "tensor.yaml", "trained.yaml"]
    texts = dict(zip(files, [*blocks("python"), *blocks("yaml")], strict=True))
    plain = re.compile(r"^model = .*\noptimizer = .*\n", re.MULTILINE)
    texts["created.py"] = plain.sub(texts["created.py"], texts["train.py"])
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, *(["-m", "jshard"] if command == "jshard" else []), *words.split()],
        cwd=tmp_path,
        env=users_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, re.sub("^.*: pretending 8 CPU devices for mesh .*\n", "", done.stderr)) == (
        "differs: " in says,
        "",
    )
    assert doctest.OutputChecker().check_output(says, done.stdout, doctest.ELLIPSIS), done.stdout

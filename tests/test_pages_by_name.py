"""The pages docs/layouts/, kinds-of-models.md, program-you-have.md, testing.md, words.md and command-line.md: files and commands, typed as a reader would."""

from __future__ import annotations

import doctest
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jshard.signals.config import load_configuration
from tests.support.outside import users_environment

ROOT = Path(__file__).parent.parent
OTHERS = [ROOT / f"docs/{name}.md" for name in ("kinds-of-models", "program-you-have", "testing")]
LAYOUTS = sorted((ROOT / "docs/layouts").glob("*.md"))
# A file stands behind the sentence that ends with its name.
FILE = re.compile(
    r"^[^\n]*`([\w-]+\.(?:py|yaml|ini))`[^`]*?:\n\n```(?:python|yaml|ini)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


def files(page: Path) -> dict[str, str]:
    return dict(FILE.findall(page.read_text()))


def commands(page: Path) -> list[tuple[str, str]]:
    """Each command of a page, with the output that the page shows."""
    blocks = re.findall(r"^```console\n\$ (.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    parts = [part.partition("\n") for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE)]
    return [(command, says) for command, _, says in parts]


def run(line: str, folder: Path) -> str:
    """Type a line; a word `NAME=value` before the command is a variable of its environment."""
    words = shlex.split(line)
    variables = dict(word.split("=") for word in words if re.match("[A-Z_]+=", word))
    command, *rest = words[len(variables) :]
    words = [sys.executable, *(["-m", "jshard"] if command == "jshard" else []), *rest]
    environment = users_environment(PYTHONPATH=str(ROOT), **variables)
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    return re.sub("^.*: pretending 8 CPU devices .*\n", "", done.stderr) + done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("layouts")
    of_readme = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    texts: dict[str, str] = dict(zip(("model.py", "train.py"), of_readme, strict=True))
    for page in LAYOUTS:
        texts |= files(page)
    texts["experts.py"] = texts["decoder.py"].replace("rngs=", "experts=8, rngs=")
    for name, text in texts.items():
        (path / name).write_text(text)
    return path


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("page", "command", "says"),
    [(page, *shown) for page in LAYOUTS for shown in commands(page)],
    ids=[f"{page.stem}-{n}" for page in LAYOUTS for n, _ in enumerate(commands(page))],
)
def test_layouts_print_what_the_page_shows(folder, page, command, says):
    printed = run(command, folder)
    assert doctest.OutputChecker().check_output(says, printed, doctest.ELLIPSIS), printed


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("page", "command", "says"),
    [(page, *shown) for page in OTHERS for shown in commands(page)],
    ids=[f"{page.stem}-{n}" for page in OTHERS for n, _ in enumerate(commands(page))],
)
def test_pages_print_what_they_show(tmp_path, page, command, says):
    for each in OTHERS[:1] if page is OTHERS[0] else OTHERS[1:]:
        for name, text in files(each).items():
            (tmp_path / name).write_text(text)
    printed = run(command, tmp_path)
    assert doctest.OutputChecker().check_output(says, printed, doctest.ELLIPSIS), printed


@pytest.mark.parametrize("page", LAYOUTS, ids=lambda page: page.stem)
def test_layouts_load_and_are_in_the_table(folder, page):
    names = [name for name in files(page) if name.endswith(".yaml")]
    assert [load_configuration(str(folder / name)).mesh for name in names].count(None) == 0
    assert page.name == "README.md" or (names and f"]({page.name})" in LAYOUTS[0].with_name("README.md").read_text())


@pytest.mark.seconds
def test_words_example_runs():
    page = (ROOT / "docs/words.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    words = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=users_environment())
    assert done.returncode == 0, done.stderr
    assert "configs/mlp.yaml:7  layer2" in done.stdout
    assert not re.search("unused|unsplit|no signal asked|decided by the compiler", done.stdout + done.stderr)


def test_words_show_the_file_that_they_name(tmp_path):
    path = tmp_path / "mlp.yaml"
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs/words.md").read_text(), re.MULTILINE | re.DOTALL)
    path.write_text(text)
    assert load_configuration(str(path)).fingerprint == load_configuration(str(ROOT / "configs/mlp.yaml")).fingerprint


@pytest.mark.seconds
@pytest.mark.parametrize(("command", "says"), commands(ROOT / "docs/command-line.md"))
def test_command_line_prints_what_the_page_shows(command, says):
    printed = run(command, ROOT)
    assert doctest.OutputChecker().check_output(says, printed, doctest.ELLIPSIS), printed

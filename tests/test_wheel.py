"""A wheel built from the tree installs, and works outside the tree with a user's own model and data."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from jshard.version import __version__
from tests.support.outside import users_environment

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*words: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=240,
        env=users_environment("PYTHONPATH", **environment),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ".", cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The wheel in a folder of its own; what it depends on comes from this environment."""
    folder = tmp_path_factory.mktemp("site")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, wheel, cwd=folder)
    return folder


def test_wheel_holds_the_package_and_nothing_else(wheel):
    assert wheel.name == f"jshard-{__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"jshard", f"jshard-{__version__}.dist-info"}
    tree = {str(path.relative_to(ROOT)) for path in (ROOT / "jshard").rglob("*.py")}
    template = {f"jshard/cli/project/{name}" for name in ("README.md", "data.py.txt", "model.py.txt", "train.yaml")}
    assert tree | template | {"jshard/py.typed"} <= set(names)


@pytest.mark.slow
def test_wheel_trains_a_users_own_model_outside_the_tree(installed, tmp_path):
    (tmp_path / "mine.py").write_text((ROOT / "examples/xor.py").read_text())
    text = (ROOT / "configs/xor.yaml").read_text().replace("examples.xor", "mine")
    (tmp_path / "mine.yaml").write_text(text)
    where = run(sys.executable, "-c", "import jshard; print(jshard.__file__)", cwd=tmp_path, PYTHONPATH=str(installed))
    assert where.startswith(str(installed))
    jshard = installed / "bin/jshard"
    assert run(jshard, "--version", cwd=tmp_path, PYTHONPATH=str(installed)) == f"jshard {__version__}\n"
    out = run(jshard, "train", "mine.yaml", cwd=tmp_path, PYTHONPATH=str(installed))
    assert out.splitlines()[-1] == "test accuracy 100.0 %"


@pytest.mark.slow
def test_wheel_makes_a_project_that_trains(installed, tmp_path):
    jshard = installed / "bin/jshard"
    out = run(jshard, "new", "mine", cwd=tmp_path, PYTHONPATH=str(installed))
    assert out == "mine: README.md, data.py, model.py, train.yaml\ntype: cd mine && jshard train train.yaml\n"
    out = run(jshard, "train", "train.yaml", "steps=2", cwd=tmp_path / "mine", PYTHONPATH=str(installed))
    assert re.fullmatch(r"test accuracy [\d.]+ %", out.splitlines()[-1])
    said = set(re.findall(r"`jshard (\w+)", (tmp_path / "mine/README.md").read_text()))
    assert said == {"train", "check", "explain", "verify", "report"}


def test_wheel_tells_an_index_what_it_is(wheel):
    archive = zipfile.ZipFile(wheel)
    told = email.message_from_bytes(archive.read(f"jshard-{__version__}.dist-info/METADATA"))
    pythons = [each.rpartition(" ")[2] for each in told.get_all("Classifier") if "Python :: 3." in each]
    assert pythons == ["3.11", "3.12", "3.13", "3.14"] and told["Requires-Python"] == f">={pythons[0]}"
    assert told.get_all("Project-URL") is None and told["Home-page"] is None  # there is none
    assert told["Description-Content-Type"] == "text/markdown"
    readme = told.get_payload()
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert [link for link in links if not re.match("https?:|#", link)] == []
    assert (
        "[CONTRIBUTING](CONTRIBUTING.md)" in (ROOT / "README.md").read_text()
        and "CONTRIBUTING (CONTRIBUTING.md)" in readme
    )


def test_wheel_asks_for_versions_from_a_floor_and_no_ceiling():
    extras = PROJECT["optional-dependencies"]
    every = [*PROJECT["dependencies"], *(each for extra in extras.values() for each in extra)]
    assert [each for each in every if "<" in each or "==" in each] == []
    of_jax = [each for each in every if each.startswith(("jax>", "jax[", "jaxlib"))]
    assert len(of_jax) >= 6
    assert [each for each in of_jax if not each.endswith(">=0.10.2")] == []
    assert "flax>=0.12.8" in PROJECT["dependencies"]
    assert PROJECT["requires-python"] == ">=3.11"
    assert {"digits", "tpu", "cuda12", "cuda13", "k8s", "dev", "test"} <= set(extras)

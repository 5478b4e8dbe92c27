"""A wheel built from the tree installs, and works outside the tree with a user's own model and data."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from jshard.version import __version__
from tests.outside import users_environment

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
    assert tree | {"jshard/py.typed"} <= set(names)


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


def test_wheel_asks_for_versions_from_a_floor_and_one_ceiling():
    extras = PROJECT["optional-dependencies"]
    every = [*PROJECT["dependencies"], *(each for extra in extras.values() for each in extra)]
    held = ["orbax-checkpoint>=0.12.8,<0.13"]  # its names still move
    assert [each for each in every if "<" in each or "==" in each] == held
    of_jax = [each for each in every if each.startswith(("jax>", "jax[", "jaxlib"))]
    assert len(of_jax) >= 6
    assert [each for each in of_jax if not each.endswith(">=0.10.2")] == []
    assert "flax>=0.12.8" in PROJECT["dependencies"]
    assert PROJECT["requires-python"] == ">=3.11"
    assert {"digits", "tpu", "cuda12", "cuda13", "k8s", "dev", "test"} <= set(extras)

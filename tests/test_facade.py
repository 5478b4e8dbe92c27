"""The names of `jshard`: each is there, each comes from one room, and importing costs nothing before it is used."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jshard

PROMISED = """
load unload mesh jit signal AuxLoss Layer Linear MLP attend cross_entropy matmul sum mean max collectives schedules Layout
Attention Decoder GatedMLP MoE generate
place scatter gather create shard stack value_and_grad explain plan report diff verify Optimizer train batches pretend
init pulse log trace load_weights save_weights JShardError __version__
""".split()


@pytest.mark.parametrize("name", PROMISED)
def test_facade_hands_on_every_name(name):
    assert getattr(jshard, name) is not None


def test_facade_has_no_other_names():
    assert dir(jshard) == sorted(PROMISED)


def test_facade_shows_editors_what_it_hands_on():
    tree = ast.parse(Path(jshard.__file__).read_text())
    (seen,) = (node for node in tree.body if isinstance(node, ast.If))
    shown = [(node.module, alias.name, alias.asname) for node in seen.body for alias in node.names]
    rooms = {"jshard": jshard._SUBMODULES, **jshard._ROOMS}
    assert sorted((room, name, name) for room, names in rooms.items() for name in names) == sorted(shown)


def test_facade_has_the_collectives_and_schedules_in_modules_of_their_own():
    names = "all_gather all_reduce all_to_all broadcast permute reduce_scatter send_recv".split()
    assert [name for name in names if getattr(jshard.collectives, name) is not getattr(jshard.kernels, name)] == []
    assert jshard.schedules.generate("gpipe", 2, 2).stages == 2


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("Liner", "; did you mean jshard.Linear?"),
        ("move", "; did you mean jshard.place?"),
        ("optimizer", "; did you mean jshard.Optimizer?"),
        ("redistribute", "; did you mean jshard.place?"),
        ("step", "; did you mean jshard.jit?"),
        ("weights", "; did you mean jshard.load_weights?"),
        ("all_reduce", "; did you mean jshard.collectives.all_reduce?"),
        ("send_recv", "; did you mean jshard.collectives.send_recv?"),
        ("collective", "; did you mean jshard.collectives?"),
        ("RMSNorm", "; did you mean flax.nnx.RMSNorm?"),
        ("xyzzy", ""),
    ],
)
def test_facade_names_the_nearest_or_the_new_name(written, hint):
    with pytest.raises(AttributeError) as raised:
        getattr(jshard, written)
    assert str(raised.value) == f"jshard has no {written!r}{hint}"


@pytest.mark.usefixtures("fresh")
def test_facade_imports_nothing_before_a_name_is_used():
    program = (
        "import sys, jshard; print([name for name in sys.modules if name.startswith('jshard.')], 'jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[] False\n"


def test_facade_finds_the_mesh_of_the_configuration_in_the_environment_for_a_spec():
    program = (
        "import jshard, jax\njshard.pretend(8)\n"
        "print(jshard.place([1.0, 2.0], jax.P('data')).sharding.mesh.shape_tuple)"
    )
    environment = {**os.environ, "JSHARD_CONFIG": "configs/mlp.yaml"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(jshard.__file__).parents[1],
    )
    assert done.stdout == "(('data', 2), ('tensor', 4))\n", done.stderr

"""Weights go from files into shards and back: values, placement, bytes read, the same bytes written, and every fault at once."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1
from rich.console import Console

import jshard
from jshard.cli import main
from jshard.errors import JShardError
from jshard.runs import events
from jshard.training.checkpoints.tensors import safetensors
from jshard.training.checkpoints.tensors.safetensors import new_header, read_header
from jshard.training.telemetry.progress import byte_bar
from tests.support.processes import run

PAGE = (Path(__file__).parents[3] / "docs" / "weights.md").read_text()
SPECS = {
    "embed/embedding": P("tensor", None),
    "q/kernel": P(None, "tensor", None),
    "k/kernel": P(("data", "tensor"), None),
    "v/kernel": P(None, "data"),
    "wi/kernel": P(None, "tensor"),
    "scales": P(None, ("tensor", "data")),
}
RENAME = r"""
embed\.weight:     embed/embedding
qkv\.weight:       q/kernel | slice 0 0:16 | reshape 8 2 8 | permute 2 0 1
qkv\.weight:       k/kernel | slice 0 16:24 | permute 1 0
qkv\.weight:       v/kernel | slice 0 24: | permute 1 0
norm\.(\d)\.scale: scales[\1]
gate:              wi/kernel[:, 0:4] | permute 1 0
up:                wi/kernel[:, 4:12] | permute 1 0
.*ids:             -
"""


class Attention(nnx.Module):
    """Heads by hand, so that a kernel has three axes; `count` is no parameter, and no file has it."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(12, 8, rngs=rngs)
        self.q = nnx.LinearGeneral(8, (8, 2), use_bias=False, rngs=rngs)
        self.k, self.v = (nnx.Linear(8, 8, use_bias=False, rngs=rngs) for _ in range(2))
        self.wi = nnx.Linear(8, 12, use_bias=False, rngs=rngs)
        self.scales = nnx.Param(jnp.ones((2, 8)))
        self.count = nnx.Cache(jnp.zeros(3))


@pytest.fixture
def abstract(mesh):
    """The model as shapes, each with the sharding of `SPECS`."""

    def made(**dtypes):
        model = nnx.eval_shape(lambda: Attention(nnx.Rngs(0)))
        grid = mesh(data=2, tensor=4)
        for path, variable in nnx.to_flat_state(nnx.state(model)):
            name, shape = "/".join(map(str, path)), variable.get_value()
            where = jax.NamedSharding(grid, SPECS.get(name, P()))
            variable.set_value(jax.ShapeDtypeStruct(shape.shape, dtypes.get(str(path[0]), shape.dtype), sharding=where))
        return model

    return made


@pytest.fixture
def files(tmp_path, monkeypatch):
    """`files(name=array, ...)` writes x.safetensors, in the order given and with a header that no library would lay out."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.txt").write_text(RENAME)

    def written(path="x.safetensors", **arrays):
        entries, at = {"__metadata__": {"of": "a test"}}, 0
        for name, array in arrays.items():
            word = safetensors.WORDS[array.dtype]
            entries[name.replace("__", ".")] = {
                "shape": [*array.shape],
                "dtype": word,
                "data_offsets": [at, at + array.nbytes],
            }
            at += array.nbytes
        text = json.dumps(entries, indent=1).encode() + b"  "
        Path(path).write_bytes(
            len(text).to_bytes(8, "little") + text + b"".join(each.tobytes() for each in arrays.values())
        )
        return Path(path)

    return written


def numbers(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


CONTENT = {
    "embed__weight": numbers(12, 8), "qkv__weight": numbers(32, 8), "norm__1__scale": numbers(8), "position_ids": np.arange(5),
    "norm__0__scale": numbers(8, seed=1), "gate": numbers(4, 8), "up": numbers(8, 8),
}  # fmt: skip
QKV = CONTENT["qkv__weight"]
EXPECTED = {
    "embed/embedding": CONTENT["embed__weight"],
    "q/kernel": QKV[:16].reshape(8, 2, 8).transpose(2, 0, 1),
    "k/kernel": QKV[16:24].T,
    "v/kernel": QKV[24:].T,
    "wi/kernel": np.concatenate([CONTENT["gate"].T, CONTENT["up"].T], 1),
    "scales": np.stack([CONTENT["norm__0__scale"], CONTENT["norm__1__scale"]]),
}


def check(model, expected=EXPECTED):
    state = {"/".join(map(str, path)): each.get_value() for path, each in nnx.to_flat_state(nnx.state(model))}
    for name, array in expected.items():
        assert state[name].sharding.spec == SPECS[name]
        assert state[name].dtype == array.dtype
        for shard in state[name].addressable_shards:
            assert shard.data.shape == state[name].sharding.shard_shape(array.shape)
            assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(array[shard.index]).tobytes(), name


def heard(deed):
    """What is told while it runs."""
    told = []
    stop = events.listen(lambda what, fields: told.append((what, fields)))
    try:
        deed()
    finally:
        stop()
    return dict(told)


def test_weights_go_into_shards_by_the_lines_and_each_byte_is_read_once(abstract, files, monkeypatch):
    monkeypatch.setattr(safetensors, "SECTOR", 0)
    model, path = abstract(), files(**CONTENT)
    told = heard(lambda: check(jshard.load_weights(model, path, rename="r.txt")))["weights_read"]
    assert isinstance(model, Attention)
    assert isinstance(model.count.get_value(), jax.ShapeDtypeStruct)  # which no line names
    wanted = sum(array.nbytes for array in EXPECTED.values())
    assert (told["parameters"], told["read"], told["of"]) == (6, wanted, wanted + CONTENT["position_ids"].nbytes)
    assert events.WORDS["weights_read"][1](told).startswith(
        f"read {wanted:,} of the {wanted + 40:,} B of x.safetensors into 6 parameters in 0."
    )


def test_placed_arrays_are_replaced_where_they_lie(abstract, files):
    path = files(**CONTENT)
    model = jshard.load_weights(abstract(), path, rename="r.txt")
    for variable in (model.embed.embedding, model.scales):
        variable.set_value(variable.get_value() * 0)
    check(jshard.load_weights(model, path, rename="r.txt"))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.float16])
def test_narrow_floats_arrive_to_the_bit(mesh, files, dtype):
    bits = np.arange(256, dtype=np.uint8).reshape(16, -1, np.dtype(dtype).itemsize)
    path = files(w=bits.view(dtype)[..., 0])
    where = jax.NamedSharding(mesh(data=2, tensor=4), P("tensor", "data"))
    with pytest.warns(UserWarning, match="NaN or infinite: "):
        tree = jshard.load_weights({"w": jax.ShapeDtypeStruct(bits.shape[:2], dtype, sharding=where)}, path)
    assert [np.asarray(shard.data).tobytes() for shard in tree["w"].addressable_shards] == [
        np.ascontiguousarray(bits[shard.index]).tobytes() for shard in tree["w"].addressable_shards
    ]
    jshard.save_weights(tree, "again.safetensors", like=path)
    assert Path("again.safetensors").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_number_that_is_not_finite_is_told_by_its_tensor(mesh, files, dtype):
    bad = numbers(8, 4).astype(dtype)
    bad[0, 0], bad[7, 3], bad[3, 1] = np.nan, np.inf, -np.inf
    path = files(w=bad, good=numbers(8).astype(dtype), n=np.arange(4, dtype=np.int32))
    like = {"w": bad, "good": numbers(8).astype(dtype), "n": np.arange(4, dtype=np.int32)}
    where = {"w": jax.P("data"), "good": jax.P(), "n": jax.P()}
    tree = {
        name: jax.device_put(jnp.zeros(x.shape, x.dtype), jax.NamedSharding(mesh(data=2, tensor=4), where[name]))
        for name, x in like.items()
    }
    with pytest.warns(UserWarning) as told:
        jshard.load_weights(tree, path)
    assert [str(each.message) for each in told] == [
        f"{path} holds numbers that are NaN or infinite: 3 in w ({np.dtype(dtype).name}[8, 4]); fetch it again, or train from another"
    ]


def test_a_number_by_itself_is_read_and_written(mesh, tmp_path):
    whole = jax.NamedSharding(mesh(data=2, tensor=4), P())
    saved = {"scale": jnp.float32(3.5), "count": jax.device_put(jnp.int32(7), whole), "step": 2, "act": jax.nn.relu}
    jshard.save_weights(saved, path := tmp_path / "numbers.safetensors")
    described = {name: jax.ShapeDtypeStruct((), saved[name].dtype, sharding=whole) for name in ("scale", "count")}
    for tree in (saved, {**saved, **described}, {**saved, "step": 0}):
        read = jshard.load_weights(tree, path)
        assert (float(read["scale"]), int(read["count"]), read["count"].sharding) == (3.5, 7, whole)
        assert (int(read["step"]), read["act"]) == (2, jax.nn.relu)


def test_a_tree_without_shardings_goes_where_jax_puts_arrays(files):
    path = files(a__kernel=numbers(3, 4), a__bias=numbers(4))
    tree = {"a": {"kernel": jnp.zeros((3, 4)), "bias": jax.ShapeDtypeStruct((4,), jnp.float32)}}
    read = jshard.load_weights(tree, path)
    assert not read["a"]["kernel"].committed and read["a"]["kernel"].sharding == tree["a"]["kernel"].sharding
    assert (np.asarray(read["a"]["kernel"]) == numbers(3, 4)).all() and (
        np.asarray(read["a"]["bias"]) == numbers(4)
    ).all()
    assert not tree["a"]["kernel"].any()


def test_dtype_is_converted_where_it_is_asked_and_only_there(abstract, files):
    path = files(**CONTENT)
    expected = EXPECTED | {"embed/embedding": CONTENT["embed__weight"].astype(ml_dtypes.bfloat16)}
    check(jshard.load_weights(abstract(embed=jnp.bfloat16), path, rename="r.txt", dtype="convert"), expected)
    with pytest.raises(JShardError) as told:
        jshard.load_weights(abstract(embed=jnp.bfloat16, scales=jnp.bfloat16), path, rename="r.txt")
    assert str(told.value) == (
        '"embed.weight" (float32[12, 8] in x.safetensors) and 2 more would become bfloat16 in the model, as embed/embedding by r.txt:2; '
        'give dtype="convert"'
    )
    with pytest.raises(
        JShardError, match='dtype is "converts", which is neither same nor convert; did you mean "convert"?'
    ):
        jshard.load_weights(abstract(), path, rename="r.txt", dtype="converts")


# -- faults --


def test_all_faults_are_told_at_once_and_nothing_is_read(abstract, files, monkeypatch):
    monkeypatch.setattr(safetensors.FileTensor, "read", None)
    content = dict(
        CONTENT,
        embed__weight=numbers(13, 8),
        lm_head=numbers(12, 8),
        layer_0=numbers(2),
        layer_1=numbers(2),
        up=numbers(12, 8),
    )
    path = files(**content)
    path.write_bytes(path.read_bytes()[:-8])
    lines = (
        RENAME.replace("k/kernel", "ky/kernel")
        .replace("scales[\\1]", "scales[2]")
        .replace("reshape 8 2 8", "reshape 8 2 9")
    )
    lines = lines.replace("[:, 0:4]", "[:, 0:5]").replace("| permute 1 0\n.*", "\n.*")
    Path("r.txt").write_text(lines + "up.*: -\n")
    with pytest.raises(JShardError) as told:
        jshard.load_weights(abstract(embed=jnp.int32), path, rename="r.txt")
    size = path.stat().st_size
    assert str(told.value).splitlines() == [
        f"x.safetensors has {size:,} bytes and by its header {size + 8:,}: it was cut off; fetch x.safetensors again",
        'r.txt:10 matches no tensor that is left: r.txt:8 takes all of them, such as "up"; write it before r.txt:8',
        '"embed.weight" (float32[13, 8] in x.safetensors) by r.txt:2 does not fit embed/embedding, int32[12, 8]; use the model that this file is of',
        '"embed.weight" (float32[13, 8] in x.safetensors) by r.txt:2 can\'t become int32 in the model, as embed/embedding; make embed/embedding of float32, or skip this tensor',
        'r.txt:3 reshapes [16, 8] to [8, 2, 9], from "qkv.weight" (float32[32, 8] in x.safetensors); write the steps for this shape',
        'r.txt:4 makes "qkv.weight" (float32[32, 8] in x.safetensors) the parameter "ky/kernel", which the model does not have; did you mean "k/kernel"?',
        'r.txt:6 fills scales[2], and scales is [2, 8], by "norm.1.scale" (float32[8] in x.safetensors); count its axes from 0 (and 1 more with other numbers)',
        '"gate" (float32[4, 8] in x.safetensors) [8, 4] by r.txt:7 does not fit wi/kernel[:, :5], float32[8, 5]; use the model that this file is of',
        '"up" (float32[12, 8] in x.safetensors) by r.txt:8 does not fit wi/kernel[:, 4:12], float32[8, 8]; use the model that this file is of',
        r'r.txt has no line for "lm_head" (float32[12, 8] in x.safetensors); write one, or lm_head: - if not wanted',
        r'r.txt has no line for "layer_0" (float32[2] in x.safetensors); write one, or layer_0: - if not wanted (and 1 more with other numbers)',
        r"k/kernel (float32[8, 8]) gets no tensor from x.safetensors; write in r.txt regex: k/kernel",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line, faults",
    [
        ("w: w", ['"w" (float32[3, 4] in x.safetensors) by r.txt:1 does not fit w, float32[4, 3]; add to r.txt:1: | permute 1 0']),
        ("w: w | reshape 12", ['"w" (float32[3, 4] in x.safetensors) [12] by r.txt:1 does not fit w, float32[4, 3]; add to r.txt:1: | reshape 4 3, and | permute where axes change places']),
        ("w: w[0:2] | permute 1 0 | slice 0 0:2", [
            'r.txt:1 takes 6 of the 12 numbers of "w" (float32[3, 4] in x.safetensors); write lines for the others, or w: - | slice ... if not wanted',
            "w (float32[4, 3]) gets 6 of its 12 numbers from x.safetensors; write lines for the others, as regex: w[0]",
        ]),
        ("w: w | permute 1 0\nw: w[3] | permute 1 0 | slice 0 3:4 | reshape 3", ['w (float32[4, 3]) is filled by "w" by r.txt:1 and by "w" by r.txt:2; remove one of them by: -']),
        ("w: w[0, 1, 2] | permute 1 0", ['r.txt:1 fills w[0, 1, 2], and w has 2 axes, by "w" (float32[3, 4] in x.safetensors); count its axes from 0']),
        ("v: w", [
            'r.txt has no line for "w" (float32[3, 4] in x.safetensors); write one, or w: - if not wanted',
            "w (float32[4, 3]) gets no tensor from x.safetensors; write in r.txt w: w",
        ]),
    ],
)  # fmt: skip
def test_fault_of_a_line_says_how_to_mend_it(files, line, faults):
    path = files(w=numbers(3, 4))
    Path("r.txt").write_text(line)
    with pytest.raises(JShardError) as told:
        jshard.load_weights({"w": jnp.zeros((4, 3))}, path, rename="r.txt")
    assert str(told.value).splitlines() == faults


BOTH = '{} both take some numbers of "w" (float32[6, 4] in x.safetensors); remove one of them, or end its slice where the other begins'
SHARED = {
    "as many numbers as there are": ("w: a | slice 0 0:4\nw: b | slice 0 2:6", "r.txt:1 and r.txt:2"),
    "across": ("w: a | slice 0 0:4\nw: c | slice 1 2:4", "r.txt:1 and r.txt:2"),
    "in rows of a reshape": (
        "w: c | reshape 2 3 4 | slice 1 0:2\nw: a | slice 0 1:5",
        "r.txt:1 and r.txt:2",
    ),
    "the third": ("w: b | slice 0 0:2\nw: a | slice 0 2:6\nw: c | slice 0 1:5", "r.txt:1 and r.txt:3"),
    "not wanted": ("w: - | slice 0 0:3\nw: a | slice 0 2:6", "r.txt:1 and r.txt:2"),
}


@pytest.mark.parametrize("case", SHARED)
def test_lines_whose_slices_overlap_are_refused_with_both_named(files, case):
    path, (lines, who) = files(w=numbers(6, 4)), SHARED[case]
    Path("r.txt").write_text(lines)
    names = [line.split()[1] for line in lines.splitlines() if " - " not in line]
    of_c = {"across": (6, 2), "in rows of a reshape": (2, 2, 4)}.get(case, (4, 4))
    shapes = {"a": (4, 4), "b": (2, 4) if case == "the third" else (4, 4), "c": of_c}
    tree = {name: jnp.zeros(shapes[name]) for name in names}
    for deed in (
        lambda: jshard.load_weights(tree, path, rename="r.txt"),
        lambda: jshard.save_weights(tree, "y.safetensors", rename="r.txt", like=path),
    ):
        with pytest.raises(JShardError) as told:
            deed()
        assert BOTH.format(who) in str(told.value).splitlines()
    assert not Path("y.safetensors").exists()


def test_a_part_within_that_of_another_line_is_read_and_counts_once(files):
    path, w = files(w=numbers(6, 4)), numbers(6, 4)
    tree = {"a": jnp.zeros((6, 4)), "b": jnp.zeros((4, 2))}
    Path("r.txt").write_text("w: b | slice 0 0:2 | permute 1 0\nw: a")  # the head of a vocabulary that was padded
    read = jshard.load_weights(tree, path, rename="r.txt")
    np.testing.assert_array_equal(read["a"], w)
    np.testing.assert_array_equal(read["b"], w[:2].T)
    with pytest.raises(JShardError, match="^r.txt:1 and r.txt:2 both take some numbers of"):
        jshard.save_weights(read, "y.safetensors", rename="r.txt", like=path)
    Path("r.txt").write_text("w: b | slice 0 0:2 | permute 1 0\nw: a | slice 0 0:4")
    with pytest.raises(JShardError, match="^r.txt:1 and r.txt:2 both take some numbers of"):
        jshard.load_weights({"a": jnp.zeros((4, 4)), "b": jnp.zeros((4, 2))}, path, rename="r.txt")


def test_a_dtype_that_safetensors_has_not_is_told_before_anything_is_written(files):
    files()
    tree = {"a": jnp.zeros(3, jnp.int4), "b": jnp.zeros(3), "c": jnp.zeros(2, jnp.uint4)}
    with pytest.raises(JShardError) as told:
        jshard.save_weights(tree, "y.safetensors")
    assert str(told.value).splitlines() == [
        "a (int4[3]) has a dtype that safetensors does not support; convert it first",
        "c (uint4[2]) has a dtype that safetensors does not support; convert it first",
    ]
    assert not [*Path.cwd().glob("y.*")]


def test_saved_weights_are_on_the_disk_before_the_file_has_its_name(files, monkeypatch):
    deeds, fsync, replace = [], os.fsync, os.replace
    files()

    def put(source, target):
        replace(source, target)
        deeds.append(("replace", Path(source).name, Path(target).name))

    monkeypatch.setattr(os, "fsync", lambda file: (deeds.append(("fsync", *written(file))), fsync(file))[1])
    monkeypatch.setattr(os, "replace", put)
    jshard.save_weights({"w": jnp.ones((3, 4))}, "y.safetensors")
    size = Path("y.safetensors").stat().st_size
    assert deeds == [
        ("fsync", "y.safetensors.partial", size), ("replace", "y.safetensors.partial", "y.safetensors"), ("fsync", Path.cwd().name, None),
    ]  # fmt: skip


def written(file):
    """The name of an open file, and how long it is; of a folder the name alone."""
    path = Path(os.readlink(f"/proc/self/fd/{file}"))
    return path.name, path.stat().st_size if path.is_file() else None


def test_pieces_that_overlap_behind_where_the_first_axis_begins_are_told(files):
    path = files(a=numbers(2, 2), b=numbers(2, 2), c=numbers(2, 2))
    Path("r.txt").write_text("a: w[0:2, 2:4]\nb: w[1:3, 3:5]\nc: w[4:6, 2:4]")
    with pytest.raises(JShardError) as told:
        jshard.load_weights({"w": jnp.zeros((6, 5))}, path, rename="r.txt")
    assert str(told.value).splitlines()[0] == (
        'w (float32[6, 5]) is filled by "a" by r.txt:1 and by "b" by r.txt:2; remove one of them by: -'
    )
    Path("r.txt").write_text("a: v[0:2]\nb: v[2:4]")
    read = jshard.load_weights({"v": jnp.zeros(4)}, files(a=numbers(2), b=numbers(2, seed=1)), rename="r.txt")
    np.testing.assert_array_equal(read["v"], np.concatenate([numbers(2), numbers(2, seed=1)]))


def test_without_a_rename_file_names_are_paths(files, mesh):
    path = files(a__kernl=numbers(3), b=numbers(2))
    with pytest.raises(JShardError) as told:
        jshard.load_weights({"a": {"kernel": jnp.zeros(3)}, "b": jnp.zeros((1, 2))}, path)
    assert str(told.value).splitlines() == [
        r'the model has no parameter for "a.kernl" (float32[3] in x.safetensors); give rename=, a file with the line a\.kernl: a/kernel',
        '"b" (float32[2] in x.safetensors) does not fit b, float32[1, 2]; give rename=, a file with a line for it, and add there: | reshape 1 2, and | permute where axes change places',
        r"a/kernel (float32[3]) gets no tensor from x.safetensors; give rename=, a file with the line a\.kernl: a/kernel",
    ]  # fmt: skip
    absent = jax.NamedSharding(mesh(data=2).abstract_mesh, P())
    with pytest.raises(
        JShardError,
        match=r"^b \(float32\[2\]\) is sharded over an abstract mesh, without devices; give it a mesh of devices$",
    ):
        jshard.load_weights({"b": jax.ShapeDtypeStruct((2,), jnp.float32, sharding=absent)}, files(b=numbers(2)))


def test_file_and_rename_file_that_are_not_there_are_told_together(files, tmp_path):
    files(b=numbers(2))
    (tmp_path / "empty").mkdir()
    with pytest.raises(JShardError) as told:
        jshard.load_weights({}, "y.safetensors", rename="s.txt")
    assert str(told.value).splitlines() == [
        "s.txt can't be read: no such file or directory; name a file of lines `regex: path`",
        'there is no y.safetensors; did you mean "x.safetensors"?',
    ]
    with pytest.raises(
        JShardError,
        match="^empty holds no safetensors; name the folder with model.safetensors in it$",
    ):
        jshard.load_weights({}, "empty")


def test_random_state_without_numbers_is_told(files):
    model = nnx.eval_shape(lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0)))
    with pytest.raises(JShardError) as told:
        jshard.load_weights(model, files())
    assert str(told.value).splitlines() == [
        f"rngs/{name} is random state without numbers, and a file of weights has none; type nnx.reseed(model, dropout=0) before" for name in ("count", "key")
    ]  # fmt: skip
    nnx.reseed(model, dropout=0)
    jshard.load_weights(model, files())


def test_file_that_is_cut_off_while_it_is_read_is_told(files, monkeypatch):
    path = files(w=numbers(3, 4))
    read = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda file, blocks, at: os.truncate(path, path.stat().st_size - 4) or read(file, blocks, at)
    )
    size = path.stat().st_size
    with pytest.raises(
        JShardError,
        match=f"^x.safetensors ends at byte {size - 4}, in the middle of a tensor; fetch x.safetensors again$",
    ):
        jshard.load_weights({"w": jnp.zeros((3, 4))}, path)


# -- back to a file --


def test_unchanged_weights_are_saved_as_the_same_bytes(abstract, files):
    path = files(**CONTENT)
    model = jshard.load_weights(abstract(), path, rename="r.txt")
    told = heard(lambda: jshard.save_weights(model, "again.safetensors", rename="r.txt", like=path))["weights_written"]
    assert Path("again.safetensors").read_bytes() == path.read_bytes()
    assert events.WORDS["weights_written"][1](told).startswith(
        f"wrote 6 parameters, {path.stat().st_size:,} B, to again.safetensors in 0."
    )
    model.scales.set_value(model.scales.get_value() + 1)
    jshard.save_weights(model, "x.safetensors", rename="r.txt", like=path)  # in place of what it is like
    check(jshard.load_weights(abstract(), path, rename="r.txt"), EXPECTED | {"scales": EXPECTED["scales"] + 1})
    assert sorted(each.name for each in Path().iterdir()) == ["again.safetensors", "r.txt", "x.safetensors"]


def test_folder_of_parts_is_read_and_saved_as_the_same_bytes(abstract, files, tmp_path):
    (tmp_path / "hub").mkdir()
    parts = {"hub/a.safetensors": list(CONTENT)[:3], "hub/b.safetensors": list(CONTENT)[3:]}
    for path, names in parts.items():
        files(path, **{name: CONTENT[name] for name in names})
    places = {name.replace("__", "."): Path(path).name for path, names in parts.items() for name in names}
    Path("hub/model.safetensors.index.json").write_text(json.dumps({"weight_map": places}, indent=3))
    model = jshard.load_weights(abstract(), "hub", rename="r.txt")
    check(model)
    jshard.save_weights(model, "again", rename="r.txt", like="hub")
    assert {each.name: each.read_bytes() for each in Path("again").iterdir()} == {
        each.name: each.read_bytes() for each in Path("hub").iterdir()
    }
    model.scales.set_value(model.scales.get_value() + 1)
    jshard.save_weights(model, "hub", rename="r.txt", like="hub")
    check(jshard.load_weights(abstract(), "hub", rename="r.txt"), EXPECTED | {"scales": EXPECTED["scales"] + 1})
    assert len([*Path("hub").iterdir()]) == 3


def test_linens_variables_are_read_by_the_paths_of_claims(files):
    tree = {"params": {"a": {"kernel": jnp.zeros(3)}}, "batch_stats": {"a": {"mean": jnp.zeros(2)}}}
    read = jshard.load_weights(tree, files(a__kernel=numbers(3), batch_stats__a__mean=numbers(2)))
    assert (np.asarray(read["params"]["a"]["kernel"]) == numbers(3)).all() and (
        np.asarray(read["batch_stats"]["a"]["mean"]) == numbers(2)
    ).all()


def test_without_a_file_to_be_like_names_are_paths_and_lines_an_error(files):
    tree = {"l": {"0": {"w": jnp.array(numbers(3, 4))}}, "s": jnp.array(numbers(2, 5)), "e": jnp.ones(3, jnp.bfloat16)}
    files()
    jshard.save_weights(tree, "z.safetensors", metadata={"format": "pt"})
    assert (
        b'{"__metadata__":{"format":"pt"},"l/0/w":{"dtype":"F32","shape":[3,4],"data_offsets":[0,48]},"s":'
        in Path("z.safetensors").read_bytes()
    )
    assert [*read_header(Path("z.safetensors"), []).tensors] == ["l/0/w", "s", "e"]
    read = jshard.load_weights(jax.tree.map(jnp.zeros_like, tree), "z.safetensors")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), read, tree))
    with pytest.raises(JShardError) as told:
        jshard.save_weights(tree, "y.safetensors", rename="r.txt")
    assert str(told.value) == 'r.txt has no order and no dtypes of tensors; give like="FILE", a file of these names'


def test_tensor_of_two_parameters_and_shapes_alone_can_not_be_saved(files):
    path = files(w=numbers(3))
    Path("r.txt").write_text("w: a\nw: b")
    tree = jshard.load_weights({"a": jnp.zeros(3), "b": jnp.zeros(3)}, path, rename="r.txt")
    assert (tree["a"] == tree["b"]).all() and (np.asarray(tree["a"]) == numbers(3)).all()
    with pytest.raises(JShardError) as told:
        jshard.save_weights(tree, "y.safetensors", rename="r.txt", like=path)
    assert (
        str(told.value)
        == 'r.txt:1 and r.txt:2 both take some numbers of "w" (float32[3] in x.safetensors); remove one of them, or end its slice where the other begins'
    )
    with pytest.raises(
        JShardError,
        match=r'^a \(float32\[3\]\) is a shape without numbers; read them first: jshard.load_weights\(model, "x.safetensors"\)$',
    ):
        jshard.save_weights({"a": jax.ShapeDtypeStruct((3,), jnp.float32)}, "y.safetensors", like=path)


def test_save_that_fails_leaves_what_was_there(files, monkeypatch):
    path, before = files(w=numbers(3)), files(w=numbers(3)).read_bytes()
    with pytest.raises(
        JShardError,
        match="^no/y.safetensors can't be written to: no such file or directory; make room, or name another file$",
    ):
        jshard.save_weights({"w": jnp.zeros(3)}, "no/y.safetensors")
    write, full = os.pwrite, OSError(28, "No space left on device")
    monkeypatch.setattr(
        os, "pwrite", lambda file, block, at: write(file, block, at) if len(block) > 12 else (_ for _ in ()).throw(full)
    )
    with pytest.raises(
        JShardError,
        match="^x.safetensors can't be written to: no space left on device; make room, or name another file$",
    ):
        jshard.save_weights({"w": jnp.zeros(3)}, path, like=path)
    assert path.read_bytes() == before
    assert sorted(each.name for each in Path().iterdir()) == ["r.txt", "x.safetensors"]


# -- other checkpoints, other places --


def test_orbax_checkpoints_are_read_by_the_same_lines(abstract, files, mesh, tmp_path):
    files()
    Path("r.txt").write_text(RENAME.replace("\\.", "/"))
    split = jax.NamedSharding(mesh(data=2, tensor=4), P("tensor"))
    content = {name: jax.device_put(each, split) if each.shape[0] % 4 == 0 else each for name, each in CONTENT.items()}
    tree: dict = {}
    for name, array in content.items():
        *above, last = name.split("__")
        node = tree
        for each in above:
            node = node.setdefault(each, {})
        node[last] = array
    v1.save(tmp_path / "orbax", tree)
    model = abstract()
    told = heard(lambda: check(jshard.load_weights(model, "orbax", rename="r.txt")))["weights_read"]
    assert told["read"] == sum(array.nbytes for array in EXPECTED.values())
    v1.save(tmp_path / "own", nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    check(jshard.load_weights(abstract(), "own"))
    (tmp_path / "own" / "state" / "_METADATA").write_text("{}")
    with pytest.raises(JShardError, match="^own is no whole checkpoint by orbax: 'tree_metadata'; fetch it again$"):
        jshard.load_weights(abstract(), "own")


@pytest.mark.seconds
def test_checkpoint_of_a_training_gives_its_model(in_the_root, tmp_path):
    from examples.digits import Model

    words = ["train", "configs/digits.yaml", f"output={tmp_path}", "steps=2", "checkpoint=2"]
    assert main(words) == 0
    jshard.unload()
    model = jshard.load_weights(Model(rngs=nnx.Rngs(5)), tmp_path / "checkpoints" / "2")
    other = Model(rngs=nnx.Rngs(5))
    assert not (model.up.kernel[...] == other.up.kernel[...]).all()
    assert model.up.kernel[...].sharding == other.up.kernel[...].sharding


def test_bar_is_drawn_on_a_terminal_and_nowhere_else():
    for terminal in (True, False):
        file = io.StringIO()
        with byte_bar("reading x", 100, Console(file=file, force_terminal=terminal, width=100)) as show:
            show(40)
        assert ("reading x" in file.getvalue()) is terminal


@pytest.mark.slow
def test_four_processes_read_and_write_their_shards_and_hold_no_more(tmp_path):
    done = run(Path(__file__).parents[2] / "support" / "weights_in_processes.py", 4, tmp_path)
    for each in done:
        told = json.loads(each.stdout.splitlines()[-1])
        shard = told["shard"]
        assert told["read"] == shard  # and the replicated one
        assert shard <= told["system_read"] < 1.05 * shard + 2**20
        assert told["peak"] < 1.2 * shard  # a parameter twice, for a moment, would be 1.25
        assert told["wrote"] < 1.1 * shard
        assert told["faults"] == [
            f"{tmp_path}/no/y.safetensors can't be written to: no such file or directory; make room, or name another file",
            "w (float32[4]) has no sharding, and there are 4 processes; give it one: jax.ShapeDtypeStruct(shape, dtype, sharding=...)",
        ]
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "x.safetensors").read_bytes()


def test_page_shows_python_that_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(block, {})


def test_header_is_laid_out_as_it_is_read(tmp_path):
    header = new_header(tmp_path / "x", {"b": ((2, 3), np.dtype(np.int8)), "a": ((4,), np.dtype(np.float32))}, None)
    (tmp_path / "x").write_bytes(header.text + bytes(22))
    assert read_header(tmp_path / "x", []) == header and header.size % 8 == 6

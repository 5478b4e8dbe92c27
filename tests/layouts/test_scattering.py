"""D1-D9: an array of one process reaches the devices of all, part by part; and comes back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

import jshard
from benchmarks import scatter as benchmark
from jshard.errors import JShardError
from jshard.inspect.compiled import collectives_in
from jshard.layers import transfer
from jshard.layouts import gathering, p2p, scattering, shard_buffers
from jshard.layouts import index_ranges as boxes
from jshard.layouts.index_ranges import blocks, overlap, word_count
from jshard.layouts.p2p import Parcel, _at_doors, _sending, carry, doors_of, is_shared, parcels_of, tell
from tests.support import processes

SCRIPT = Path(__file__).parents[1] / "support" / "scatter_in_processes.py"
LAYOUTS = {"replicated": (None, None), "rows": ("a", None), "columns": (None, ("a", "b")), "both": ("b", "a")}


def made(*shape):
    """Any bits there are."""
    return np.random.default_rng(0).integers(0, 2**32, shape, np.uint32).view(np.float32)


# -- in several processes; what is checked there is in scatter_in_processes.py --


def told(finished):
    return [json.loads(each.stdout.split("told ")[1]) for each in finished]


@pytest.mark.slow
def test_scatter_in_two_processes_of_two_devices():
    one, other = told(processes.run(SCRIPT, 2, "all", devices=2, hashes=True))
    assert one["eight"] + other["eight"] == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
    assert one["faults"] == other["faults"]
    laid = "Layout([a, whole] on {a: 2, b: 2}) of devices 0 to 3"
    assert one["faults"] == {
        "nobody gives": "process 0 is the root of jshard.scatter and gave no array; "
        "write jshard.scatter(x if jax.process_index() == 0 else None, layout, root=0)",
        "all give": "process 0 gave jshard.scatter an array, but its root is process 1; "
        "write jshard.scatter(x if jax.process_index() == 1 else None, layout, root=1)",
        "root": "jshard.scatter names root 2, but there are 2 processes; use 0 to 1",
        "method": 'jshard.scatter has no method "brodcast"; did you mean "broadcast"?',
        "other roots": f'process 1 called jshard.scatter with {laid}, root=1, method="scatter", '
        f'but process 0 with {laid}, root=0, method="scatter"; call it alike on every process',
        "rank": "jshard.scatter lays out 2 axes, but the array (4,) has 1; give 1 axes",
        "shape": 'jshard.scatter splits axis 0 of size 5 over mesh axis "a" of size 2; use 4 or 6, or pad',
        "double": "jshard.scatter was given float64, which JAX holds only with JAX_ENABLE_X64=1; "
        "give it x.astype(np.float32)",
        "words": "jshard.scatter was given an array of <U1, which it can't scatter; "
        "give it numbers, for instance x.astype(np.float32)",
        "scattered": "jshard.scatter takes an array on the root's host, but this array is on devices of other processes; "
        "use jshard.place(x, layout)",
        "own meshes": "process 1 called jshard.scatter with Layout([w] on {w: 2}) of devices 2 to 3, root=0, "
        'method="scatter", but process 0 with Layout([w] on {w: 2}) of devices 0 to 1, root=0, method="scatter"; '
        "call it alike on every process",
        "one shared": "process 1 called jshard.gather with float32[2] on device 2, but process 0 with float32[8, 4] on "
        "devices 0 to 3; call it with the same arrays in the same order on every process",
        "gather roots": "process 1 called jshard.gather with float32[8, 4] on devices 0 to 3, root=1, but process 0 with "
        "float32[8, 4] on devices 0 to 3, root=0; call it with the same arrays in the same order on every process",
        "move": "process 1 called jshard.place with float32[8, 4] on devices 0 to 3, to devices 2 to 3, but process 0 with "
        "float32[8, 4] on devices 0 to 3, to devices 0 to 1; call it with the same arrays in the same order on every process",
        "gather root": "jshard.gather names root -1, but there are 2 processes; use 0 to 1",
    }


@pytest.mark.slow
def test_scatter_in_four_processes():
    parts = [each["eight"] for each in told(processes.run(SCRIPT, 4))]
    assert parts == [[[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]], [[7.0, 8.0]]]


@pytest.mark.slow
def test_scatter_takes_its_part_and_little_more():
    """A quarter of a gibibyte here; `python -m benchmarks.scatter` has half of one, and the times."""
    found = benchmark.in_processes(4, 256)
    for each in found[1:]:
        assert each["scatter"]["mebibytes"] <= 256 / 4 + 64
    most = {method: max(each[method]["mebibytes"] for each in found) for method in ("scatter", "broadcast")}
    assert most["scatter"] <= 0.3 * most["broadcast"]


def test_benchmark_tells_what_is_saved_beside_what_the_original_printed():
    found = [{"broadcast": {"seconds": 4.0, "mebibytes": 700.0}, "scatter": {"seconds": 0.5, "mebibytes": 100.0}}] * 4
    assert benchmark.row(4, 512, found).split() == ("512 4 4.00 s 700 700 0.50 s 100 100 72 % 60 % 56 %".split())


# -- in one process --


def test_page_on_scatter_says_what_runs():
    page = (Path(__file__).parents[2] / "docs/scatter.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(program, {})


@pytest.mark.parametrize("method", ["scatter", "broadcast"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("sizes", [{"a": 2, "b": 1}, {"a": 2, "b": 2}, {"a": 2, "b": 4}], ids=str)
def test_scatter_puts_every_part_where_the_layout_says(mesh, monkeypatch, sizes, name, method):
    monkeypatch.setattr(boxes, "BLOCK", 100)
    layout, whole = jshard.Layout(mesh(**sizes), *LAYOUTS[name]), made(8, 16)
    y = jshard.scatter(whole, layout, method=method)
    assert y.sharding == layout.sharding
    for shard in y.addressable_shards:
        assert shard.data.shape == layout.shard_shape(whole.shape)
        assert np.asarray(shard.data).tobytes() == whole[shard.index].tobytes()
    assert jshard.gather(y).tobytes() == whole.tobytes()
    assert jshard.gather(y, root=0).tobytes() == whole.tobytes()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2", "float16"])
def test_scatter_gather_and_move_keep_every_nan_of_narrow_floats(mesh, monkeypatch, name):
    """XLA's CPU changes some when it writes them in long runs, so blocks are of many numbers."""
    monkeypatch.setattr(boxes, "BLOCK", 2**12)
    bits = np.random.default_rng(0).integers(0, 256, (64, 256 * jnp.dtype(name).itemsize), np.uint8)
    whole = bits.view(jnp.dtype(name))
    y = jshard.scatter(whole, jshard.Layout(mesh(a=2), None, "a"))
    assert jshard.gather(y).tobytes() == whole.tobytes()
    assert jshard.gather(jshard.place(y, [5])).tobytes() == whole.tobytes()


@pytest.mark.parametrize("name", ["bool", "int8", "complex64", "int64", "float64", "complex128"])
def test_scatter_and_gather_keep_numbers_of_all_widths(mesh, monkeypatch, name):
    monkeypatch.setattr(boxes, "BLOCK", 100)
    random = np.random.default_rng(0)
    whole = random.normal(size=(6, 9)).astype(name) * (
        random.normal(size=(6, 9)) < 0.5
    )  # both halves of a word, and zeros
    whole = (whole + 1j * random.normal(size=(6, 9)) if "complex" in name else whole).astype(name)
    with jax.enable_x64(name in ("int64", "float64", "complex128")):
        y = jshard.scatter(whole, jshard.Layout(mesh(a=2), "a", None))
        assert y.dtype == name
        assert jshard.gather(y).tobytes() == np.asarray(y).tobytes() == whole.tobytes()
        y = jshard.scatter(whole[:1, :3], jshard.Layout(mesh(a=2), None, None), method="broadcast")  # 3 bytes of int8
        assert np.asarray(y).tobytes() == whole[:1, :3].tobytes()


def test_scatter_holds_numbers_of_its_own(mesh):
    whole = np.ones((8, 16), np.float32)
    y = jshard.scatter(whole, jshard.Layout(mesh(a=8), "a", None))
    whole[:] = 2
    np.testing.assert_array_equal(y, 1)
    taken = jshard.gather(y)
    taken[:] = 3
    np.testing.assert_array_equal(y, 1)


@pytest.mark.parametrize("give", [jnp.asarray, np.asfortranarray], ids=["jax", "fortran"])
def test_scatter_takes_what_numpy_takes(mesh, give):
    x = np.arange(32).reshape(4, 8).astype(np.int32)
    np.testing.assert_array_equal(jshard.scatter(give(x), jshard.Layout(mesh(a=4), "a", None)), x)


def test_scatter_takes_lists_and_numbers_and_shardings_in_place_of_a_layout(mesh):
    grid = mesh(a=4)
    y = jshard.scatter([1.0, 2.0, 3.0, 4.0], jax.NamedSharding(grid, jax.P("a")))
    assert (y.dtype, y.sharding.spec, y.addressable_shards[3].data.tolist()) == (np.float32, jax.P("a"), [4.0])
    assert jshard.scatter(2, jshard.Layout(grid)).dtype == np.int32
    assert jshard.scatter([2], jshard.Layout(mesh(a=1), "a")).tolist() == [2]
    with jax.set_mesh(grid):  # a shorter spec leaves the last axis whole, as in JAX
        y = jshard.scatter(np.ones((4, 2), np.float32), jax.P("a"))
        rows = jax.NamedSharding(grid, jax.P("a"))
        pulled = jax.grad(lambda x: jshard.scatter(x, rows).sum())(np.ones(4, np.float32))
        with pytest.raises(
            JShardError
        ) as raised:  # JAX tells no devices of the mesh that is set while it differentiates
            jax.grad(lambda x: jshard.scatter(x, jax.P("a")).sum())(np.ones(4, np.float32))
    assert str(raised.value) == (
        "jshard.scatter was given a layout over a mesh without its devices; "
        "give it jax.NamedSharding(mesh, spec) or jshard.Layout(mesh, ...) of a mesh of devices"
    )
    assert (y.sharding, y.addressable_shards[0].data.shape) == (jax.NamedSharding(grid, jax.P("a", None)), (1, 2))
    np.testing.assert_array_equal(pulled, 1)


def test_gather_hands_back_what_is_on_the_host():
    x = np.ones(3)
    assert jshard.gather(x) is x
    assert jshard.gather([1, 2], root=0).tolist() == [1, 2]
    assert jshard.gather(2.0) == 2.0


@pytest.mark.parametrize("count", [1, 2, 3])
def test_gather_to_one_root_is_no_part_of_a_program_of_several_processes(monkeypatch, count):
    monkeypatch.setattr(jax, "process_count", lambda: count)
    to_one = lambda: jax.eval_shape(lambda x: jshard.gather(x, root=0), jnp.ones(2))
    if count == 1:
        assert to_one().shape == (2,)
        return
    with pytest.raises(JShardError) as raised:
        to_one()
    assert str(raised.value) == (
        "jshard.gather to one root can't be differentiated or compiled, as the other processes would have no result; "
        "use jshard.gather(x), without root"
    )


def test_scatter_reads_a_mapped_file_block_by_block(mesh, tmp_path, monkeypatch):
    monkeypatch.setattr(boxes, "BLOCK", 64)
    np.save(tmp_path / "x.npy", np.arange(64, dtype=np.float32).reshape(8, 8))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    y = jshard.scatter(mapped, jshard.Layout(mesh(a=2), None, "a"))
    np.testing.assert_array_equal(y, np.arange(64).reshape(8, 8))


def test_parts_that_only_touch_share_nothing():
    assert overlap(((0, 2), (0, 4)), ((1, 3), (2, 6))) == ((1, 2), (2, 4))
    assert overlap(((0, 2), (0, 4)), ((2, 4), (0, 4))) is None


def test_blocks_cover_a_part_and_are_of_one_shape(monkeypatch):
    monkeypatch.setattr(boxes, "BLOCK", 100)
    for box, shape in (
        (((3, 10), (2, 15)), (1, 13)), (((0, 1), (0, 203)), (1, 25)), (((1, 8), (0, 8)), (3, 8)), (((5, 6),), (1,)), ((), ()),
    ):  # fmt: skip
        found = list(blocks(box, 4))
        assert {boxes.lengths(block) for block in found} == {shape}
        covered = np.zeros([end for _, end in box])
        for block in found:
            assert boxes.is_inside(block, box)
            assert 4 * np.prod(boxes.lengths(block)) <= 100
            covered[boxes.index(block)] = 1
        assert covered.sum() == np.prod(boxes.lengths(box))
    assert list(blocks(((0, 0), (0, 8)), 4)) == []
    assert boxes.index(((2, 4), (5, 6)), ((1, 9), (5, 7))) == (slice(1, 3), slice(0, 1))


def test_what_a_process_has_stays_with_it(monkeypatch):
    def parcels(having, wanting):
        return [(parcel.source, parcel.targets) for parcel in parcels_of((), having, wanting)]

    assert parcels([0], [0]) == [(0, ())]
    assert parcels([0], [0, 1]) == [(0, (1,))]
    assert parcels([1, 0], [0, 2]) == [(1, (2,)), (0, ())]
    assert parcels([0, 1], [2]) == [(0, (2,))]
    assert parcels([1], [1]) == []
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert parcels([0, 1], [1, 2]) == [(0, (2,)), (1, ())]


@pytest.mark.parametrize("everyone", [False, True])
def test_a_block_reaches_five_processes_in_three_rounds(everyone):
    """Who has it sends it on. The devices stand for processes."""
    processes = jax.sharding.Mesh(np.array(jax.devices()), ("process",), axis_types=(jax.sharding.AxisType.Auto,))
    program, doors = _sending(processes, 2, (0, 5, 6, 7, 1), everyone=everyone)
    numbers = [device.id for device in doors.devices.flat]
    assert numbers == ([*range(8)] if everyone else [2, 0, 5, 6, 7, 1])
    x = jax.device_put(np.array(numbers, np.uint32), jax.NamedSharding(doors, P("process")))
    assert program(x).tolist() == [number if number in (3, 4) else 2 for number in numbers]
    assert len(collectives_in(program.lower(x).compile())) == 3


def test_blocks_of_all_shapes_travel_as_few_numbers_of_words():
    shapes = [(rows, columns, size) for rows in range(1, 600) for columns in (1, 7, 300) for size in (1, 2, 4, 8)]
    counts = {word_count(((0, rows), (0, columns)), size): rows * columns * size for rows, columns, size in shapes}
    assert sorted(counts) == [2**power for power in range(8, 20)]
    assert [word_count(((0, many),), 1) for many in (1024, 1025, 2048, 2049)] == [256, 512, 512, 1024]
    for rows, columns, size in shapes:
        assert 4 * word_count(((0, rows), (0, columns)), size) >= rows * columns * size


# -- what is asked of one of several processes, in one --


def process(monkeypatch, number, count=2):
    monkeypatch.setattr(jax, "process_index", lambda: number)
    monkeypatch.setattr(jax, "process_count", lambda: count)


def line_of(count):
    return jax.sharding.Mesh(np.array(jax.devices()[:count]), ("process",), axis_types=(jax.sharding.AxisType.Auto,))


CARRIED = {  # by process: what it takes, sends and keeps of three blocks of 0 for 1 and 2, one that stays with 1, two of 2 for 0
    0: ["take 0", "send 0", "wait 1", "keep 0: 0", "send -", "wait 1", "keep 4: from 2",
        "take 1", "send 1", "wait 2", "keep 1: 1", "send -", "wait 3", "keep 5: from 2",
        "take 2", "send 2", "wait 4", "keep 2: 2"],
    1: ["send -", "wait 1", "keep 0: from 0", "take 3", "keep 3: 3",
        "send -", "wait 1", "keep 1: from 0", "send -", "wait 2", "keep 2: from 0"],
    2: ["send -", "wait 1", "keep 0: from 0", "take 4", "send 4", "wait 1", "keep 4: 4",
        "send -", "wait 2", "keep 1: from 0", "take 5", "send 5", "wait 3", "keep 5: 5",
        "send -", "wait 4", "keep 2: from 0"],
    3: [],
    "everyone": ["send -", "wait 1", "send -", "wait 1", "send -", "wait 2", "send -", "wait 3", "send -", "wait 4"],
}  # fmt: skip


@pytest.mark.parametrize("me", CARRIED)
def test_each_process_sends_and_keeps_what_is_its_own_and_at_most_two_blocks_are_going(monkeypatch, me):
    monkeypatch.setattr(boxes, "BLOCK", 4)
    process(monkeypatch, 3 if me == "everyone" else me)
    monkeypatch.setattr(p2p, "EVERYONE", ("cpu",) if me == "everyone" else ())
    done, sent, nothing = [], [], []

    def sending(_, source, targets, everyone):
        assert (source, targets) in ((0, (1, 2)), (2, (0,))) and everyone == (me == "everyone")

        def program(words):
            assert len(words) == 256
            done.append(f"send {'-' if isinstance(words, jax.Array) else words[0]}")
            nothing.extend([words] if isinstance(words, jax.Array) else [])
            sent.append(source)
            of = len(sent)
            wait = lambda: done.append(f"wait {of}")
            return SimpleNamespace(addressable_data=[f"from {source}"].__getitem__, block_until_ready=wait)

        return program, None

    def take(block):
        ((begin, _),) = block
        done.append(f"take {begin}")
        return np.full(256, begin)

    def keep(block, words):
        done.append(f"keep {block[0][0]}: {words if isinstance(words, str) else words[0]}")

    monkeypatch.setattr(p2p, "_sending", sending)
    monkeypatch.setattr(p2p, "_at_doors", lambda words, _: words)
    parcels = Parcel(((0, 3),), 0, (1, 2)), Parcel(((3, 4),), 1, ()), Parcel(((4, 6),), 2, (0,))
    carry(parcels, doors_of("cpu"), 4, take, keep)
    assert done == CARRIED[me]
    assert len({id(each) for each in nothing}) <= 1  # who has nothing to send makes that once


def test_what_a_process_sends_lies_on_its_door():
    words = _at_doors(np.arange(3, dtype=np.uint32), doors_of("cpu"))
    assert words.tolist() == [0, 1, 2] and words.sharding.mesh == doors_of("cpu")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_each_process_says_is_told_to_all(monkeypatch, count):
    line, call = line_of(count), {"call": "mine"}
    others = [{"call": f"of {number}"} for number in range(1, count)]

    def at_doors(mine, doors):
        assert len(mine) == 4096
        notes = [mine, *(np.frombuffer(json.dumps(each).encode().ljust(4096), np.uint8) for each in others)]
        return jax.device_put(np.concatenate(notes), jax.NamedSharding(doors, P("process")))

    monkeypatch.setattr(p2p, "_at_doors", at_doors)
    told = tell(line, call)
    assert told == [call, *others] and (told[0] is call) == (count == 1)


X4, ON_HALF = "float32[4] on devices 0 to 7", "float32[4] on devices 0 to 3"
SAME = "; call it with the same arrays in the same order on every process"


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([(X4, "", False)], True),
        ([(X4, "", False), (X4, "", False)], True),
        ([(X4, "", True), (X4, "", False)], True),
        ([(X4, "", True), (ON_HALF, "", True)], False),
        ([(X4, "root=0", True), (ON_HALF, "root=0", True), (X4, "root=1", True)],
         f"process 2 called it with {X4}, root=1, but process 0 with {X4}, root=0"),
        ([(X4, "", False), (X4, "", False), (ON_HALF, "", True)], f"process 2 called it with {ON_HALF}, but process 0 with {X4}"),
        ([(ON_HALF, "", False), (X4, "", False)], f"process 1 called it with {X4}, but process 0 with {ON_HALF}"),
    ],
)  # fmt: skip
def test_whether_an_array_is_one_of_all_processes(monkeypatch, calls, said):
    told = [{"call": [what, to], "own": own} for what, to, own in calls]
    asked = []
    monkeypatch.setattr(p2p, "tell", lambda _, call: asked.append(call) or told)
    x = jax.device_put(np.ones(4, np.float32), jax.NamedSharding(line_of(4), P("process")))
    doors = line_of(len(calls))
    if isinstance(said, bool):
        assert is_shared("it", x, "", doors) is said
        assert asked == ([{"call": (ON_HALF, ""), "own": True}] if doors.size > 1 else [])  # of one, nobody
        return
    with pytest.raises(JShardError) as raised:
        is_shared("it", x, "", doors)
    assert str(raised.value) == said + SAME


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1, "there is one process; use 0"),
        (2, "there are 2 processes; use 0 to 1"),
        (3, "there are 3 processes; use 0 to 2"),
    ],
)
def test_a_root_that_is_not_there_is_refused(monkeypatch, count, said):
    process(monkeypatch, 0, count)
    with pytest.raises(JShardError) as raised:
        jshard.gather(np.ones(2), root=count)
    assert str(raised.value) == f"jshard.gather names root {count}, but {said}"


@pytest.mark.parametrize("root", [None, 0])
def test_what_each_process_has_for_itself_is_sent_to_nobody(monkeypatch, root):
    process(monkeypatch, 0)
    asked = []
    monkeypatch.setattr(gathering, "is_shared", lambda *call: asked.append(call[2]))
    assert jshard.gather(jnp.arange(3), root=root).tolist() == [0, 1, 2]
    assert asked == ["" if root is None else "root=0"]


@pytest.mark.parametrize(
    ("shared", "expected"), [(True, Parcel(((0, 4),), 1, (0,))), (False, Parcel(((0, 4),), 0, ()))]
)
def test_what_all_have_is_moved_from_where_it_is_and_what_each_has_from_itself(monkeypatch, shared, expected):
    """The devices stand for processes."""
    carried = []
    monkeypatch.setattr(transfer, "is_shared", lambda *_: shared)
    monkeypatch.setattr(transfer, "holders", lambda found: {box: (each.id,) for each, box in found.items()})
    monkeypatch.setattr(transfer, "carry", lambda parcels, *_: carried.extend(parcels))
    monkeypatch.setattr(transfer.Filling, "finished", lambda _: "all")
    one, other = jax.devices()[:2]
    x = jax.device_put(np.ones(4, np.float32), other)
    assert transfer.transfer(x, jax.sharding.SingleDeviceSharding(one)) == "all"
    assert carried == [expected]


ARRAY, EMPTY, NUMBER = ({"shape": shape, "dtype": "float32"} for shape in ([4], [0], []))
FAULT = {"fault": "jshard.scatter was given words", "hint": "give it numbers"}


def agreed(monkeypatch, gave, root=0, calls=None, method="scatter"):
    """What processes agree on, of which this is the first."""

    def told(_, mine):
        said = [mine["call"], *(calls or [mine["call"]] * (len(gave) - 1))]
        return [{"call": call, "gave": each} for call, each in zip(said, gave, strict=True)]

    process(monkeypatch, 0, len(gave))
    monkeypatch.setattr(scattering, "tell", told)
    layout = jshard.Layout(jax.make_mesh((4,), ("a",)), "a")
    try:
        return scattering._agreed(None, layout, root, method, line_of(len(gave)))[1:]
    except JShardError as error:
        return str(error)


@pytest.mark.parametrize("gave", [(None, ARRAY, None), (EMPTY, ARRAY, EMPTY)])
def test_processes_agree_on_what_the_root_gives(monkeypatch, gave):
    assert agreed(monkeypatch, gave, root=1) == ((4,), np.float32)


@pytest.mark.parametrize("gave", [(None, None), (None, None, ARRAY)])
def test_a_root_that_gives_nothing_is_told_what_to_write(monkeypatch, gave):
    assert agreed(monkeypatch, gave) == (
        "process 0 is the root of jshard.scatter and gave no array; "
        "write jshard.scatter(x if jax.process_index() == 0 else None, layout, root=0)"
    )


@pytest.mark.parametrize("given", [ARRAY, NUMBER, FAULT])
@pytest.mark.parametrize("number", [0, 2])
def test_an_array_of_another_process_than_the_root_is_refused(monkeypatch, number, given):
    gave = [None, ARRAY, None]
    gave[number] = given
    assert agreed(monkeypatch, gave, root=1) == (
        f"process {number} gave jshard.scatter an array, but its root is process 1; "
        "write jshard.scatter(x if jax.process_index() == 1 else None, layout, root=1)"
    )


def test_what_the_root_can_not_hand_out_is_told_to_all(monkeypatch):
    assert agreed(monkeypatch, (None, FAULT), root=1) == "jshard.scatter was given words; give it numbers"


@pytest.mark.parametrize("other", ["another", "Another", "xanother"])
def test_calls_that_differ_are_told_in_a_few_words(monkeypatch, other):
    method = "x" * 2000
    mine = f'Layout([a] on {{a: 4}}) of devices 0 to 3, root=0, method="{method}'[:1000]
    assert agreed(monkeypatch, (ARRAY, None), calls=[other], method=method) == (
        f"process 1 called jshard.scatter with {other}, but process 0 with {mine}; call it alike on every process"
    )


@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("me", [0, 1])
def test_a_broadcast_is_of_the_bits_of_the_root(mesh, monkeypatch, me, root):
    whole, sent = np.arange(-5, 5, dtype=np.int8), []
    bits = np.pad(whole.view(np.uint8), (0, 2)).view(np.uint32)

    def broadcast(mine, *, is_source):
        sent.append((mine.tolist(), is_source))
        return bits

    process(monkeypatch, me)
    gave = [{"shape": [10], "dtype": "int8"} if number == root else None for number in (0, 1)]
    monkeypatch.setattr(scattering, "tell", lambda _, mine: [{"call": mine["call"], "gave": each} for each in gave])
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", broadcast)
    y = jshard.scatter(whole if me == root else None, jshard.Layout(mesh(a=2), "a"), root=root, method="broadcast")
    assert y.tolist() == whole.tolist()
    assert sent == [(bits.tolist() if me == root else [0, 0, 0], me == root)]


def test_a_scatter_broadcasts_nothing(mesh, monkeypatch):
    monkeypatch.delattr(multihost_utils, "broadcast_one_to_all")
    assert jshard.scatter([1, 2], jshard.Layout(mesh(a=2), "a")).tolist() == [1, 2]


# -- how a part is read and written --


@pytest.mark.parametrize(("name", "held"), [("int8", "int8"), ("float32", "float32"), ("bfloat16", "uint16")])
def test_only_narrow_floats_are_written_as_bits(mesh, name, held):
    filling = shard_buffers.Filling(jax.NamedSharding(mesh(a=1), P()), (2,), name)
    filling.put(((0, 2),), np.zeros(256, np.uint32))
    assert [part.dtype for part in filling.parts.values()] == [held]
    assert filling.finished().dtype == name


def test_a_block_is_read_by_one_program_and_written_by_one_in_its_place():
    x, words = jnp.zeros((4, 4)), jnp.zeros(256, np.uint32)
    block = ((0, 2), (1, 4))
    read = jax.make_jaxpr(lambda part: shard_buffers._cut(part, (0, 1), (2, 3), 256))(x)
    assert [each.params["name"] for each in read.eqns] == ["_cut"] and read.out_avals[0].shape == (256,)
    assert shard_buffers.taking(x)(block).shape == (256,)
    (written,) = jax.make_jaxpr(lambda part, words: shard_buffers._written(part, words, (0, 1), (2, 3)))(x, words).eqns
    assert (written.params["name"], written.params["donated_invars"]) == ("_written", (True, False, False, False))
    (last,) = jax.make_jaxpr(lambda bits: shard_buffers._as_numbers(bits, np.dtype(np.float32)))(words).eqns
    assert last.params["name"] == "_as_numbers"


# -- gradients: each other's, in one process --


@pytest.mark.quick("both-True", "columns-True", "replicated-True", "rows-True")
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_scatter_and_gather_are_each_others_gradients(mesh, name, jit):
    grid = mesh(a=2, b=2)
    layout = jshard.Layout(grid, *LAYOUTS[name])
    x, w = (np.random.default_rng(seed).integers(-8, 8, (8, 16)).astype(np.float32) for seed in (0, 1))
    weights, laid = jshard.scatter(w, layout), jshard.scatter(x, layout)
    transform = jax.jit if jit else lambda f: f
    with jax.set_mesh(grid):
        to = transform(jax.grad(lambda x, w: jnp.sum(jshard.scatter(x, layout) ** 2 * w)))(jnp.asarray(x), weights)
        back = transform(jax.grad(lambda y: jnp.sum(jshard.gather(y) ** 2 * w)))(laid)
    np.testing.assert_array_equal(to, 2 * x * w)
    np.testing.assert_array_equal(back, 2 * x * w)
    assert back.sharding.is_equivalent_to(layout.sharding, 2)


def test_a_gradient_lies_where_its_array_does(mesh):
    layout, there = jshard.Layout(mesh(a=2), "a"), jax.devices()[3]
    gradient = jax.grad(lambda x: jshard.scatter(x, layout).sum())
    with jax.set_mesh(layout.mesh):
        assert gradient(jax.device_put(np.ones(4, np.float32), there)).devices() == {there}
        assert isinstance(gradient(np.ones(4, np.float32)), np.ndarray)


def test_a_gradient_is_empty_where_no_root_is(mesh, monkeypatch):
    monkeypatch.setattr(scattering, "gather", lambda x, root: None if root else x)
    (gradient,) = scattering._bwd(1, None, jnp.ones(3, jnp.bfloat16))
    assert (gradient.shape, gradient.dtype) == ((0,), jnp.bfloat16)


# -- send and receive --


def laid_out(mesh, numbers):
    return jshard.scatter(np.array(numbers, np.float32), jshard.Layout(mesh, "a"))


def sent(mesh, source, target):
    return jax.shard_map(
        lambda x: jshard.collectives.send_recv(x, source=source, target=target, axis="a"),
        mesh=mesh, in_specs=P("a"), out_specs=P("a"),
    )  # fmt: skip


def test_send_recv_puts_what_one_has_on_another_by_one_permute(mesh):
    line = mesh(a=4)
    x = laid_out(line, range(1, 17))
    f = jax.jit(sent(line, 0, 1))
    assert [shard.data.tolist() for shard in f(x).addressable_shards] == [
        [1, 2, 3, 4], [1, 2, 3, 4], [9, 10, 11, 12], [13, 14, 15, 16],
    ]  # fmt: skip
    (one,) = collectives_in(f.lower(x).compile())
    assert (one.collective, one.payloads) == ("permute", (16,))
    (asked,) = jshard.explain(f, x, backward=False).lines
    assert (asked.collective, asked.wire) == ("permute", 16)


def test_send_recv_sends_the_gradient_the_other_way(mesh):
    line = mesh(a=4)
    x = laid_out(line, [0, 1, 2, 3])
    w = laid_out(line, [1, 10, 100, 1000])
    gradient = jax.jit(jax.grad(lambda x, w: jnp.sum(sent(line, 2, 0)(x) * w)))(x, w)
    np.testing.assert_array_equal(gradient, [0, 10, 101, 1000])


def test_send_recv_to_itself_moves_nothing(mesh):
    line = mesh(a=4)
    assert collectives_in(jax.jit(sent(line, 1, 1)).lower(laid_out(line, [0, 1, 2, 3])).compile()) == []


def test_send_recv_refuses_who_is_not_there(mesh):
    line = mesh(a=4)
    for source, target, sentence in (
        (4, 0, 'send_recv names source 4 over mesh axis "a" of size 4; use 0 to 3'),
        (0, -1, 'send_recv names target -1 over mesh axis "a" of size 4; use 0 to 3'),
    ):
        with pytest.raises(JShardError) as raised:
            sent(line, source, target)(laid_out(line, [0, 1, 2, 3]))
        assert str(raised.value) == sentence


# -- what one process is told --


def test_scatter_refuses_what_it_can_not_hand_out(mesh):
    layout = jshard.Layout(mesh(a=4), "a")
    for x, options, sentence in (
        (None, {}, "process 0 is the root of jshard.scatter and gave no array; give it one"),
        (np.zeros(4, ">f4"), {}, "jshard.scatter was given an array of >f4, which it can't scatter; "
         "give it numbers, for instance x.astype(np.float32)"),
        (np.zeros(4, jnp.int4), {}, "jshard.scatter was given an array of int4, which it can't scatter; "
         "give it numbers, for instance x.astype(np.float32)"),
        (np.zeros(4, "f4,i4"), {}, "jshard.scatter was given an array of [('f0', '<f4'), ('f1', '<i4')], which it can't "
         "scatter; give it numbers, for instance x.astype(np.float32)"),
        ([[1], [1, 2]], {}, "jshard.scatter was given an array of object, which it can't scatter; "
         "give it numbers, for instance x.astype(np.float32)"),
        (np.zeros(4, np.longdouble), {}, f"jshard.scatter was given an array of {np.dtype(np.longdouble)}, which it can't "
         "scatter; give it numbers, for instance x.astype(np.float32)"),
        (np.zeros(4, "f4," * 40), {}, f"jshard.scatter was given an array of {str(np.dtype('f4,' * 40))[:200]}, which it "
         "can't scatter; give it numbers, for instance x.astype(np.float32)"),
        (np.zeros(4), {}, "jshard.scatter was given float64, which JAX holds only with JAX_ENABLE_X64=1; "
         "give it x.astype(np.float32)"),
        (np.zeros(4, np.float32), {"root": 1}, "jshard.scatter names root 1, but there is one process; use 0"),
        (np.zeros(4, np.float32), {"method": "x"}, 'jshard.scatter has no method "x"; use "scatter" or "broadcast"'),
    ):  # fmt: skip
        with pytest.raises(JShardError) as raised:
            jshard.scatter(x, layout, **options)
        assert str(raised.value) == sentence


def test_gather_refuses_what_the_host_can_not_hold():
    for x, sentence in (
        ({"w": 1}, "jshard.gather takes an array, a list of numbers or a number, and was given a dict; "
         "use jax.tree.map to give it each array of a tree by itself"),
        (jax.random.key(0), "jshard.gather was given random keys, which the host can't hold; "
         "use jshard.gather(jax.random.key_data(x))"),
    ):  # fmt: skip
        with pytest.raises(JShardError) as raised:
            jshard.gather(x)
        assert str(raised.value) == sentence

"""Batches: their order, what becomes of the last, whose rows a process reads, reading ahead, and going on from a position."""

from __future__ import annotations

import itertools
import json
import threading
import time
import traceback
from pathlib import Path

import jax
import numpy as np
import pytest

from jshard.cli import main
from jshard.errors import JShardError
from jshard.signals.config import load_configuration
from jshard.training.data.batches import Placement, read_ahead, source
from jshard.training.data.sources import Examples, Indexed, Shuffled, Stream, own_position
from jshard.training.experiments.loop import run
from tests.support.processes import run as run_processes

TEN = Examples(np.arange(10.0), np.arange(10))
ROOT = Path(__file__).parents[3]


def shuffled(examples=TEN, batch=4, seed=0, **how) -> Shuffled:
    return Shuffled("the data", examples, batch, seed, **how)


def drawn(source, count, position=None, rows=lambda size: np.arange(size)):
    """The targets of so many batches, and the position behind the last, as JSON would hand it back."""
    read = list(itertools.islice(source.read(position, rows), count))
    return [each.y.tolist() for each in read], json.loads(json.dumps(read[-1].position))


class Pairs:
    """Examples that are read one by one, and which were."""

    def __init__(self, count=10):
        self.count, self.read = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        self.read.append(number)
        return {"ids": np.full(3, number), "mask": np.ones(3, bool)}, np.int32(number)


# -- examples that can be chosen --


def test_batches_are_the_same_for_the_same_seed_and_others_for_another():
    first, again, other = (drawn(shuffled(seed=seed), 6)[0] for seed in (1, 1, 2))
    assert first == again != other


def test_batches_pass_over_the_data_without_repeats_and_in_another_order_each_time():
    batches, _ = drawn(shuffled(), 4)
    for two in (batches[:2], batches[2:]):
        assert len(set(itertools.chain(*two))) == 8
    assert batches[:2] != batches[2:]


def test_batches_that_are_not_shuffled_come_in_order():
    assert drawn(shuffled(shuffle=False), 3)[0] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("last", "sizes"), [("drop", [4, 4, 4, 4, 4]), ("fill", [4, 4, 4, 4, 4]), ("keep", [4, 4, 2, 4, 4])]
)
def test_last_batch_is_dropped_filled_or_kept(last, sizes):
    batches, _ = drawn(shuffled(last=last), 5)
    assert [len(batch) for batch in batches] == sizes
    if last != "drop":  # every example once before any comes again
        assert sorted(list(itertools.chain(*batches))[:10]) == list(range(10))


@pytest.mark.parametrize("last", ["drop", "fill", "keep"])
@pytest.mark.parametrize("examples", [TEN, Indexed("the data", Pairs())], ids=["arrays", "one by one"])
def test_shuffled_goes_on_from_a_position_as_if_it_had_never_stopped(examples, last):
    whole, _ = drawn(shuffled(examples, last=last), 9)
    for stop in range(1, 8):
        before, position = drawn(shuffled(examples, last=last), stop)
        after, _ = drawn(shuffled(examples, last=last), 9 - stop, position)
        assert before + after == whole


def test_shuffled_refuses_a_position_in_other_data():
    _, position = drawn(shuffled(), 1)
    with pytest.raises(JShardError) as told:
        drawn(shuffled(Examples(np.arange(12.0), np.arange(12))), 1, position)
    assert str(told.value) == (
        "the data returns 12 examples, and returned 10 when the checkpoint was saved; return the same examples, or train from the start with another output"
    )


def test_indexed_reads_only_the_rows_of_this_process_and_stacks_trees():
    pairs = Pairs()
    whole, _ = drawn(shuffled(), 1)
    read = next(shuffled(Indexed("the data", pairs)).read(None, lambda size: np.array([1, 2])))
    assert read.y.tolist() == pairs.read == whole[0][1:3]
    assert read.size == 4
    assert read.x["ids"].shape == read.x["mask"].shape == (2, 3)


# -- where the rows go --


def placement(mesh, row, **sizes) -> Placement:
    configuration = load_configuration({"jshard": {"mesh": sizes}, "a": {"row": row}})
    return Placement(mesh(**sizes), configuration.signals)


def test_placement_takes_trees_and_each_process_its_rows(mesh):
    where = placement(mesh, "data", data=2, tensor=4)
    assert where.rows(8).tolist() == list(range(8))  # one process has them all
    (x,) = where.place(8, {"a": np.arange(8), "b": np.zeros((8, 3))})
    assert x["a"].addressable_shards[0].data.shape == (4,)
    assert x["b"].addressable_shards[0].data.shape == (4, 3)


@pytest.mark.slow
def test_each_of_two_processes_reads_the_rows_of_its_place_on_the_mesh_and_no_others():
    for each in run_processes(ROOT / "tests/support/train_in_processes.py", 2, devices=2, timeout=120):
        assert each.stdout.splitlines() == [
            "{'data': 2, 'tensor': 2} 2",
            "{'tensor': 2, 'data': 2} 4",
            "{'tensor': 4} 2",
            "streams go on",
        ]


def test_stream_of_another_number_of_processes_is_told():
    with pytest.raises(JShardError) as told:
        own_position({"batches": 3, "states": [1, 2]}, "the checkpoint of step 3 (run/checkpoints/3)")
    assert str(told.value) == (
        "the checkpoint of step 3 (run/checkpoints/3) was saved by 2 processes, each with its own position in its own "
        "data, and this run has 1; start 2 processes, or read the data by number: docs/checkpoints.md"
    )


# -- streams --


class Stated:
    """An iterator that knows where it is, as grain's do."""

    def __init__(self, packed):
        self.at, self.packed = 0, packed

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return np.full((4, 2), self.at), np.full(4, self.at)

    def get_state(self):
        return str(self.at).encode() if self.packed else {"at": self.at}

    def set_state(self, state):
        self.at = int(state) if self.packed else state["at"]


def numbered(count=5):
    return [(np.full((4, 2), n), np.full(4, n)) for n in range(count)]


@pytest.mark.parametrize(
    "batches",
    [numbered, lambda: lambda: iter(numbered()), lambda: Stated(packed=False), lambda: Stated(packed=True)],
    ids=["list", "function", "state", "state in bytes"],
)
def test_stream_goes_on_from_a_position_as_if_it_had_never_stopped(batches):
    whole, _ = drawn(Stream("the data", batches(), 4), 7)
    for stop in range(1, 7):
        stream = Stream("the data", batches(), 4)
        stream.example(), stream.first()  # looking at it uses nothing up
        before, position = drawn(stream, stop)
        resumed = Stream("the data", batches(), 4)
        resumed.example()
        after, _ = drawn(resumed, 7 - stop, position)
        assert before + after == whole


def test_stream_keeps_the_rows_of_this_process_or_takes_what_is_its_own():
    own = [(x[:2], y[:2]) for x, y in numbered()]
    for batches in (numbered(), own):
        read = next(Stream("the data", batches, 4).read(None, lambda size: np.array([2, 3])))
        assert (read.y.tolist(), read.size) == ([0, 0], 4)


@pytest.mark.parametrize(
    ("batches", "sentence"),
    [
        (iter(numbered(2)), "the data ends after 2 batches and can't be read again; use steps=2, or return a function that makes a new iterator"),
        ([], "the data ends after 0 batches and can't be read again; give at least one"),
        ([np.zeros(4)], "the data gives a ndarray and not a pair (x, y); give (x, y)"),
        ([(np.zeros((4, 2)), np.zeros(3))], "the data gives a batch of arrays (4, 2), (3,); give all arrays the same number of rows"),
        ([(np.zeros(3), np.zeros(3))], "the data gives batch 1 with 3 rows, but jshard.train.batch is 4; write batch: 3, or give 4"),
    ],
    ids=["over", "empty", "no pair", "unequal", "rows"],
)  # fmt: skip
def test_stream_of_another_form_is_told(batches, sentence):
    with pytest.raises(JShardError) as told:
        drawn(Stream("the data", batches, 4), 3)
    assert str(told.value) == sentence


@pytest.mark.parametrize(
    ("train", "how", "sentence"),
    [
        (numbered, {"shuffle": True}, 'the data "train" has its own order, which shuffle can\'t change; remove shuffle'),
        (numbered, {"last": "fill"}, 'the data "train" has its own order, which last can\'t change; remove last'),
        (Pairs(0), {}, 'the data "train" is empty; return at least one example'),
        (3, {}, 'the data returns no pair of arrays named "train"; return {"train": (x, y), "test": (x, y)}'),
    ],
    ids=["shuffle", "last", "empty", "number"],
)  # fmt: skip
def test_source_of_another_form_is_told(train, how, sentence):
    with pytest.raises(JShardError) as told:
        source("the data", {"train": train}, batch=4, seed=0, **({"shuffle": None, "last": None} | how))
    assert str(told.value) == sentence


# -- reading ahead --


@pytest.mark.parametrize("ahead", [0, 2])
def test_reading_ahead_hides_the_time_of_the_producer_behind_the_step(ahead):
    turn, made, during = threading.Condition(), 0, []

    class Counted:
        def read(self, position, rows):
            nonlocal made
            for read in shuffled().read(position, rows):
                with turn:
                    made += 1
                    turn.notify()
                yield read

    def step(x, y):
        """Ends when the batch behind its own is there; without reading ahead that one is made after it."""
        with turn:
            during.append(turn.wait_for(lambda: made > len(during) + 1, 30 if ahead and len(during) < 29 else 0.01))
        return np.float32(0)

    for _ in run(step, Counted(), Placement(None, {}), steps=30, ahead=ahead):
        assert during[-1] == (ahead > 0 and len(during) < 30)  # behind the last there is none
    assert len(during) == 30


def test_reading_ahead_reads_no_further_than_it_should_and_stops():
    made = []
    with read_ahead((made.append(n) or n for n in itertools.count()), 2) as values:
        assert next(values) == 0
        time.sleep(0.1)
        assert len(made) <= 4
    so_far = len(made)
    time.sleep(0.05)
    assert len(made) <= so_far + 1


def broken():
    yield from numbered(2)
    raise LookupError("no such shard")


@pytest.mark.parametrize("ahead", [0, 2])
def test_fault_of_the_producer_arrives_with_its_own_traceback(ahead):
    with pytest.raises(JShardError) as told:
        for _ in run(
            lambda x, y: np.float32(0), Stream("the data", broken, 4), Placement(None, {}), steps=9, ahead=ahead
        ):
            pass
    line = broken.__code__.co_firstlineno + 2
    here = f"{Path(__file__).relative_to(Path.cwd())}:{line}"
    assert str(told.value) == f"{here} (in broken) fails while data is read: LookupError: no such shard; fix {here}"
    frames = traceback.extract_tb(told.value.__cause__.__traceback__)
    assert (frames[-1].name, frames[-1].lineno) == ("broken", line)


# -- by YAML --

DATA = """
import numpy as np

X, Y = np.array([[0, 0], [0, 1], [1, 0], [1, 1], [0, 0], [0, 1]], np.float32), np.array([0, 1, 1, 0, 0, 1], np.int32)

class Pairs:
    def __len__(self): return len(X)
    def __getitem__(self, n): return X[n], Y[n]

def arrays(shuffle=False): return {"train": (X, Y), "test": (X, Y)}
def pairs(): return {"train": Pairs(), "test": (X, Y)}
def asking(rows): assert rows.tolist() == [0, 1, 2, 3]; return arrays()
def stream(): return {"train": lambda: iter([(X[:4], Y[:4])]), "test": (X, Y)}
"""


@pytest.fixture
def lossy(tmp_path, monkeypatch, capsys):
    """`lossy("data=mine:pairs")`: the losses of six steps of XOR, or the sentence."""
    (tmp_path / "mine.py").write_text(DATA)
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(tmp_path)

    def losses(*words):
        code = main(["train", "configs/xor.yaml", "steps=6", "log.every=1", f"output={tmp_path / 'run'}", *words])
        if code:
            return capsys.readouterr().err.strip()
        lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    return losses


@pytest.mark.slow
def test_data_of_every_kind_trains_and_reading_ahead_changes_no_number(lossy):
    arrays = lossy("data=mine:arrays")
    assert len(arrays) == 6
    assert lossy("data.path=mine:pairs", "data.ahead=0") == arrays
    assert len(lossy("data=mine:stream")) == 6
    assert lossy("data=mine:asking", "steps=1") == arrays[:1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["data.path=mine:arrays", "data.shuffle=true"],
            'jshard.train.data (configs/xor.yaml:8) is "mine:arrays", which has an argument "shuffle", but shuffle under data '
            "is a setting of jshard; give the argument of mine:arrays another name",
        ),
        (
            ["data.path=mine:pairs", "data.last=keep", "jshard.mesh={data: 4, tensor: 1}", "layer1.row=data"],
            "jshard.train.data.last (the command line) is keep, and the last batch has 2 of 6 examples, which can't be "
            "split in 4; write last: drop or last: fill",
        ),
        (
            ["data.path=mine:pairs", "batch=8"],
            "jshard.train.batch (the command line) is 8, but there are 6 examples; use 6 or fewer",
        ),
    ],
)
def test_data_that_can_not_be_read_so_is_told(lossy, words, sentence):
    assert lossy(*words).splitlines()[-1] == sentence


# -- grain --


def test_grain_comes_through_the_same_door(extra):
    grain = extra("grain")
    numbers = grain.MapDataset.source(np.arange(12)).map(lambda n: (np.full(2, n), n))
    by_number, _ = drawn(shuffled(Indexed("grain", numbers)), 3)
    assert by_number == drawn(shuffled(Examples(np.zeros(12), np.arange(12))), 3)[0]

    def batches():
        return numbers.seed(1).shuffle().repeat().to_iter_dataset().batch(4)

    def stream():
        return Stream("grain", batches(), 4)

    whole, _ = drawn(stream(), 7)
    before, position = drawn(stream(), 3)
    assert "state" in position
    after, _ = drawn(stream(), 4, position)
    assert before + after == whole
    assert jax.tree.leaves(next(stream().read()).x)[0].shape == (4, 2)

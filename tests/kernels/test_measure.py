"""jshard bench kernels: what it prints, what it never claims, and the self-test on one process and on two."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jshard.cli import bench
from jshard.errors import JShardError
from jshard.kernels import measure
from jshard.kernels.chip import CHIPS

ROOT = Path(__file__).parents[2]


def test_bench_times_xla_only_where_kernels_could_but_be_interpreted(capsys, tmp_path):
    table = tmp_path / "bench.csv"
    assert bench.bench(["4KiB", "8KiB"], devices=4, repeats=2, csv_file=str(table)) == 0
    out = capsys.readouterr().out
    assert "pretend devices of a CPU: only XLA's own are timed, and the times don't apply to an accelerator" in out
    with table.open() as file:
        read = list(csv.DictReader(file))
    assert [(row["op"], row["algorithm"], row["payload"]) for row in read] == [
        (op, algorithm, size)
        for op, algorithms in (
            ("all_reduce", ["permute", "xla"]),
            ("reduce_scatter", ["permute", "xla"]),
            ("all_gather", ["permute", "xla"]),
        )
        for size in ("4096", "8192")
        for algorithm in algorithms
    ]
    assert all(float(row["low_us"]) <= float(row["median_us"]) <= float(row["high_us"]) for row in read)


@pytest.mark.parametrize(
    ("op", "group", "chip", "words"),
    [
        ("all_reduce", 8, "cpu", ["permute", "xla"]),
        ("all_gather", 8, "cpu", ["permute", "xla"]),
        ("all_reduce", 8, "v5e", ["one_shot", "permute", "ring", "xla"]),
        ("all_reduce", 128, "v5e", ["one_shot", "permute", "xla"]),
        ("all_reduce", 8, "h200", ["permute", "xla"]),
        ("matmul", 1, "cpu", ["xla"]),
        ("matmul", 1, "a100", ["xla"]),
        *(("matmul", 1, chip, ["pallas", "xla"]) for chip in ("h100", "h200", "b200", "v5e")),
    ],
)
def test_algorithms_at_hand_are_those_that_compile_there(op, group, chip, words):
    assert measure.algorithms_at_hand(op, group, CHIPS[chip]) == words


@pytest.mark.seconds
def test_product_is_timed_by_xla_only_where_its_kernel_could_but_be_interpreted(capsys, tmp_path):
    table = tmp_path / "bench.csv"
    assert bench.bench(sides=[8, 16], repeats=2, csv_file=str(table)) == 0
    out = capsys.readouterr().out
    assert f"cpu, jax {jax.__version__}; products of bfloat16; 2 calls of each in turn" in out
    assert "pretend devices of a CPU: only XLA's own are timed, and the times don't apply to an accelerator" in out
    with table.open() as file:
        read = list(csv.DictReader(file))
    assert [(row["op"], row["algorithm"], row["side"]) for row in read] == [
        ("matmul", "xla", "8"),
        ("matmul", "xla", "16"),
    ]


def test_bandwidth_counts_what_must_travel():
    timings = measure.measure(jax.make_mesh((4,), ("t",)), [1_000_000], repeats=1)
    found = {timing.op: timing.done for timing in timings if timing.algorithm == "xla"}
    assert found == {"all_reduce": 1_500_000, "reduce_scatter": 750_000, "all_gather": 750_000}
    timing = measure.Timing("all_reduce", "ring", 4, 1_000_000, 1e-3, 1e-3, 2e-3, 5, 1_500_000, 50e9)
    assert bench.rows([timing], 1e9) == [
        ("all_reduce", "ring", "4", "1000000", "1000.0", "1000.0", "2000.0", "5", "1.500", "50")
    ]
    product = measure.Timing("matmul", "xla", 1, 1000, 1e-3, 1e-3, 1e-3, 5, 2e9, 0)
    assert bench.rows([product], 1e12)[0][-2:] == ("2.000", "unknown")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: bench.bench(sides=[0]), "a matrix of 0 rows has nothing to multiply; use --side 1024"),
        (lambda: bench.bench(["4KB"]), '"4KB" is no size of an array; use bytes or a unit: 4096, 64KiB, 1MiB'),
    ],
)
def test_what_can_not_be_measured_is_refused(call, sentence):
    with pytest.raises(JShardError) as error:
        call()
    assert str(error.value) == sentence


@pytest.mark.slow
def test_self_test_tries_every_kernel(interpreted, capsys):
    assert bench.bench(devices=2, self_test=True) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "all_reduce by one_shot of float32[2, 7]: exact on every device (interpreted)"
    assert sum(" by permute " in line for line in lines) == 5
    assert len(lines) == 12 and lines[-1].startswith("all right on 2 x cpu, jax ")


def test_self_test_finds_a_kernel_that_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(measure, "reduce_scatter", None)
    right = measure.MOVES["reduce_scatter"]
    monkeypatch.setitem(
        measure.MOVES, "reduce_scatter", lambda x, name, algorithm: right(x, name) + (algorithm == "ring")
    )
    monkeypatch.setattr(measure, "ALGORITHMS", {"reduce_scatter": ("ring",)})
    assert bench.bench(devices=2, self_test=True) == 1
    assert "reduce_scatter by ring of float32[2, 7]: 14 numbers are WRONG (interpreted)" in capsys.readouterr().out


@pytest.mark.slow
def test_launched_self_test_joins_two_processes_of_which_the_first_speaks():
    command = [sys.executable, "-m", "jshard", "launch", "-n", "2", "bench", "kernels", "--self-test"]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        [
            *(
                f"[0] {op} by permute of float32[4, 7]: exact on every device"
                for op in ("all_reduce", "reduce_scatter", "all_gather")
            ),
            "[0] all_gather_matmul by permute of float32[8, 5]: exact on every device",
            "[0] matmul_reduce_scatter by permute of float32[8, 5]: exact on every device",
            "[0] all_reduce by xla of float32[4, 7]: exact on every device",
            f"[0] all right on 4 x cpu, jax {jax.__version__}, 2 process(es)",
        ],
    ), done.stderr

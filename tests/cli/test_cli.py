"""What a user types: every command, and the whole sentence of every mistake."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from jshard.cli import main
from jshard.errors import JShardError
from jshard.version import __version__
from tests.support.outside import users_environment

ROOT = Path(__file__).parents[2]
DIGITS = "configs/digits.yaml"
WHOLE = """\
import jax.numpy as jnp, numpy as np, jshard
from flax import nnx

class Model(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(4, 8, rngs=rngs)

    def __call__(self, x):
        with jshard.signal("layer"):
            return self.layer(x)

def data():
    both = np.ones((16, 4), np.float32), np.zeros(16, np.int32)
    return {"train": both, "test": both}
"""
OPENED = "from jshard.cli.target import Target; from jshard.cli.experiment import opened; opened(Target({!r}, {!r}))"
pytestmark = pytest.mark.usefixtures("in_the_root")


def typed(capsys, *words: str) -> tuple[int, list[str], list[str]]:
    """The exit status and the lines on stdout and stderr; the line about pretended devices is left out."""
    status = main(words)
    out, err = capsys.readouterr()
    return status, out.splitlines(), [line for line in err.splitlines() if "pretending" not in line]


def process(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = users_environment(**environment)
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=120, env=clean)


@pytest.mark.quick("words2", "words3", "words5")
@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["train", "--help"],
        ["--version"],
        ["schema"],
        ["check", "configs/mlp.yaml"],
        ["check", DIGITS, "batch=15"],
        ["schedule", "1f1b", "--stages", "2", "--microbatches", "4"],
    ],
)
@pytest.mark.usefixtures("fresh")
def test_cli_answers_without_importing_jax(words):
    program = (
        "import sys\nfrom jshard.cli import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        "print(sorted({'jax', 'flax', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = process(sys.executable, "-c", program)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


def test_cli_version_is_the_package_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"jshard {__version__}\n")


def test_cli_help_names_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    assert [name for name in ("train", "explain", "check", "verify", "schema") if f"\n    {name} " not in told] == []


def test_cli_check_says_what_each_signal_means(capsys):
    status, out, err = typed(capsys, "check", DIGITS, "--trust")
    assert (status, err) == (0, [])
    assert out == [
        "configs/digits.yaml:4   mesh {data: 2, tensor: 4} of 8 devices, explicit",
        "configs/digits.yaml:6   experiment model examples.digits:Model, data examples.digits:data, optimizer adamw, "
        "batch 64, steps 600, seed 0",
        "configs/digits.yaml:15  layer1: rows over data, columns over tensor",
        "configs/digits.yaml:16  layer2: rows over data, reduction over tensor; y is summed by an all-reduce",
        "configs/digits.yaml:17  objective: rows over data",
    ]


def test_cli_check_has_words_for_every_key(capsys, tmp_path):
    path = tmp_path / "all.yaml"
    path.write_text("""\
jshard: {mesh: {data: 2, tensor: 4}}
one: {row: [data, tensor], output: keep, dtype: {param: float32, compute: bfloat16, reduce: float32}, remat: true}
two: {column: tensor, output: gather, store: data, backward: one, compile: true}
three: {reduction: tensor, sequence: tensor, output: scatter, store: {optimizer: data}}
four: {shard: {axis: 1, workers: [0, 1]}}
five: {shard: {workers: null, replicated: true}}
six: {shard: {axis: 0, mesh: data}, expect: {all_reduce: 1, bytes: 64MiB}}
seven: {match: ["a/**", "**"]}
eight: {shard: {axis: 1, workers: [2, 3]}, backward: four, compile: true}
""")
    _, out, _ = typed(capsys, "check", str(path))  # and a sentence about `expect`, which needs an experiment
    assert [line.split("  ", 1)[1] for line in out[1:]] == [
        "one: rows over data x tensor; y stays split; kept in float32; computed in bfloat16; summed over devices in "
        "float32; activations recomputed in backward",
        "two: columns over tensor; y is gathered by an all-gather; parameters and optimizer state rest split over "
        'data; cotangents laid out as "one"; each layer compiled as one program, its backward as another',
        "three: reduction over tensor; y is summed and split by a reduce-scatter; activations between layers split by "
        "sequence over tensor; optimizer state rests split over data",
        "four: axis 1 of every array over workers 0, 1",
        "five: whole on all workers",
        "six: axis 0 of every array over mesh axis data; 1 all_reduce expected; at most 67108864 bytes on the wire",
        "seven: replicated; claims a/**, all other parameters",
        'eight: axis 1 of every array over workers 2, 3; cotangents laid out as "four"; not compiled as one program, as '
        "the backward is on other workers",
    ]


def test_cli_check_holds_what_signals_expect(capsys, tmp_path):
    text = Path(DIGITS).read_text()
    path = tmp_path / "digits.yaml"
    path.write_text(text.replace("reduction: tensor}", "reduction: tensor, expect: {all_reduce: 3, bytes: 4520}}"))
    status, out, err = typed(capsys, "check", str(path), "--trust")
    assert (status, out[-1], err) == (0, "2 of 2 expectations hold", [])
    status, _, err = typed(
        capsys, "check", str(path), "--trust", "layer2.expect.all_reduce=1", "layer2.expect.bytes=4KiB"
    )
    assert (status, err) == (
        1,
        [
            'signal "layer2" (the command line) expects 1 all_reduce, and 3 are asked for; write all_reduce: 3, or see jshard '
            "explain",
            'signal "layer2" (the command line) expects at most 4,096 bytes on the wire per device, and 4,520 are '
            "asked for; write bytes: 4520, or see jshard explain",
        ],
    )


def test_cli_check_tells_how_a_plain_layer_under_a_signal_is_split(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("whole.py").write_text(WHOLE)
    Path("whole.yaml").write_text(
        "jshard:\n  mesh: {data: 2, tensor: 4}\n  train: {model: whole:Model, data: whole:data, batch: 8, steps: 1}\n"
        "layer: {column: tensor, store: data}\n"
    )
    told = (
        "whole.yaml:4  layer  column: tensor, store: data  layer/kernel  float32[4,8]  [-, tensor]  at rest [data, tensor]  "
        "[2, 2] each  dot_general, whole.py:10"
    )
    status, out, err = typed(capsys, "check", "whole.yaml")
    assert (status, out[-1], err) == (0, told, [])
    status, out, err = typed(capsys, "explain", "whole.yaml")
    assert (status, err) == (0, []) and told in out
    assert typed(capsys, "report", "whole.yaml")[0] == 0
    assert "layer/kernel" in Path("report.html").read_text()


def test_cli_check_tells_all_faults_on_stderr(capsys, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("jshard: {mesh: {data: 2}}\na: {row: dat}\nb: {colum: data}\n")
    status, out, err = typed(capsys, "check", str(path))
    assert (status, out) == (2, [])
    assert err == [
        f'signal "a" ({path}:2) names mesh axis "dat", which is not in jshard.mesh ({path}:1: data); did you '
        'mean "data"?',
        f'signal "b" ({path}:3) has an unknown key "colum"; did you mean "column"?',
    ]


def test_cli_schema_is_json(capsys):
    status, out, _ = typed(capsys, "schema")
    assert status == 0
    assert "layer1" not in json.loads("\n".join(out))["properties"]


def test_cli_explain_prints_a_line_for_each_collective(capsys):
    status, out, err = typed(capsys, "explain", DIGITS, "--trust")
    assert (status, err) == (0, [])
    assert [line.split()[:4] for line in out[:6]] == [
        ["configs/digits.yaml:16", "layer2", "forward", "all_reduce"],
        ["configs/digits.yaml:17", "objective", "forward", "all_reduce"],
        ["configs/digits.yaml:16", "layer2", "backward", "all_reduce"],
        ["configs/digits.yaml:16", "layer2", "backward", "all_reduce"],
        ["configs/digits.yaml:15", "layer1", "backward", "all_reduce"],
        ["configs/digits.yaml:15", "layer1", "backward", "all_reduce"],
    ]
    assert out[-1].startswith("total: 6 collectives, 21,164 B on the wire per device")


def test_cli_explain_tells_memory_at_rest_by_signal(capsys):
    _, out, _ = typed(capsys, "explain", DIGITS, "--trust")
    assert [line.split() for line in out[6:9]] == [
        "configs/digits.yaml:15 layer1 at rest parameters 16,640 B gradients 16,640 B optimizer state 33,280 B 66,560 B".split(),
        "configs/digits.yaml:16 layer2 at rest parameters 2,600 B gradients 2,600 B optimizer state 5,200 B 10,400 B".split(),
        "- - at rest optimizer state 8 B 8 B".split(),
    ]
    assert out[9] == (
        "memory: 76,968 B at rest per device (parameters 19,240 B, gradients 19,240 B, optimizer state 38,488 B)"
    )


def test_cli_explain_needs_no_device_of_the_mesh(capsys):
    _, out, _ = typed(
        capsys, "explain", DIGITS, "--trust", "jshard.mesh.data=64", "jshard.mesh.tensor=256", "batch=128"
    )
    assert any(" over tensor (256) " in line for line in out)


def test_cli_explain_sums_by_signal_axis_and_line(capsys):
    _, out, _ = typed(capsys, "explain", DIGITS, "--trust", "--by", "axis")
    assert [line.split()[0] for line in out] == ["tensor", "data", "total:"]
    _, out, _ = typed(capsys, "explain", "--by", "line", DIGITS, "--trust")
    assert [line.split()[0] for line in out] == [f"{DIGITS}:{line}" for line in (16, 17, 15)] + [
        "-",
        "memory:",
        "total:",
    ]
    _, out, _ = typed(capsys, "explain", DIGITS, "--trust", "--by=signal", "steps=3")
    assert [line.split()[0] for line in out] == ["layer2", "objective", "layer1", "-", "memory:", "total:"]


@pytest.mark.quick("explain")
@pytest.mark.parametrize("words", [["explain"], ["plan", "--topology", "cpu:4"]], ids=["explain", "plan"])
def test_cli_prints_the_compiled_text_and_nothing_else(capsys, words):
    status, out, _ = typed(capsys, words[0], "configs/xor.yaml", *words[1:], "--program", "--trust")
    assert status == 0 and out[0].startswith("HloModule, ")
    assert any(" all-reduce(" in line for line in out)
    assert not any("xor.yaml" in line for line in out)


def test_cli_explain_shows_one_phase(capsys):
    words = [DIGITS, "--trust", "layer1.store={optimizer: data}", "--phase", "update"]
    _, out, _ = typed(capsys, "explain", *words)
    assert [line.split()[:5] for line in out[:-1]] == [["the", "command", "line", "layer1", "update"]] * 2
    assert out[-1].startswith("total: 2 collectives") and out[-1].endswith("(update 8,320 B)")


def test_cli_explain_prints_no_colour_into_a_pipe(capsys):
    _, out, _ = typed(capsys, "explain", DIGITS, "--trust", "unheard={row: data}")
    assert "\x1b" not in "".join(out)


def in_a_terminal(*words: str, columns: int, **environment: str) -> str:
    """What a command prints where stdout is a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(words, stdout=theirs, cwd=ROOT, env={**clean, "TERM": "xterm", **environment})
    os.close(theirs)
    read = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while part := os.read(ours, 65536):
            read += part
    assert process.wait() == 0
    return read.decode().replace("\r\n", "\n")


@pytest.mark.slow
def test_cli_explain_folds_to_the_window_and_colours_only_there():
    words = (sys.executable, "-m", "jshard", "explain", DIGITS, "--trust", "layer1.column=[]")
    seen = in_a_terminal(*words, columns=60)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", seen)
    assert max(map(len, plain.splitlines())) <= 60
    assert in_a_terminal(*words, columns=60, NO_COLOR="1") == plain


def test_cli_explain_follows_the_command_line(capsys):
    _, out, _ = typed(capsys, "explain", DIGITS, "--trust", "layer1.column=data", "layer1.row=tensor", "batch=32")
    assert any("the command line" in line for line in out)


def test_cli_explain_prints_json(capsys):
    _, out, _ = typed(capsys, "explain", "--json", DIGITS, "--trust")
    assert json.loads("\n".join(out))


SENTENCES = [
    (
        ["check", "configs/mlp.yaml", "layer1.expect.all_reduce=1"],
        'expect of signal "layer1" (the command line) needs a training step, and configs/mlp.yaml describes '
        "none; write model and data under jshard.train, or remove it",
    ),
    (
        ["check", "configs/mlp.yaml", "jshard.budget=1GiB"],
        "jshard.budget (the command line) needs a training step, and configs/mlp.yaml describes "
        "none; write model and data under jshard.train, or remove it",
    ),
    (
        ["check", "configs/mlp.yaml", "--update"],
        "the baseline configs/mlp.baseline needs a training step, and configs/mlp.yaml describes "
        "none; write model and data under jshard.train, or remove it",
    ),
    (
        ["check", DIGITS, "batch=15"],
        'jshard.train.batch (the command line) splits 15 rows over mesh axis "data" of size 2; use 14 or 16',
    ),
    (
        ["check", DIGITS, "--trust", "model=examples.digits:Modle"],
        'jshard.train.model (the command line) is "examples.digits:Modle", but examples.digits has no "Modle"; did you '
        'mean "examples.digits:Model"?',
    ),
    (
        ["check", DIGITS, "data=example.digits:data"],
        'jshard.train.data (the command line) is "example.digits:data", but there is no module "example" in this '
        "folder or among the installed packages; write example/digits.py, or start from the folder that holds it",
    ),
    (
        ["check", DIGITS, "--trust", "loss=examples.digits:lost"],
        'jshard.train.loss (the command line) is "examples.digits:lost", but examples.digits has no "lost"; define lost '
        f"in {ROOT}/examples/digits.py",
    ),
    (
        ["check", DIGITS, "optimizer=adamx"],
        'jshard.train.optimizer (the command line) is "adamx", which is no optimizer of optax; did you mean "adamax"?',
    ),
    (["train", DIGITS, "--steps", "10"], "jshard train has no option --steps; write steps=10"),
    (["train", "--lr=1e-3", DIGITS], "jshard train has no option --lr; write optimizer.learning_rate=1e-3"),
    (["trian", DIGITS], '"trian" is not a command of jshard; type: jshard train'),
    (["frobnicate"], '"frobnicate" is not a command of jshard; type: jshard --help'),
    (["check"], "jshard check needs a configuration; type: jshard check configs/digits.yaml"),
    (["check", "--fast", DIGITS], "jshard: unrecognized arguments: --fast; type: jshard --help"),
    (["check", "configs/digts.yaml"], 'configs/digts.yaml is not there; did you mean "configs/digits.yaml"?'),
    (
        ["check", DIGITS, "steps"],
        '"steps" (the command line) is not key=value; write it like steps=20 or layer1.column=tensor',
    ),
    (
        ["train", DIGITS, "model=examples.digits:Modle"],
        'jshard.train.model (the command line) is "examples.digits:Modle", but examples.digits has no "Modle"; did you '
        'mean "examples.digits:Model"?',
    ),
    (
        ["train", DIGITS, "model=examples.digits:zzz"],
        'jshard.train.model (the command line) is "examples.digits:zzz", but examples.digits has no "zzz"; define zzz '
        f"in {ROOT}/examples/digits.py",
    ),
    (
        ["train", DIGITS, "data=example.digits:data"],
        'jshard.train.data (the command line) is "example.digits:data", but there is no module "example" in this '
        "folder or among the installed packages; write example/digits.py, or start from the folder that holds it",
    ),
    (
        ["train", DIGITS, "loss=examples.digits:__doc__"],
        'jshard.train.loss (the command line) is "examples.digits:__doc__", but that is a str; name a class or a '
        "function",
    ),
    (
        ["train", DIGITS, "model.hiden=3"],
        'jshard.train.model (configs/digits.yaml:6) is "examples.digits:Model", which takes no argument "hiden"; did '
        'you mean "hidden"?',
    ),
    (
        ["train", DIGITS, "optimizer=adamx"],
        'jshard.train.optimizer (the command line) is "adamx", which is no optimizer of optax; did you mean "adamax"?',
    ),
    (
        ["train", DIGITS, "optimizer=gradient"],
        'jshard.train.optimizer (the command line) is "gradient", which is no optimizer of optax; use adamw, adam, sgd '
        "or another of optax",
    ),
    (
        ["train", DIGITS, "optimizer.learning_rat=1e-3"],
        'jshard.train.optimizer (configs/digits.yaml:11) is "adamw", which takes no argument "learning_rat"; did you '
        'mean "learning_rate"?',
    ),
    (
        ["train", DIGITS, "optimizer.b1=high"],
        'jshard.train.optimizer.b1 (the command line) is "high", which is not a number; write b1: 0.9',
    ),
    (
        ["train", DIGITS, "batch=63"],
        'jshard.train.batch (the command line) splits 63 rows over mesh axis "data" of size 2; use 62 or 64',
    ),
    (
        ["train", DIGITS, "batch=2000"],
        "jshard.train.batch (the command line) is 2000, but there are 1437 examples; use 1437 or fewer",
    ),
    (
        ["train", "configs/mlp.yaml"],
        "configs/mlp.yaml names no model to train; write model: examples.digits:Model under jshard.train",
    ),
    (
        ["train", DIGITS, "jshard.mesh.data=4"],
        "jshard.mesh (configs/digits.yaml:4) asks for data 4 x tensor 4 = 16 devices, but 8 are here; make it smaller, "
        "or pretend with JAX_NUM_CPU_DEVICES=16 PJRT_NPROC=32 JAX_PLATFORMS=cpu",
    ),
]


@pytest.mark.parametrize(("words", "sentence"), SENTENCES, ids=[" ".join(words)[:60] for words, _ in SENTENCES])
def test_cli_mistake_is_one_sentence(capsys, monkeypatch, words, sentence):
    monkeypatch.setattr("jshard.cli.experiment.pretend", lambda count, platforms: None)  # this process has its devices
    status, out, err = typed(capsys, *words)
    assert (status, err) == (2, [sentence])
    assert out == [] or words[0] == "check"


@pytest.mark.slow
def test_cli_pretends_as_many_devices_as_the_mesh_needs():
    done = process(sys.executable, "-c", OPENED.format("configs/xor.yaml", ()))
    assert done.stderr == "no accelerator here: pretending 4 CPU devices for mesh {tensor: 4}\n"
    assert done.returncode == 0


@pytest.mark.slow
def test_cli_pretends_eight_devices_where_a_size_is_open():
    done = process(sys.executable, "-c", OPENED.format(DIGITS, ("jshard.mesh.data=-1",)), JAX_PLATFORMS="cpu")
    assert done.stderr == "JAX_PLATFORMS=cpu: pretending 8 CPU devices for mesh {data: -1, tensor: 4}\n"


def test_cli_pretends_nothing_for_one_device():
    done = process(sys.executable, "-c", OPENED.format("configs/xor.yaml", ("jshard.mesh.tensor=1",)))
    assert (done.returncode, done.stderr) == (0, "")


def test_cli_reader_that_stops_early_is_no_mistake():
    done = process("bash", "-c", f"set -o pipefail; {sys.executable} -m jshard schema | head -1")
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_verify_takes_further_meshes_and_tells_a_mistyped_one():
    from jshard.cli.target import mesh_sizes

    assert mesh_sizes("--mesh", "data=4,tensor=2") == {"data": 4, "tensor": 2}
    with pytest.raises(JShardError) as told:
        mesh_sizes("--mesh", "data4")
    assert str(told.value) == '--mesh "data4" is not a mesh; write it like --mesh data=4,tensor=2'


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), 'the function "mine:step" has no mesh; add --on data=4,tensor=2, or --config configs/mlp.yaml'),
        (("--on", "data=0"), '--on "data=0" is not a mesh; write it like --on data=4,tensor=2'),
        (("--on", "data=2", "--config", "configs/mlp.yaml"), "--on and --config both give a mesh; remove one of them"),
    ],
)
def test_a_function_needs_a_mesh_and_takes_one(monkeypatch, capsys, words, says):
    monkeypatch.delenv("JSHARD_CONFIG", raising=False)
    assert main(["explain", "mine:step", *words]) == 2
    assert capsys.readouterr().err == f"{says}\n"


def test_plan_and_bench_are_commands():
    from jshard.cli import bench, parse
    from jshard.cli.plan import run as run_plan

    for _ in range(2):  # importing their modules must not take the place of what they run
        assert parse(["plan", "configs/digits.yaml", "--topology", "v5e:4x4"]).command is run_plan
        assert parse(["bench", "kernels", "--size", "4KiB"]).command is bench.run

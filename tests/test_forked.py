"""A process that is forked is the one that Python would have started: every promise of it, asked of both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parent.parent
SELF = """
import json, os, signal, sys
loaded = [name for name in ("jax", "flax", "orbax", "jshard") if name in sys.modules]
import jax
print(json.dumps({
    "child": os.getppid(), "group": os.getpgid(0) == os.getpid(), "session": os.getsid(0) == os.getpid(),
    "words": [sys.argv, sys.orig_argv[1:], sys.path, __name__, __file__ if "__file__" in globals() else None],
    "folder": os.getcwd(), "variables": sorted(os.environ.items()), "loaded": loaded, "read": sys.stdin.read(),
    "jax": [len(jax.devices()), jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision],
    "streams": [(each.encoding, each.errors, each.line_buffering, each.write_through) for each in (sys.stdin, sys.stdout, sys.stderr)],
    "open": sorted(n for n in map(int, os.listdir("/proc/self/fd")) if n < 64),
    "signals": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)],
}))
"""
BASE = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "JSHARD_"))} | {
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",  # where compilers for absent chips are installed, another backend would open files
}


@pytest.fixture(autouse=True)
def _forks(monkeypatch):
    monkeypatch.delenv("JSHARD_TESTS_FRESH", raising=False)


def both(words: list[str], **how):
    """What a forked process and a new one print to stdout and stderr, and how they end."""
    done = []
    for start in (forked.Popen, forked.REAL):
        with start(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how
        ) as process:
            done.append((*process.communicate("typed"), process.returncode))
    return done


@pytest.mark.quick("session of -c")
@pytest.mark.parametrize(
    ("form", "how"),
    [
        ("-c", {"start_new_session": True}),
        ("-m", {"process_group": 0}),
        ("-P", {"env": {**BASE, "JAX_NUM_CPU_DEVICES": "3", "JAX_ENABLE_X64": "true", "JAX_DEFAULT_MATMUL_PRECISION": "float32"}}),
        ("script", {"env": {**BASE, "PYTHONUNBUFFERED": "1"}}),
    ],
    ids=["session of -c", "group of -m", "variables of -P", "unbuffered script"],
)  # fmt: skip
def test_forked_process_finds_what_a_new_one_does(form, how, tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "told.py").write_text(SELF)
    words = {
        "script": ["tests/told.py"],
        "-c": ["-c", SELF],
        "-m": ["-m", "tests.told"],
        "-P": ["-P", "tests/told.py"],
    }[form]
    how = {"env": BASE, **how, "stdin": subprocess.PIPE, "cwd": tmp_path}
    (one, said, status), (other, also, ended) = both([*words, "word", "--option"], **how)
    assert (status, ended) == (0, 0), said + also
    one, other = json.loads(one), json.loads(other)
    assert one["child"] == os.getpid()
    assert one == other


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit",
        "raise SystemExit(300)",
        "raise SystemExit('why')",
        "1/0",
        "def f():\n    raise KeyboardInterrupt\nf()",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import atexit, threading, time; atexit.register(print, 'exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start(); print('main', end=' ')",
        "import sys; sys.stdout = None; sys.exit(3)",
        "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'import sys; sys.exit(5)'])",
        "import os; os.execvp('sh', ['sh', '-c', 'exit 6'])",
    ],
)
def test_forked_process_ends_as_a_new_one_does(program):
    one, other = both(["-c", program], env=BASE)
    assert one == other


def test_forked_process_takes_warnings_for_errors_as_a_new_one_does():
    program = "import sys, warnings\nprint(sys.warnoptions)\nwarnings.warn('loud')"
    one, other = both(["-W", "error", "-c", program])
    assert one == other
    assert (one[0], one[2]) == ("['error']\n", 1)


@pytest.mark.parametrize(
    ("name", "brings"),
    [("numpy", []), ("jax.numpy", ["jax"]), ("orbax.checkpoint", ["jax"])],
)
def test_what_is_imported_beforehand_is_there_once_and_not_before(name, brings):
    program = (
        f"import sys, {name}\nprint(sys.modules['{name}'] is {name}, type({name}.__spec__.loader).__name__)\n"
        "print(sorted({'jax'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"True SourceFileLoader\n{brings}\n", "")


def test_what_a_fork_of_any_rank_compiles_is_kept_and_its_contexts_are_used_again(tmp_path):
    program = (
        "import jax\nfrom jax._src import distributed\ndistributed.global_state.process_id = 1\n"
        "programs = [jax.jit(lambda x, k=k: x * k).lower(2.0) for k in range(11)]\nprograms[-1].compile()\n"
        "print(len({each.compiler_ir().context for each in programs}) < 11)"
    )
    kept = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **kept})
    assert (done.stdout, done.stderr) == ("True\n", "")
    assert [path.name.partition("-")[0] for path in tmp_path.iterdir()] == ["jit__lambda"]


def test_programs_of_forks_that_differ_by_a_scope_are_one(tmp_path):
    kept = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    for name in ("first", "second"):
        program = f"import jax; jax.jit(jax.named_scope('{name}')(lambda x: x * 3.25))(2.0)"
        subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, **kept})
    assert len(list(tmp_path.glob("jit__lambda-*"))) == 1


def test_forked_process_hears_signals_and_hands_descriptors_on():
    reading, writing = os.pipe()
    program = f"import os, time; os.write({writing}, b'here'); time.sleep(60)"
    process = forked.Popen([sys.executable, "-c", program], pass_fds=[writing], process_group=0)
    os.close(writing)
    assert (os.read(reading, 4), os.getpgid(process.pid)) == (b"here", process.pid)
    os.killpg(process.pid, signal.SIGKILL)
    assert (process.wait(10), os.read(reading, 1)) == (-signal.SIGKILL, b"")
    os.close(reading)


def test_forked_process_forks_what_it_starts_itself():
    own = "import os; print(os.getppid(), 'forked.py' in open('/proc/self/cmdline').read())"
    program = (
        f"import os, subprocess, sys; print(os.getpid(), flush=True); subprocess.run([sys.executable, '-c', {own!r}])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    pid, parent, forked_too = done.stdout.split()
    assert (pid == parent, forked_too) == (True, "True")


def test_what_a_fork_can_not_be_is_started():
    for words in (["-W", "ignore", "-c", "pass"], ["-I", "-c", "pass"], ["-m", "pip"], ["-X", "dev", "x.py"]):
        assert forked.program([sys.executable, *words], os.environ) is None
    words = [sys.executable, "-c", "pass"]
    assert forked.program(words, os.environ) is not None
    for name in ("PYTHONHASHSEED", "PYTHONWARNINGS", "MALLOC_ARENA_MAX", "OMP_NUM_THREADS", "LC_ALL", "TZ"):
        assert forked.program(words, {**os.environ, name: "1"}) is None


@pytest.mark.usefixtures("fresh")
def test_fresh_process_is_a_new_one():
    program = "import os; print(open(f'/proc/{os.getpid()}/cmdline').read())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "forked.py" not in done.stdout

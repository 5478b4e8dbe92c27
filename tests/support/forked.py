"""Python processes that tests start, forked from one that has imported JAX, Flax and the like: seconds less for each.

`subprocess.Popen` in a test, and in the processes that it starts, asks a server for a process: a child of the asker, with the
id, group, descriptors, environment and end of one that Python starts. The server's imports are there already; JAX takes the
variables of the process, and those that the program sets before it starts JAX. Started as ever are a process with another
option than `-P` and `-W error`, or with other variables that the C library or an import reads; all processes of a test with
the fixture `fresh`; and all of a run with JSHARD_TESTS_FRESH=1. Forks share the seed of hashes.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import inspect
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

IMPORTS = ("yaml", "numpy.random", "sklearn.datasets")
IMPORTS_OF_JAX = ("jax.numpy", "jax.experimental.pallas", "flax.nnx", "optax", "orbax.checkpoint.experimental.v1")
MODULES = ("jshard", "examples", "benchmarks", "tests", "doctest", "pytest")  # that `python -m` may name
# Variables that Python, the C library or an import reads: a process with others than the server's is started as ever.
READ_AT_ONCE = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "OPENBLAS_", "FLAX_", "LC_", "LANG", "TZ")
FOR_EACH = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER"}  # of these, the fork does as Python does
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
REAL = subprocess.Popen
# What a fork can't do otherwise than this.
USUAL: dict[str, Any] = {
    "executable": None,
    "preexec_fn": None,
    "close_fds": True,
    "shell": False,
    "restore_signals": True,
}
USUAL |= {"gid": None, "gids": None, "uid": None, "umask": -1}
PARAMETERS = [*inspect.signature(REAL._execute_child).parameters][1:]  # type: ignore[attr-defined]


class Server(NamedTuple):
    """What a process that starts others knows of its server."""

    end: socket.socket
    variables: Mapping[str, str]

    def start(self, message: dict[str, Any], descriptors: Sequence[int]) -> int:
        prctl = ctypes.CDLL(None).prctl
        with STARTING:
            prctl(SUBREAPER, 1, 0, 0, 0)  # the server's grandchild becomes a child of this process
            try:
                socket.send_fds(self.end, [json.dumps({**message, "parent": os.getpid()}).encode()], descriptors)
                return int(self.end.recv(20))
            finally:
                prctl(SUBREAPER, 0, 0, 0, 0)


server: Server | None = None  # of this process
STARTING = threading.RLock()  # of two servers, or of two children, each would end the other's adoption
fresh = False  # nothing is forked


class Popen(REAL):
    def _execute_child(self, *given: Any) -> None:
        of = dict(zip(PARAMETERS, given, strict=True))
        variables = dict(os.environ if of["env"] is None else of["env"])
        as_ever = fresh or "JSHARD_TESTS_FRESH" in variables or any(of[name] != value for name, value in USUAL.items())
        as_ever = as_ever or isinstance(of["args"], str | bytes | os.PathLike) or not os.path.isdir(of["cwd"] or ".")
        words = [] if as_ever else [os.fspath(word) for word in of["args"]]
        if as_ever or program(words, variables) is None:
            return super()._execute_child(*given)
        pass_fds = of["pass_fds"]
        streams = [of[name] if of[name] != -1 else own for own, name in enumerate(("p2cread", "c2pwrite", "errwrite"))]
        message = {
            "words": words,
            "variables": variables,
            "folder": os.path.abspath(of["cwd"] or "."),
            "session": of["start_new_session"],
            "group": of["process_group"],
            "descriptors": [0, 1, 2, *pass_fds],
        }
        self.pid = _server().start(message, [*streams, *pass_fds])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(of[name] for name in pipes))


def program(words: Sequence[str], variables: Mapping[str, str]) -> tuple[str, str, list[str], bool] | None:
    """Return `("-m" | "-c" | "", what, its words, whether its folder is left out)`; None where a fork is no such process."""
    plain = _without_warnings(words)
    apart = plain[1:2] == ["-P"]
    match [plain[0], *plain[1 + apart :]]:
        case [sys.executable, "-I", "-S", script, *rest] if script.endswith("parent_death.py"):
            found = "", script, rest, True
        case [sys.executable, "-c", text, *rest]:
            found = "-c", text, rest, apart
        case [sys.executable, "-m", module, *rest] if module.partition(".")[0] in MODULES:
            found = "-m", module, rest, apart
        case [sys.executable, script, *rest] if not script.startswith("-"):
            found = "", script, rest, apart
        case _:
            return None
    had = _server().variables
    names = {name for name in {*variables, *had} if name.startswith(READ_AT_ONCE)} - FOR_EACH
    return found if all(variables.get(name) == had.get(name) for name in names) else None


def _without_warnings(words: Sequence[str]) -> Sequence[str]:
    return [words[0], *words[3:]] if words[1:3] == ["-W", "error"] else words


def _server() -> Server:
    """Return the server of this process; start it at the first question."""
    global server
    with STARTING:
        if server is None:
            ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            left_out = ("JAX_", "XLA_", "PYTHONPATH")  # each process has its own
            variables = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
            process = REAL(
                [sys.executable, __file__, str(theirs.fileno())],
                env=variables, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            theirs.close()
            server = Server(ours, variables)
            atexit.register(lambda: (ours.close(), process.wait()))
        return server


def _read_variables_of_jax(before: Mapping[str, str]) -> None:
    """Set JAX's options as its import does, by the variables that were others before."""
    config = sys.modules["jax"].config
    for name, (kind, *_) in config.meta.items():
        text = os.environ.get(variable := name.upper())
        if text not in (None, before.get(variable)) and variable not in compiled_before.OF_NEW_PROCESSES:
            read = {int: int, float: float, bool: lambda text: text.lower() in ("y", "yes", "t", "true", "on", "1")}
            config.update(name, read.get(kind, str)(text))


def _read_late(variables: Mapping[str, str]) -> None:
    """Have JAX read again what the program has set before its first array: JAX is imported already."""
    bridge = sys.modules["jax._src.xla_bridge"]
    start = bridge.backends

    def backends() -> Any:
        if not bridge.backends_are_initialized():
            _read_variables_of_jax(variables)
        return start()

    bridge.backends = backends


def serve(end: socket.socket, variables: Mapping[str, str]) -> Sequence[str]:
    """Fork for each message until nobody can send one; return the words, in the fork that is now the process asked for."""
    while True:
        content, descriptors, *_ = socket.recv_fds(end, 1 << 20, 64)
        if not content:
            os._exit(0)
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            return _become(json.loads(content), descriptors, end, variables)
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(
    message: dict[str, Any], descriptors: list[int], end: socket.socket, variables: Mapping[str, str]
) -> Sequence[str]:
    while os.getppid() != message["parent"]:
        time.sleep(0.0005)
    if message["session"]:
        os.setsid()
    if message["group"] >= 0:
        os.setpgid(0, message["group"])
    end.send(str(os.getpid()).encode())  # now that it has a group of its own it can be killed
    end.detach()  # an object that is freed would close a number that another descriptor has by then
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 512) for descriptor in descriptors]
    os.closerange(3, 512)
    if (words := _begin_again(variables)) is not None:
        return words
    for descriptor, number in zip(high, message["descriptors"], strict=True):
        os.dup2(descriptor, number, inheritable=True)
    os.closerange(512, 512 + 64)
    for number, handler in DISPOSITIONS.items():
        signal.signal(number, handler)
    sys.modules["numpy.random"].seed()
    os.chdir(message["folder"])
    os.environ.clear()
    os.environ.update(SET_BY_JAX | message["variables"])
    _read_variables_of_jax({})
    _read_late(dict(os.environ))
    _open_streams()
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    return message["words"]


def _begin_again(variables: Mapping[str, str]) -> Sequence[str] | None:
    """Fork a server for this process's own, which knows as little as this process does now."""
    global server
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.detach()
        channel = os.dup2(theirs.detach(), 3)
        os.closerange(4, 1024)
        return serve(socket.socket(fileno=channel), variables)
    high = fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, 1000)
    ours.close()
    theirs.close()
    server = Server(socket.socket(fileno=high), variables)
    atexit.register(server.end.close)
    return None


def _open_streams() -> None:
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old, mode = getattr(sys, name), "w" if number else "r"
        raw = open(number, f"{mode}b", 0 if unbuffered and number else -1, closefd=False)
        lines = not unbuffered and (number == 2 or raw.isatty())
        text = io.TextIOWrapper(raw, old.encoding, old.errors, line_buffering=lines, write_through=unbuffered)
        text.mode = mode
        vars(sys).update({name: text, f"__{name}__": text})


def run(words: Sequence[str]) -> None:
    """Run the program of a command as `__main__`; Python ends the process as it ends any other."""
    asked = program(words, os.environ)
    assert asked is not None, words
    kind, what, rest, apart = asked
    sys.orig_argv = list(words)
    if _without_warnings(words) is not words:
        sys.warnoptions.append("error")
        warnings.simplefilter("error")
    own = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = {"-m": os.getcwd(), "-c": ""}.get(kind, os.path.dirname(os.path.realpath(what)))
    sys.path[:] = [*([] if apart else [first]), *own, *(path for path in BASE if path not in own)]
    with contextlib.suppress(ModuleNotFoundError):  # which JAX looks for when it is imported
        sys.modules["jax._src.xla_bridge"].jax_plugins = importlib.import_module("jax_plugins")
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = builtins
    sys.argv = [kind or what, *rest]
    if kind == "-m":
        runpy._run_module_as_main(what)
    elif kind == "-c":
        exec(compile(what, "<string>", "exec", dont_inherit=True), main.__dict__)
    else:
        main.__file__ = os.path.abspath(what)
        with io.open_code(what) as file:
            code = compile(file.read(), what, "exec", dont_inherit=True)
        exec(code, main.__dict__)


def _without_frames_of_this_file(kind: type[BaseException], error: BaseException, frames: Any) -> None:
    last = frames
    while last is not None:
        frames = last.tb_next if last.tb_frame.f_code.co_filename == __file__ else frames
        last = last.tb_next
    sys.__excepthook__(kind, error.with_traceback(frames), frames)


def _exec(real: Callable[..., Any]) -> Callable[..., Any]:
    """Continue this process as the program that it ends in."""

    def become(path: str, words: Sequence[str]) -> None:
        if path != words[0] or program(words, os.environ) is None:
            real(path, words)
        run(words)
        sys.exit()

    return become


if __name__ == "__main__":
    BASE, VARIABLES = sys.path[1:], dict(os.environ)
    for name in IMPORTS:
        importlib.import_module(name)
    without_jax = {*os.environ}
    for name in IMPORTS_OF_JAX:
        importlib.import_module(name)
    SET_BY_JAX = {name: value for name, value in os.environ.items() if name not in without_jax}
    import compiled_before  # its variables are those of each process

    compiled_before.as_tests_do()
    compiled_before.write_from_every_process()
    del sys.modules["compiled_before"]
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)  # by JAX, which has not started here
    # It ends when who asks it does.
    DISPOSITIONS = {
        each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    subprocess.Popen, os.execv, os.execvp = Popen, _exec(os.execv), _exec(os.execvp)
    sys.excepthook = _without_frames_of_this_file
    gc.collect()
    gc.freeze()
    run(serve(socket.socket(fileno=int(sys.argv[1])), VARIABLES))

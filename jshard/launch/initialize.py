"""Joining the other processes: roll call, JAX's own service, and an end of all after a failure."""

from __future__ import annotations

import atexit
import functools
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NoReturn

from jshard.errors import FULL, JShardError
from jshard.launch.cluster_env import Membership, cards_of, found, place_on_host
from jshard.launch.heartbeat import Pulse
from jshard.launch.peer_loss import is_of_connection, who_is_gone
from jshard.launch.rendezvous import AlreadyReported, Facts, answer
from jshard.layouts.pretend import THREADS_PER_DEVICE, keep_freed, pretend
from jshard.version import versions

START_TIMEOUT = 60.0  # seconds for all processes to appear
PRECEDENCE = 2.0  # seconds for rank 0 to print a fault before the others end, or for them to ask it
HEARTBEAT = 7 * 24 * 3600  # JAX uses the wall clock, and a jump would end all; the watchdog finds lost processes
STEP_TIMEOUT = 300.0  # seconds without a step before a run counts as hung


class _Joined:
    """The launch that this process has joined, once."""

    membership: Membership | None = None
    pulse: Pulse = Pulse()
    status: Any = None  # of sys.exit
    unwatch: Any = None  # ends the watchdog


def init(
    devices: int | None = None,
    *,
    start_timeout: float | None = None,
    step_timeout: float | None = None,
    facts: Mapping[str, Facts] | None = None,
    preemption: bool = False,
) -> Membership | None:
    """Join the launch of this process; without a launch, do nothing. Call it before JAX does anything.

    `devices` is the number of CPU devices to pretend, in all processes together. `preemption` leaves
    SIGTERM to JAX, for a program that saves at `reached_preemption_sync_point`; else SIGTERM ends it.
    """
    if _Joined.membership is not None:
        return _Joined.membership
    membership = found()
    if membership is None:
        if devices is not None:
            pretend(devices)
        return None
    start = _timeout("JSHARD_START_TIMEOUT", start_timeout, START_TIMEOUT)
    step = _timeout("JSHARD_STEP_TIMEOUT", step_timeout, STEP_TIMEOUT)
    _hold_end()
    if devices is not None:
        pretend_part(devices, membership.processes)
    keep_freed()
    installation = {**versions(), "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}
    answer(membership, {"installation": installation, **(facts or {})}, start)
    _start_jax(membership, start, preemption)
    _Joined.membership = membership
    _Joined.pulse.tell(joined=True)
    from jshard.launch.watchdog import watch  # needs JAX's service

    _Joined.unwatch = watch(membership, _Joined.pulse, step)
    atexit.register(_leave)  # registered after JAX's, so run before it
    return membership


def _timeout(variable: str, given: float | None, otherwise: float) -> float:
    """Return the seconds given to `jshard.init`, or by the environment."""
    said: Any = os.environ.get(variable, otherwise) if given is None else given
    try:
        seconds = float(said)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        argument = variable.removeprefix("JSHARD_").lower()
        asked = f"{variable}={said}" if given is None else f"jshard.init({argument}={said!r})"
        raise JShardError(f"{asked} is no number of seconds", hint=f"use a number above 0, as {otherwise:g}")
    return seconds


def unwatch() -> None:
    """Stop reporting to the other processes, without being missed: to measure the cost of the watchdog."""
    if _Joined.unwatch is not None:
        _Joined.unwatch()


def _leave() -> None:
    """Leave in order: JAX waits for all processes. After `sys.exit(3)` it must not: the others don't end."""
    if _Joined.status not in (None, 0):
        _exit(_Joined.status if isinstance(_Joined.status, int) else 1)
    _Joined.pulse.at("ended")
    unwatch()


def joined() -> Membership | None:
    """Return the membership of this process, or None."""
    return _Joined.membership


def pulse() -> Pulse:
    """Return this process's status for other processes and `jshard top`. Your own loop calls
    `jshard.pulse().at("step", 12)` before a step and `.waits(12, loss)` after it; `jshard train`
    does so by itself."""
    return _Joined.pulse


def pretend_part(devices: int, processes: int, platforms: str | None = "cpu", label: str = "") -> None:
    """Pretend this process's part of `devices` CPU devices; `label` names the devices in an error.
    Every process has the threads of all devices, so that all compute equally."""
    if devices % processes:
        counts = [count for count in range(1, devices + 1) if devices % count == 0]
        near = [
            *[count for count in counts if count < processes][-1:],
            *[each for each in counts if each > processes][:1],
        ]
        raise JShardError(
            f"{label or f'{devices} devices'} can't be divided evenly among {processes} processes",
            hint=f"start {' or '.join(map(str, near))} of them: jshard launch -n {near[-1]}",
        )
    os.environ.setdefault("PJRT_NPROC", str(THREADS_PER_DEVICE * devices))
    asked = os.environ.get("JAX_NUM_CPU_DEVICES", "")
    if asked.isdecimal() and int(asked) > devices // processes:  # set for a single process
        os.environ["JAX_NUM_CPU_DEVICES"] = str(devices // processes)
    pretend(devices // processes, platforms)


def _start_jax(membership: Membership, seconds: float, preemption: bool) -> None:
    import jax

    if (place := place_on_host()) is not None:
        os.environ.update(cards_of(*place))
    jax.config.update("jax_enable_preemption_service", preemption)
    bind = None
    if membership.is_local:
        bind = membership.coordinator  # else JAX listens on every address of this machine
        _keep_gloo_here()
    jax.distributed.initialize(
        membership.coordinator,
        membership.processes,
        membership.rank,
        cluster_detection_method="deactivate",
        coordinator_bind_address=os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", bind),
        initialization_timeout=max(1, round(seconds)),
        heartbeat_timeout_seconds=HEARTBEAT,
    )


def _keep_gloo_here() -> None:
    """Make Gloo listen on loopback: it uses the address of the host's name, and JAX has no setting."""
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    if not isinstance(_jax.make_gloo_tcp_collectives, functools.partial):
        _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, hostname="127.0.0.1")


def _hold_end() -> None:
    """Make a failing process end at once: an orderly exit of JAX would wait for the others."""

    def ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        fail(error.with_traceback(trace))

    def thread_ended(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and args.thread is threading.main_thread():
            fail(args.exc_value)
        threading.__excepthook__(args)

    exit = sys.exit

    def leave(status: Any = None) -> NoReturn:
        _Joined.status = status
        exit(status)

    sys.exit = leave
    sys.excepthook = ended
    threading.excepthook = thread_ended


def fail(error: BaseException) -> NoReturn:
    """Print the error, report it to the other processes, and end this process at once."""
    status = 1
    if isinstance(error, KeyboardInterrupt):
        status = 130
    elif isinstance(error, JShardError):
        status = 1 if _came_under_way(error) else 2
        if not (isinstance(error, AlreadyReported) and _Joined.pulse.is_seen_with_all):
            print(error, file=sys.stderr)
    elif (lost := _lost(error)) is not None:
        culprit, says = lost
        print(says, file=sys.stderr)  # a launcher prints its own sentence instead
        _Joined.pulse.tell(culprit=culprit, fault=str(says), gone=True)
        if _Joined.membership is not None and _Joined.membership.rank == 0:
            time.sleep(PRECEDENCE)  # the others learn the culprit from rank 0
        _exit(1)
    else:
        traceback.print_exception(error)
    if _Joined.membership is not None and not isinstance(error, (KeyboardInterrupt, AlreadyReported)):
        from jshard.launch.watchdog import report

        report(_Joined.membership, _last_line(error), _Joined.pulse)
    if isinstance(error, AlreadyReported):
        time.sleep(PRECEDENCE)
    _Joined.pulse.tell(fault=_last_line(error))
    _exit(status)


def _exit(status: int) -> NoReturn:
    """End this process without an orderly exit: there, JAX would wait for the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _lost(error: BaseException) -> tuple[int, JShardError] | None:
    """Return the lost process after a broken connection, if no launcher sees all processes."""
    if _Joined.membership is None or _Joined.pulse.is_seen_with_all or not is_of_connection(error):
        return None
    return who_is_gone(_Joined.membership, _Joined.pulse.step, _Joined.pulse.stands_in)


def _came_under_way(error: JShardError) -> bool:
    """Return whether something but a full disk failed after the first step: a restart may help."""
    cause = error.__cause__
    return _Joined.pulse.step > 0 and isinstance(cause, Exception) and getattr(cause, "errno", None) not in FULL


def _last_line(error: BaseException) -> str:
    return str(error) if isinstance(error, JShardError) else traceback.format_exception_only(error)[-1].strip()

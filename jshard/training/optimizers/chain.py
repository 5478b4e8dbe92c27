"""An optimizer configured as a chain: clip, transformations of optax or of the user, schedule and decay."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from flax import nnx

from jshard.errors import JShardError, did_you_mean, quoted
from jshard.layers.layer import parameters
from jshard.layers.user_code_errors import as_user_error
from jshard.layouts.paths import words_of
from jshard.signals.globs import Glob, patterns
from jshard.training.components import check_arguments, function_at, parameters_of
from jshard.training.optimizers.clipping import clip_by_global_norm
from jshard.training.settings import LEARNING_RATE, Settings

KEYS = ("clip", "schedule", "decay")  # of `optimizer`, beside names of optax
NUMBERS = {"learning_rate": LEARNING_RATE, "peak": LEARNING_RATE, "warmup": 100, "decay": 100, "steps": 1000}
Schedule = Callable[[Any], Any]  # finished steps -> learning rate
MASKS = ("mask", "weight_decay_mask")  # arguments of optax that select the parameters to decay


@dataclasses.dataclass
class _Link:
    """A transformation of the chain: its YAML key, its function and the arguments."""

    name: str
    key: str
    label: str  # opens an error message
    function: Callable[..., Any]
    arguments: dict[str, Any]

    @property
    def takes(self) -> Mapping[str, inspect.Parameter]:
        return parameters_of(self.function)

    def made(self, settings: Settings) -> optax.GradientTransformation:
        check_arguments(self.label, self.function, self.arguments, ours={})
        check_numbers(settings, self.key, self.arguments, self.takes)
        with as_user_error(f"{self.name} is called"):
            return self.function(**self.arguments)


@dataclasses.dataclass(frozen=True)
class Chain:
    """A transformation `tx` and its learning rate: a number, a function of the finished steps, or
    None if unknown. `peak` is its maximum, and `key` the key that sets it."""

    tx: optax.GradientTransformation
    rate: Callable[[int], Any] | float | None
    key: str
    peak: float | None
    match: tuple[str, ...]
    label: str

    @classmethod
    def of(cls, settings: Settings, clip: Callable[[float], Any] = clip_by_global_norm) -> Chain:
        """Build the configured optimizer, with `clip` for its clipping and a default learning rate."""
        table = settings.table("optimizer")
        says = {key: table.pop(key) for key in KEYS if key in table}
        links = _links(settings, table)
        rate, key, peak = _set_rate(settings, links, says.get("schedule"))
        match = says["decay"]["match"] if "decay" in says else ()
        decays = settings.label("optimizer.decay")
        if match:
            _set_mask(decays, links, patterns(match))
        first = [clip(says["clip"])] if "clip" in says else []
        steps = [*first, *(link.made(settings) for link in links)]
        return cls(steps[0] if len(steps) == 1 else optax.chain(*steps), rate, key, peak, match, decays)

    def check_decay(self, model: nnx.Module) -> None:
        """Raise an error for a glob in `decay.match` without a matching parameter."""
        paths = ["/".join(map(str, path)) for path, _ in parameters(model)]
        for text in self.match:
            if not any(map(Glob(text.removeprefix("!")).fits, paths)):
                hint = did_you_mean(text, paths, f"write one that does, such as {quoted(paths[0])}")
                raise JShardError(f"{self.label} has match {quoted(text)}, which fits no parameter", hint=hint)

    def learning_rate(self, done: int) -> float | None:
        """Return the learning rate of the step after `done` steps."""
        return float(self.rate(done)) if callable(self.rate) else self.rate


def _links(settings: Settings, table: dict[str, Any]) -> list[_Link]:
    """Return the transformations to chain; `{name: adamw, b1: 0.9}` is `{adamw: {b1: 0.9}}`."""
    name = table.pop("name", None)
    if name is not None:
        label = f'{settings.label("optimizer")} is "{name}"'
        inside = table.pop(name, None)
        function = _function(settings, label, name, optimizers(), "is no optimizer of optax")
        return [_Link(name, "optimizer", label, function, {**table, **(inside if isinstance(inside, Mapping) else {})})]
    links = []
    for name, value in table.items():
        key = f"optimizer.{name}"
        label = settings.label(key)
        known = [*transformations(), *KEYS]
        function = _function(settings, label, name, known, "is no optimizer or transformation of optax")
        first = next(iter(parameters_of(function)), "it")
        arguments = {} if value is None else dict(value) if isinstance(value, Mapping) else {first: value}
        links.append(_Link(name, key, label, function, arguments))
    rates = [link for link in links if "learning_rate" in link.takes]
    if len(rates) > 1:
        one, other = rates[:2]
        where = f"{one.name} ({settings.place(one.key)}) and {other.name} ({settings.place(other.key)})"
        raise JShardError(f"{settings.label('optimizer')} names two optimizers, {where}", hint="keep one")
    if not rates and not any(":" in link.name for link in links):
        raise JShardError(f"{settings.label('optimizer')} names no optimizer", hint="write adamw: {} in it")
    return links


def check_numbers(
    settings: Settings, key: str, arguments: Mapping[str, Any], takes: Mapping[str, inspect.Parameter]
) -> None:
    """Raise an error for text given for a number, known by the parameter's default or its name."""
    for argument, value in arguments.items():
        default = NUMBERS.get(argument, takes[argument].default if argument in takes else None)
        if isinstance(default, (int, float)) and isinstance(value, (str, list, Mapping)):
            raise JShardError(
                f'{settings.label(f"{key}.{argument}")} is "{value}", which is not a number',
                hint=f"write {argument}: {default}",
            )


def _function(
    settings: Settings,
    label: str,
    name: str,
    known: Sequence[str],
    fault: str,
    use: str = "adamw, adam, sgd or another of optax",
) -> Any:
    if ":" in name:
        named = "" if label.endswith('"') else " is named"
        return function_at(f"{label}{named}, but", name, settings.configuration.trust)
    if name not in known or name in KEYS:
        fault = f"{label}{', which' if label.endswith(chr(34)) else ''} {fault}"
        raise JShardError(fault, hint=did_you_mean(name, known, f"use {use}"))
    return SCHEDULES.get(name) or getattr(optax, name)


def _set_rate(settings: Settings, links: list[_Link], schedule: object) -> tuple[Any, str, float | None]:
    """Set the optimizer's learning rate; return the rate, the key of its maximum, and the maximum."""
    link = next((link for link in links if "learning_rate" in link.takes), None)
    if link is None and schedule is None:
        return None, "optimizer", None
    if link is None:
        fault = f"{settings.label('optimizer.schedule')} is beside {links[-1].name}, which takes no learning_rate"
        raise JShardError(fault, hint=f"add the parameter learning_rate to {links[-1].name}, or remove schedule")
    key, arguments = f"{link.key}.learning_rate", link.arguments
    if schedule is not None:
        arguments["learning_rate"], key, peak = _scheduled(
            settings, schedule, arguments.pop("learning_rate", None), key
        )
        return arguments["learning_rate"], key, peak
    default = link.takes["learning_rate"].default
    if default is inspect.Parameter.empty:
        default = arguments.setdefault("learning_rate", LEARNING_RATE)
    rate = arguments.get("learning_rate", default)
    return rate, key, rate


def _scheduled(settings: Settings, schedule: Any, given: Any, rate_key: str) -> tuple[Any, str, float | None]:
    """Build a schedule; by default `peak` is the optimizer's learning rate and `steps` the run's steps."""
    label = settings.label("optimizer.schedule")
    table = {schedule: {}} if isinstance(schedule, str) else schedule
    if len(table) != 1:
        raise JShardError(
            f"{label} names {' and '.join(table) or 'nothing'}",
            hint="write one schedule, as in schedule: {warmup_cosine: {peak: 3e-4, warmup: 100}}",
        )
    ((name, value),) = table.items()
    label, words = f'{label} is "{name}"', f"{', '.join(SCHEDULES)} or optax:NAME"
    function = _function(settings, label, name, [*SCHEDULES], "is no schedule of jshard", use=words)
    arguments, takes, key = dict(value or {}), parameters_of(function), rate_key
    if "peak" in arguments:
        key = f"optimizer.schedule.{name}.peak"
    elif "peak" in takes:
        arguments["peak"], given = LEARNING_RATE if given is None else given, None
    if given is not None:
        raise JShardError(
            f"{settings.label(rate_key)} is set, and a schedule ({settings.place('optimizer.schedule')}) sets it too",
            hint="remove one of the two",
        )
    if "steps" in takes and takes["steps"].default is inspect.Parameter.empty:
        arguments.setdefault("steps", settings["steps"])
    check_arguments(label, function, arguments, ours={})
    check_numbers(settings, f"optimizer.schedule.{name}", arguments, takes)
    if name in SCHEDULES and not sum(arguments.get(word, 0) for word in ("warmup", "decay")) < arguments.get(
        "steps", settings["steps"] + 1
    ):
        long = " and ".join(f"{word} {arguments[word]}" for word in ("warmup", "decay") if word in arguments)
        raise JShardError(
            f"{label} with {long}, of only {arguments['steps']} steps", hint="use more steps, or smaller numbers"
        )
    with as_user_error(f"{name} is called"):
        return function(**arguments), key, arguments.get("peak")


def _set_mask(label: str, links: list[_Link], globs: list[Glob]) -> None:
    def mask(params: object) -> Any:
        def decays(path: Any, _: object) -> bool:
            return any(glob.fits("/".join(words_of(path))) for glob in globs)

        return jax.tree_util.tree_map_with_path(decays, params)

    found = [(link, word) for link in links for word in MASKS if word in link.takes]
    for link, word in found:
        link.arguments[word] = mask
    if not found:
        names = " and ".join(link.name for link in links)
        raise JShardError(
            f"{label} selects the parameters that decay, and {names} has no weight decay",
            hint="write add_decayed_weights: {weight_decay: 0.1} before it",
        )


@functools.cache
def transformations() -> tuple[str, ...]:
    """List the names of optax's functions with a transformation as result."""
    public = (
        (name, value) for name, value in vars(optax).items() if not name.startswith("_") and inspect.isfunction(value)
    )
    return tuple(n for n, f in public if "GradientTransformation" in str(inspect.signature(f).return_annotation))


@functools.cache
def optimizers() -> tuple[str, ...]:
    """List the names of optax's optimizers, except lbfgs: it needs more than gradients."""
    names = (name for name in transformations() if "learning_rate" in parameters_of(getattr(optax, name)))
    return tuple(name for name in names if not name.startswith("scale_by_") and name != "lbfgs")


# -- schedules of the learning rate --


def constant(peak: float) -> Schedule:
    """Stay at `peak`."""
    return optax.constant_schedule(peak)


def linear(peak: float, steps: int, end: float = 0.0) -> Schedule:
    """Fall linearly from `peak` to `end`."""
    return optax.linear_schedule(peak, end, steps)


def cosine(peak: float, steps: int, end: float = 0.0) -> Schedule:
    """Fall from `peak` to `end` along a half cosine."""
    return optax.cosine_decay_schedule(peak, steps, end / peak)


def warmup_constant(peak: float, warmup: int) -> Schedule:
    """Rise from 0 to `peak` in `warmup` steps, and stay."""
    return optax.linear_schedule(0.0, peak, warmup)


def warmup_linear(peak: float, warmup: int, steps: int, end: float = 0.0) -> Schedule:
    """Rise from 0 to `peak` in `warmup` of `steps` steps, and fall linearly to `end`."""
    return optax.join_schedules([warmup_constant(peak, warmup), linear(peak, steps - warmup, end)], [warmup])


def warmup_cosine(peak: float, warmup: int, steps: int, end: float = 0.0) -> Schedule:
    """Rise from 0 to `peak` in `warmup` of `steps` steps, and fall to `end` along a half cosine."""
    return optax.join_schedules([warmup_constant(peak, warmup), cosine(peak, steps - warmup, end)], [warmup])


def warmup_stable_decay(peak: float, warmup: int, decay: int, steps: int, end: float = 0.0) -> Schedule:
    """Rise from 0 to `peak` in `warmup` of `steps` steps, stay, and fall linearly to `end` in the last `decay`."""
    parts = [warmup_constant(peak, warmup), constant(peak), linear(peak, decay, end)]
    return optax.join_schedules(parts, [warmup, steps - decay])


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    each.__name__: each
    for each in (constant, linear, cosine, warmup_constant, warmup_linear, warmup_cosine, warmup_stable_decay)
}

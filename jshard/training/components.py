"""Import and call of functions and classes named by import path in a configuration."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jshard.errors import JShardError, Location, did_you_mean, kind_of, nearest
from jshard.layers.user_code_errors import as_user_error
from jshard.signals.faults import COMMAND_LINE
from jshard.signals.trust import EVERYTHING, Trust, Untrusted, is_ours
from jshard.training.settings import Settings


@dataclasses.dataclass(frozen=True)
class Component:
    """The class or function under `jshard.train.KEY`: `examples.digits:Model`, or a mapping of a `path` and arguments."""

    key: str
    place: Location
    path: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]

    @classmethod
    def of(cls, settings: Settings, key: str) -> Component:
        """Import the class or function named under `key`."""
        settings.require(key)
        arguments = settings.table(key)
        return cls.at(settings, key, arguments.pop("path"), arguments)

    @classmethod
    def at(cls, settings: Settings, key: str, path: str, arguments: Mapping[str, Any]) -> Component:
        """Import the class or function at `path`, named under `key`."""
        function = function_at(f'{settings.label(key)} is "{path}", but', path, settings.configuration.trust)
        return cls(key, settings.place(key), path, function, arguments)

    @property
    def name(self) -> str:
        """The last word of the path."""
        return self.path.rpartition(":")[2]

    def __str__(self) -> str:
        return f'jshard.train.{self.key} ({self.place}) is "{self.path}"'

    def __call__(self, *ours: object, **named: object) -> Any:
        """Call the function with the configured arguments and with jshard's, after a check of their names."""
        check_arguments(str(self), self.function, self.arguments, positional=len(ours), ours=named)
        try:
            return self.function(*ours, **named, **self.arguments)
        except JShardError as error:
            raise error.at(str(self), self.place.source, COMMAND_LINE) from error.__cause__


def function_at(label: str, path: str, trust: Trust = EVERYTHING) -> Callable[..., Any]:
    """Import `module:function` if `trust` allows it; `label` opens the error message."""
    value = value_at(label, path, trust)
    if not callable(value):
        raise JShardError(f"{label} that is {kind_of(value)}", hint="name a class or a function")
    return value


def value_at(label: str, path: str, trust: Trust = EVERYTHING) -> Any:
    """Import `module:name` if `trust` allows this module and the value's own module."""
    module_name, _, name = path.partition(":")
    module = _module(label, module_name, trust)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            close = nearest(part, [name for name in dir(value) if not name.startswith("_")])
            hint = f'did you mean "{module_name}:{close}"?' if close else f"define {part} in {module.__file__}"
            raise JShardError(f'{label} {module_name} has no "{part}"', hint=hint)
        value = getattr(value, part)
    function = value
    while isinstance(function, functools.partial):
        function = function.func
    owner = str(getattr(function, "__module__", None) or "builtins")
    try:
        trust.check(f"{label} it comes from another module:", owner)
    except ModuleNotFoundError as error:
        raise Untrusted(f"{label} it comes from {owner}, which is no file") from error
    return value


def _module(label: str, name: str, trust: Trust) -> Any:
    """Import a module from the current folder or from `sys.path`, if `trust` allows it."""
    try:
        with as_user_error(f"{name} is imported"):
            trust.check(label, name)
            if (here := os.getcwd()) not in sys.path and not is_ours(name):
                sys.path.insert(0, here)
            return importlib.import_module(name)
    except JShardError as error:
        missing = error.__cause__
        if not isinstance(missing, ModuleNotFoundError):
            raise
        if missing.name is not None and (name == missing.name or name.startswith(f"{missing.name}.")):
            raise JShardError(
                f'{label} there is no module "{missing.name}" in this folder or among the installed packages',
                hint=f"write {name.replace('.', '/')}.py, or start from the folder that holds it",
            ) from missing
        raise JShardError(
            f'{label} {name} imports "{missing.name}", which is not installed',
            hint=f"type: {INSTALL.get(missing.name or '', f'pip install {missing.name}')}",
        ) from missing


INSTALL = {"sklearn": 'pip install "jshard[digits]"'}


def check_arguments(
    label: str, function: Callable[..., Any], given: Mapping[str, Any], *, positional: int = 0, ours: Mapping[str, Any]
) -> None:
    """Raise an error for an unknown or a missing argument in `given`. jshard itself passes
    `positional` arguments without a name, then the keyword arguments `ours`."""
    every = list(parameters_of(function).values())
    takes = [parameter for parameter in every if parameter.kind <= parameter.POSITIONAL_OR_KEYWORD]
    if len(takes) < positional and not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in every):
        names = ", ".join(parameter.name for parameter in takes) or "nothing"
        raise JShardError(
            f"{label}, which takes {names}, and is called with {positional} arguments",
            hint="write loss(outputs, targets)",
        )
    parameters = every[positional:]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    named = {each.name: each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    free = [name for name in named if name not in ours]
    for name in given:
        if name in ours:
            raise JShardError(f'{label}, whose argument "{name}" jshard gives itself', hint=f"remove {name}")
        if name not in free and not takes_any:
            hint = did_you_mean(name, free, f"use {', '.join(free)}" if free else f"remove {name}")
            raise JShardError(f'{label}, which takes no argument "{name}"', hint=hint)
    for name in ours:
        if name not in named and not takes_any:
            raise JShardError(f'{label}, which takes no argument "{name}"', hint=f"add the parameter {name} to it")
    for name in free:
        if name not in given and named[name].default is inspect.Parameter.empty:
            raise JShardError(
                f'{label}, which needs an argument "{name}"', hint=f"write {name}: beside it, in a mapping"
            )


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """List the parameters of a function, or of a class's `__init__`: Flax's metaclass accepts any argument."""
    parameters = inspect.signature(function.__init__ if inspect.isclass(function) else function).parameters
    return dict(list(parameters.items())[1:] if inspect.isclass(function) else parameters)

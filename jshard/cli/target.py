"""The target of a command, parsed without JAX."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jshard.errors import JShardError
from jshard.signals.config import Configuration, load_configuration
from jshard.signals.schema import IMPORT_PATH
from jshard.signals.trust import EVERYTHING, Trust

if TYPE_CHECKING:
    from jshard.training.experiments.experiment import Experiment
    from jshard.training.function import Function


@dataclasses.dataclass(frozen=True)
class Target:
    """The target of a command: a configuration, and the experiment in it or a function under it."""

    path: str
    overrides: tuple[str, ...]
    function: str | None = None  # module:function
    arguments: tuple[str, ...] = ()  # the words after --args
    on: str | None = None  # data=4,tensor=2: a mesh in place of a configuration
    trust: Trust = EVERYTHING  # the code that the configuration may run

    @classmethod
    def named(cls, path: str, overrides: Sequence[str], chosen: argparse.Namespace) -> Target:
        """Return the experiment in a configuration as a target; `--trust` allows code of others."""
        return cls(path, tuple(overrides), trust=EVERYTHING if chosen.trust else Trust.beside(path))

    @classmethod
    def of(cls, chosen: argparse.Namespace) -> Target:
        """Parse the words of a command. Of the words after `--args`, words with = are overrides."""
        late = [word for word in chosen.args or () if "=" in word]
        arguments = tuple(word for word in chosen.args or () if word not in late)
        overrides = (*chosen.overrides, *late)
        if not is_function(chosen.path):
            for option, given in (("--args", chosen.args), ("--config", chosen.config), ("--on", chosen.on)):
                if given is not None:
                    raise JShardError(
                        f"{option} is for a function, and {chosen.path} is a configuration",
                        hint=f"remove {option}, or type: jshard {chosen.name} module:function --config {chosen.path}",
                    )
            return cls.named(chosen.path, overrides, chosen)
        if chosen.on and chosen.config:
            raise JShardError("--on and --config both give a mesh", hint="remove one of them")
        configuration = chosen.config or (not chosen.on and os.environ.get("JSHARD_CONFIG"))
        if not configuration and not chosen.on:
            raise JShardError(
                f'the function "{chosen.path}" has no mesh',
                hint="add --on data=4,tensor=2, or --config configs/mlp.yaml",
            )
        return cls(configuration or "--on", overrides, chosen.path, arguments, on=chosen.on)

    def __str__(self) -> str:
        """Return the target as typed after a command."""
        if self.function is None:
            return shlex.join([self.path, *self.overrides, *(["--trust"] if self.trust.everything else [])])
        where = ["--config", self.path] if self.on is None else ["--on", self.on]
        words = [self.function, *self.overrides, *where, *(["--args"] if self.arguments else [])]
        return shlex.join([*words, *self.arguments])

    def configuration(self) -> Configuration:
        """Read the configuration, without loading it or running code of it."""
        if self.on is None:
            return load_configuration(self.path, self.overrides, self.trust)
        sizes = {"mesh": mesh_sizes("--on", self.on), "axis_types": "auto"}
        return load_configuration({"jshard": sizes}, self.overrides, self.trust)

    def load(self) -> tuple[Configuration, Callable[..., Experiment | Function]]:
        """Load the configuration; return it and a builder of the program: `build(mesh, only_shapes=...)`."""
        from jshard.signals import active_config

        configuration = active_config.use(self.configuration())
        if self.function is None:
            from jshard.training.experiments.experiment import Experiment

            return configuration, functools.partial(Experiment.build, configuration)
        from jshard.training.function import FunctionCall

        call = FunctionCall.of(self.function, self.arguments)
        if active_config.configuration() is not configuration:  # replaced by the function's module
            configuration = active_config.use(self.configuration())
        return configuration, functools.partial(call.built, configuration)


def is_function(path: str) -> bool:
    """Return whether `path` is `module:function` and not a file."""
    return IMPORT_PATH.parse(path) is not None and not path.startswith("git:") and not os.path.exists(path)


def mesh_sizes(option: str, words: str) -> dict[str, int]:
    """Parse the sizes of a mesh from `data=4,tensor=2`."""
    parts = [word.partition("=") for word in words.split(",")]
    if not all(name.strip() and size.strip().isdigit() and int(size) for name, _, size in parts):
        raise JShardError(f'{option} "{words}" is not a mesh', hint=f"write it like {option} data=4,tensor=2")
    return {name.strip(): int(size) for name, _, size in parts}


def function_arguments(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add the options for a function: `--args` and `--config`, or several `--config`."""
    added = parser.add_argument_group(
        "a function in place of an experiment",
        "PATH may be module:function, found from this folder. Each word after --args is an argument: a shape such as "
        "float32[64,784], int32[64] or key[], with @data,None at its end to split axes over mesh axes (a+b is two); or "
        "module:name, naming an array, a jax.ShapeDtypeStruct, an NNX module or optimizer, a pytree of these, or a "
        "function that returns one without arguments. The parts of a tuple are several arguments.",
    )
    added.add_argument("--args", nargs="+", metavar="SHAPE", help="its arguments")
    how = "append" if several else "store"
    added.add_argument("--config", metavar="FILE", action=how, help="its configuration; default: JSHARD_CONFIG")
    if not several:
        added.add_argument(
            "--on",
            metavar="data=4,tensor=2",
            help="a mesh instead of a configuration: XLA places arrays by their NamedShardings",
        )

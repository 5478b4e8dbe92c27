"""The path of a parameter, by which signals claim it."""

from __future__ import annotations


class ParameterPath(str):
    """The path of a parameter of a function: below its argument (`inner`), or from the argument's name (`led`) where several
    arguments hold parameters. Globs fit `inner`, and those that begin with the argument's name also `led`: where a model has a
    part of that name too, both count."""

    argument: str
    inner: str  # "" of an array that is the argument itself
    led: str

    @classmethod
    def of(cls, argument: str, inner: str, *, led: bool = False) -> ParameterPath:
        whole = "/".join(filter(None, (argument, inner)))
        path = cls(whole if led or not inner else inner)
        path.argument, path.inner, path.led = argument, inner, whole
        return path


def below(path: str) -> str:
    """The path below its argument."""
    return path.inner if isinstance(path, ParameterPath) else path

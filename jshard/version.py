"""The version of jshard, written here alone, and of its dependencies."""

from __future__ import annotations

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Return the versions to be equal in all processes of a run."""
    import platform
    from importlib import metadata

    packages = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax")}
    return {"Python": platform.python_version(), **packages, "jshard": __version__}

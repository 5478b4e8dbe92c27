"""Which jshard this is, the one place where it is written, and what it runs with."""

from __future__ import annotations

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """List the releases that all processes of a run have to share."""
    import platform
    from importlib import metadata

    packages = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax")}
    return {"Python": platform.python_version(), **packages, "jshard": __version__}

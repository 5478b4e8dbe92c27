"""A pytest plugin for programs placed by hand, by NamedShardings: pretended devices, and three assertions.

# pytest.ini: jshard_devices = 8
def test_step():
    assert_equal_to_one_device(step, model, x)
    assert_collectives(step, model, x, all_reduce=3, all_gather=0)
    assert_fits(step, model, x, topology="v5e:2x4")
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest import Config, Parser

OPTION = "jshard_devices"


def pytest_addoption(parser: Parser) -> None:
    parser.addini(OPTION, "pretend this number of CPU devices, before any test imports JAX")


def pytest_configure(config: Config) -> None:
    """Pretend the devices of `jshard_devices`; without the key the plugin does nothing."""
    if count := config.getini(OPTION):
        from jshard.layouts.pretend import pretend

        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        pretend(int(count))


def assert_equal_to_one_device(f: Callable[..., Any], *args: object, **kwargs: Any) -> None:
    """Assert that `f` computes the same on its mesh as on one device: values and gradients, or the results of a step.

    Both sides run on whole numbers with exact sums, so equal means equal in every bit (`jshard.verify`).
    """
    from jshard.inspect.verify import verify

    with _mesh_of(args, kwargs):
        found = verify(f, *args, **kwargs)
    assert found.ok, f"\n{found}"


def assert_collectives(
    f: Callable[..., Any], *args: object, phase: str | None = None, wire: int | None = None, **counts: int
) -> None:
    """Assert the number of collectives of `f` for each kind named, and at most `wire` bytes of all kinds on a device.

    Kinds are all_reduce, all_gather, reduce_scatter, all_to_all and permute. XLA's own collectives count.
    `phase` counts only forward, backward or update.
    """
    from jshard.errors import JShardError, did_you_mean
    from jshard.inspect.plan import explain
    from jshard.kernels.collectives import COLLECTIVES

    for kind in counts:
        if kind not in COLLECTIVES:
            hint = did_you_mean(kind, COLLECTIVES, f"use {', '.join(sorted(COLLECTIVES))}")
            raise JShardError(f'assert_collectives has no collective "{kind}"', hint=hint)
    ledger = explain(f, *args)
    if phase is not None:
        ledger = ledger.only(phase=phase)
    for kind, expected in counts.items():
        rows = [line for line in ledger if line.collective == kind]
        found = sum(line.count for line in rows)
        assert found == expected, f"{found} {kind} instead of {expected}:\n{ledger}"
    total = sum(line.total for line in ledger)
    assert wire is None or total <= wire, (
        f"{total:,} B on the wire of a device, and at most {wire:,} are allowed:\n{ledger}"
    )


def assert_fits(f: Callable[..., Any], *args: object, topology: str, budget: int | None = None, **kwargs: Any) -> None:
    """Assert that `f`, compiled for a topology that need not be here, fits into a device, or into `budget` bytes of it."""
    from jshard.inspect.plan import plan

    memory = plan(f, *args, topology=topology, **kwargs).memory
    most = memory.capacity if budget is None else budget
    assert most is not None, f"no figure says how much memory a device of {topology} has; give budget="
    assert memory.needed <= most, f"{memory.needed:,} B on a device of {topology}, and {most:,} are there:\n{memory}"


@contextlib.contextmanager
def _mesh_of(args: tuple[object, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Load a configuration with the mesh of the arguments' NamedShardings, unless one is loaded."""
    from jshard.errors import JShardError
    from jshard.inspect.ledger.tracing import Traced
    from jshard.signals import active_config

    if active_config.configuration() is not None:
        yield
        return
    meshes = Traced(lambda *args, **kwargs: None, args, kwargs).meshes
    if len(meshes) != 1:
        raise JShardError(
            f"the arguments lie on {len(meshes)} meshes, and one is needed",
            hint="place one of them by jax.device_put(x, NamedSharding(mesh, P(...)))",
        )
    (mesh,) = meshes
    active_config.load({"jshard": {"mesh": dict(mesh.shape), "axis_types": "auto"}})
    try:
        yield
    finally:
        active_config.unload()

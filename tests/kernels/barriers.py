"""Find kernels that write to another device before they know that it is there.

Interpret mode can't: its devices enter a kernel together, so a missing entry barrier never shows. The jaxpr shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jshard.inspect.ledger.jaxpr_walk import is_remote
from jshard.programs.jaxprs import equations


def missing_barriers(jaxpr: Any) -> list[str]:
    """Return a sentence for each Pallas kernel in `jaxpr` that copies to another device before it waits at a barrier."""
    return [
        f'kernel "{_name(eqn)}" copies to another device before it has waited at a barrier; '
        "begin it with a signal to everyone whom it will write to, and a wait for as many"
        for eqn in _pallas_calls(jaxpr)
        if _copies_too_soon(eqn.params["jaxpr"])
    ]


def remote_copies(jaxpr: Any) -> int:
    """Count the equations of kernels in `jaxpr` that start a copy to another device."""
    return sum(is_remote(eqn) for kernel in _pallas_calls(jaxpr) for eqn in equations(kernel.params["jaxpr"]))


def _copies_too_soon(kernel: Any) -> bool:
    barrier = waited = False
    for eqn in equations(kernel):
        name = eqn.primitive.name
        barrier |= name == "get_barrier_semaphore"
        waited |= barrier and name == "semaphore_wait"  # whatever it waits for
        if not waited and is_remote(eqn):
            return True
    return False


def _pallas_calls(jaxpr: Any) -> Iterator[Any]:
    return (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "pallas_call")


def _name(eqn: Any) -> str:
    found = eqn.params.get("name") or eqn.params.get("name_and_src_info")
    return str(getattr(found, "name", found) or "without a name")

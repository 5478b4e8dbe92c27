"""Find kernels that write to another device before they know that it is there.

Interpret mode can't: its devices enter a kernel together, so a missing entry barrier never shows. The jaxpr shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax


def missing_barriers(jaxpr: Any) -> list[str]:
    """Return a sentence for each Pallas kernel in `jaxpr` that copies to another device before it waits at a barrier."""
    return [
        f'kernel "{_name(eqn)}" copies to another device before it has waited at a barrier; '
        "begin it with a signal to everyone whom it will write to, and a wait for as many"
        for eqn in _kernels(jaxpr)
        if _copies_too_soon(eqn.params["jaxpr"])
    ]


def remote_copies(jaxpr: Any) -> int:
    """Count the equations of kernels in `jaxpr` that start a copy to another device."""
    return sum(_is_remote(eqn) for kernel in _kernels(jaxpr) for eqn in every_equation(kernel.params["jaxpr"]))


def every_equation(jaxpr: Any) -> Iterator[Any]:
    """Yield equations in program order, each followed by those of the loops, branches and kernels in it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: not isinstance(x, (list, tuple))):
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                yield from every_equation(inner)


def _kernels(jaxpr: Any) -> Iterator[Any]:
    return (eqn for eqn in every_equation(jaxpr) if eqn.primitive.name == "pallas_call")


def _copies_too_soon(kernel: Any) -> bool:
    barrier = waited = False
    for eqn in every_equation(kernel):
        name = eqn.primitive.name
        barrier |= name == "get_barrier_semaphore"
        waited |= barrier and name == "semaphore_wait"  # whatever it waits for
        if not waited and _is_remote(eqn):
            return True
    return False


def _is_remote(eqn: Any) -> bool:
    # the last operand of a copy is the other device, None for one that stays here
    return eqn.primitive.name == "dma_start" and jax.tree.unflatten(eqn.params["tree"], eqn.invars)[-1] is not None


def _name(eqn: Any) -> str:
    found = eqn.params.get("name") or eqn.params.get("name_and_src_info")
    return str(getattr(found, "name", found) or "without a name")

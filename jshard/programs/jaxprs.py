"""Walking a jaxpr: its equations, and the jaxprs that lie in their parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from jax.extend import core

T = TypeVar("T")
Tree = Any  # arrays in lists, tuples and dicts, as JAX takes them
ClosedJaxpr = core.ClosedJaxpr
Atom = core.Var | core.Literal
Jaxpr = core.Jaxpr | core.ClosedJaxpr  # open or closed
Shaped = jax.Array | np.ndarray | jax.ShapeDtypeStruct  # an array, or the shape of one


class Eqn(Protocol):
    """One equation of a jaxpr, as `jax.extend.core.JaxprEqn`."""

    primitive: Any
    params: dict[str, Any]
    invars: list[Any]
    outvars: list[Any]
    source_info: Any
    ctx: Any
    effects: Any

    @property
    def replace(self) -> Callable[..., Any]: ...


class OpenJaxpr(Protocol):
    """A program without its constants, as `jax.extend.core.Jaxpr`."""

    constvars: list[Any]
    invars: list[Any]
    outvars: list[Any]
    eqns: list[Any]
    debug_info: Any

    @property
    def replace(self) -> Callable[..., Any]: ...


# Primitives that call a jaxpr on their operands one by one, and the parameter that holds it.
CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "checkpoint": "jaxpr",
    "remat2": "jaxpr", "remat": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr", "custom_lin": "call_jaxpr", "custom_vmap_call": "call", "by_hand": "jaxpr",
    "folded": "jaxpr",
}  # fmt: skip

CHECKPOINTS = frozenset(("checkpoint", "remat", "remat2"))  # a policy around one would take the place of its own
LOOPS = frozenset(("scan", "while"))


def bare(jaxpr: Any) -> Any:
    """The open jaxpr of a closed one."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def inner(eqn: Eqn) -> Iterator[Any]:
    """The jaxprs that one equation runs: bodies, branches, calls."""
    for value in eqn.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(bare(each), "eqns"):
                yield bare(each)


def holds(jaxpr: Jaxpr, primitives: Collection[str]) -> bool:
    """Whether one of these primitives is somewhere in a program."""
    return any(eqn.primitive.name in primitives for eqn in equations(jaxpr))


def called(eqn: Eqn) -> Any:
    """The jaxpr, closed or not, that an equation calls on its operands; None where it calls none."""
    found = eqn.params.get(CALLS.get(eqn.primitive.name, ""))
    return found if hasattr(bare(found), "eqns") else None


def bodies(eqn: Eqn, operands: Sequence[T]) -> Iterator[tuple[Any, list[T]]]:
    """Yield the jaxprs that an equation runs, each with those of `operands` that go into it; the last one returns the results.
    `operands` has a value for each operand of the equation."""
    name, params = eqn.primitive.name, eqn.params
    if (body := called(eqn)) is not None:
        yield bare(body), list(operands)
    elif name in ("scan", "shard_map"):
        yield bare(params["jaxpr"]), list(operands)
    elif name == "cond":
        yield from ((bare(branch), list(operands[1:])) for branch in params["branches"])
    elif name == "while":
        of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
        carried = operands[of_test + of_body :]
        yield bare(params["cond_jaxpr"]), [*operands[:of_test], *carried]
        yield bare(params["body_jaxpr"]), [*operands[of_test : of_test + of_body], *carried]


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Those that are no literals, which nothing can be asked for."""
    return [atom for atom in atoms if not hasattr(atom, "val")]


def is_in(atom: object, some: Container[Any]) -> bool:
    return not hasattr(atom, "val") and atom in some


def read_by(eqns: Iterable[Any]) -> set[Any]:
    """The variables that are operands of some equations."""
    return {atom for eqn in eqns for atom in variables(eqn.invars)}


def part_of(jaxpr: Any, eqns: Iterable[Any], inputs: Iterable[Any], results: Iterable[Any]) -> Any:
    """Return a program of some equations of another, from some of its variables to others."""
    names = jaxpr.debug_info.with_unknown_names()
    return type(jaxpr)([], list(inputs), list(results), list(eqns), debug_info=names)


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Every equation in program order, those of loops and branches where they stand."""
    for eqn in bare(jaxpr).eqns:
        yield eqn
        for each in inner(eqn):
            yield from equations(each)


def run(
    program: Any,
    xs: Sequence[Any],
    step: Callable[[Any, list[Any]], Sequence[Any]],
    constant: Callable[[Any], Any] = lambda literal: literal.val,
) -> list[Any]:
    """Run a jaxpr, each equation by `step(eqn, operands)`, which returns its results. `xs` are the inputs; where the jaxpr is
    to have other constants than its own, these stand before them."""
    jaxpr = bare(program)
    variables = *jaxpr.constvars, *jaxpr.invars
    own = program.consts if len(xs) < len(variables) else ()  # from JAX 0.12 on an open jaxpr has them too
    known = dict(zip(variables, (*own, *xs), strict=True))
    read = lambda atom: constant(atom) if hasattr(atom, "val") else known[atom]  # a literal, or a variable
    for eqn in jaxpr.eqns:
        known |= zip(eqn.outvars, step(eqn, list(map(read, eqn.invars))), strict=True)
    return list(map(read, jaxpr.outvars))


def bound(eqn: Eqn, xs: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation on these operands, in a list even where it has one."""
    outs = eqn.primitive.bind(*xs, **eqn.primitive.get_bind_params(eqn.params))
    return outs if eqn.primitive.multiple_results else [outs]


def scanned(eqn: Eqn) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried."""
    asked = eqn.params
    if "ft_in" in asked:
        consts, carried, *_ = (len(tree) for tree in asked["ft_in"].unpack())
        return consts, carried
    return asked["num_consts"], asked["num_carry"]


def closed_over(program: Jaxpr) -> tuple[Any, list[Any]]:
    """Return a program with the arrays that it closes over as its last arguments, and these."""
    consts, jaxpr = list(getattr(program, "consts", ())), bare(program)
    if not consts:
        return jaxpr, []
    invars, names = [*jaxpr.invars, *jaxpr.constvars], jaxpr.debug_info.with_unknown_names()
    return jaxpr.replace(constvars=[], invars=invars, debug_info=names), consts

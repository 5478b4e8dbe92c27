"""Tools for jaxprs: their equations and variables, an evaluator, a dataflow, and a cutter."""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard, TypeVar

import jax
import numpy as np
from jax._src.source_info_util import NameStack
from jax.extend import core
from jax.interpreters import partial_eval

T = TypeVar("T")
Fact = TypeVar("Fact")  # with `|`, as sets and booleans have it
Tree = Any  # arrays in lists, tuples and dicts, as JAX takes them
ClosedJaxpr = core.ClosedJaxpr
Shaped = jax.Array | np.ndarray | jax.ShapeDtypeStruct  # an array, or the shape of one


class Eqn(Protocol):
    """An equation of a jaxpr, as `jax.extend.core.JaxprEqn`."""

    primitive: Any
    params: dict[str, Any]
    invars: list[Any]
    outvars: list[Any]
    source_info: Any
    ctx: Any
    effects: Any

    @property
    def replace(self) -> Callable[..., Any]: ...


OpenJaxpr = core.Jaxpr
Jaxpr = core.Jaxpr | core.ClosedJaxpr  # open or closed

FOLDED = "folded"  # equal equations of several layers: each layer is a call of one program
# Primitives that call a jaxpr on their operands one by one, and the parameter that holds it.
CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "checkpoint": "jaxpr",
    "remat2": "jaxpr", "remat": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr", "custom_lin": "call_jaxpr", "custom_vmap_call": "call", "by_hand": "jaxpr",
    FOLDED: "jaxpr",
}  # fmt: skip

CHECKPOINTS = frozenset(("checkpoint", "remat", "remat2"))  # a policy around one would take the place of its own
LOOPS = frozenset(("scan", "while"))
NO_SCOPES = NameStack()


def bare(jaxpr: Any) -> Any:
    """Return the open jaxpr of a closed jaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def is_jaxpr(value: object) -> TypeGuard[Jaxpr]:
    return hasattr(bare(value), "eqns")


def inner(eqn: Eqn) -> Iterator[Any]:
    """Yield the jaxprs inside an equation: bodies, branches, calls."""
    for value in eqn.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if is_jaxpr(each):
                yield bare(each)


def level(program: Jaxpr) -> list[Any]:
    """Return the equations of a program's own level."""
    return bare(program).eqns


def equations(program: Jaxpr) -> Iterator[Any]:
    """Yield every equation in program order, inner equations at their place."""
    for eqn in level(program):
        yield eqn
        for each in inner(eqn):
            yield from equations(each)


def holds(jaxpr: Jaxpr, primitives: Collection[str]) -> bool:
    """Return whether a program has any of these primitives, at any depth."""
    return any(eqn.primitive.name in primitives for eqn in equations(jaxpr))


def called(eqn: Eqn) -> Any:
    """Return the jaxpr, closed or not, called by an equation on its operands; else None."""
    found = eqn.params.get(CALLS.get(eqn.primitive.name, ""))
    return found if is_jaxpr(found) else None


def bodies(eqn: Eqn, operands: Sequence[T]) -> Iterator[tuple[Any, list[T]]]:
    """Yield the jaxprs that an equation runs, each with its part of `operands`, a value for each
    operand of the equation. The last jaxpr returns the results."""
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
    """Return the variables among some atoms, without literals."""
    return [atom for atom in atoms if not hasattr(atom, "val")]


def is_in(atom: object, some: Container[Any]) -> bool:
    return not hasattr(atom, "val") and atom in some


def entry(table: Mapping[Any, T], atom: Any) -> T | None:
    """Return a variable's entry of a table; None for a literal or an unknown variable."""
    return None if hasattr(atom, "val") else table.get(atom)


def read_by(eqns: Iterable[Any]) -> set[Any]:
    """Return the variables read by some equations."""
    return {atom for eqn in eqns for atom in variables(eqn.invars)}


def makers(program: Jaxpr) -> dict[Any, Any]:
    """Return the equation behind each variable of a level."""
    return {variable: eqn for eqn in level(program) for variable in eqn.outvars}


def uses(program: Jaxpr) -> Mapping[Any, list[Any]]:
    """Return the equations of one level that read each variable, in program order. None stands for
    the end of the program, which reads its results."""
    found = collections.defaultdict[Any, list[Any]](list)
    for eqn in (*level(program), None):
        for variable in variables(bare(program).outvars if eqn is None else eqn.invars):
            found[variable].append(eqn)
    return found


# -- programs of some equations of others --


class Piece(NamedTuple):
    """A part of a program, and the numbers of the program's inputs read by it."""

    jaxpr: Any
    inputs: list[int]


def part_of(jaxpr: Any, eqns: Iterable[Any], inputs: Iterable[Any], results: Iterable[Any]) -> Any:
    """Return a program of some equations of another, from some of its variables to others."""
    names = jaxpr.debug_info.with_unknown_names()
    return type(jaxpr)([], list(inputs), list(results), list(eqns), debug_info=names)


def cut(program: Any, outs: Sequence[Any], given: Sequence[Any] = ()) -> Piece:
    """Cut out the equations that compute the variables `outs`. They read inputs of the program, and
    variables that are `given`, which are the last inputs of the piece."""
    jaxpr, eqns = bare(program), list[Any]()
    wanted = set(variables(outs)).difference(given)
    for eqn in reversed(level(jaxpr)):
        if not wanted.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            wanted.update(set(variables(eqn.invars)).difference(given))
    inputs = [n for n, variable in enumerate(jaxpr.invars) if variable in wanted]
    return Piece(part_of(jaxpr, eqns[::-1], [*(jaxpr.invars[n] for n in inputs), *given], outs), inputs)


def outline(program: Jaxpr, named: Callable[[Any], Hashable]) -> Hashable:
    """Describe a program without its variables. `named` describes an equation without its operands."""
    jaxpr = bare(program)
    places = {v: number for number, v in enumerate((*jaxpr.constvars, *jaxpr.invars))}
    of = lambda atom: literal(atom) if hasattr(atom, "val") else places[atom]
    lines: list[Hashable] = [tuple(v.aval for v in places)]
    for eqn in level(jaxpr):
        lines.append((named(eqn), tuple(map(of, eqn.invars))))
        places.update((v, len(places) + number) for number, v in enumerate(eqn.outvars))
    return *lines, tuple(map(of, jaxpr.outvars))


def literal(atom: Any) -> Hashable:
    """Describe a literal, in every bit of it."""
    value = np.asarray(atom.val)
    return atom.aval, value.dtype, value.tobytes()


def pruned(program: Any, outs: Sequence[bool] | None = None) -> Piece:
    """Remove equations that no result needs, also inside of others. `outs` chooses the results."""
    jaxpr = bare(program)
    outs = [True] * len(jaxpr.outvars) if outs is None else list(outs)
    live, used = partial_eval.dce_jaxpr(jaxpr, outs)
    return Piece(live, [number for number, is_used in enumerate(used) if is_used])


def with_equations(program: Any, eqns: Sequence[Any]) -> Any:
    """Return a program, closed or open, with other equations between its inputs and its results."""
    made = bare(program).replace(eqns=list(eqns))
    return made if program is bare(program) else program.replace(jaxpr=made)


def call_of(
    primitive: Any,
    jaxpr: Any,
    eqns: Sequence[Any],
    results: Sequence[Any],
    stack: NameStack = NO_SCOPES,
    body: Any = None,
) -> Any:
    """Return one equation that runs several and has some of their `results`, in the scopes of `stack`.
    It holds their program, or `body`, the program of equal equations."""
    made = {variable for eqn in eqns for variable in eqn.outvars}
    given = list(dict.fromkeys(v for eqn in eqns for v in variables(eqn.invars) if v not in made))
    params = {"jaxpr": part_of(jaxpr, eqns, given, results) if body is None else body}
    last, source = eqns[-1], eqns[-1].source_info.replace(name_stack=stack)
    made_by = {"primitive": primitive, "params": params, "source_info": source}
    return last.replace(invars=given, outvars=list(results), **made_by)


# -- runs and dataflows --


def evaluate(
    program: Any,
    xs: Sequence[Any],
    step: Callable[[Any, list[Any]], Sequence[Any]],
    constant: Callable[[Any], Any] = lambda literal: literal.val,
    known: dict[Any, Any] | None = None,
) -> list[Any]:
    """Run a jaxpr on its inputs `xs`. `step(eqn, operands)` returns the results of an equation.

    `xs` begins with the constants if the jaxpr is to have others than its own. `known` receives the
    values of all variables.
    """
    jaxpr, values = bare(program), {} if known is None else known
    variables = *jaxpr.constvars, *jaxpr.invars
    own = program.consts if len(xs) < len(variables) else ()  # from JAX 0.12 on an open jaxpr has them too
    values |= zip(variables, (*own, *xs), strict=True)
    read = lambda atom: constant(atom) if hasattr(atom, "val") else values[atom]  # a literal, or a variable
    for eqn in level(jaxpr):
        values |= zip(eqn.outvars, step(eqn, list(map(read, eqn.invars))), strict=True)
    return list(map(read, jaxpr.outvars))


def flow(
    program: Any,
    facts: Sequence[Fact],
    step: Callable[[Any, list[Fact]], Sequence[Fact]],
    nothing: Fact,
    *,
    inside: bool = True,
    known: dict[Any, Fact] | None = None,
) -> list[Fact]:
    """Return the facts of a program's results. `step(eqn, facts of its operands)` returns those of an
    equation's results.

    Literals and constants have the fact `nothing`. `known` receives the facts of all variables of this
    level. The flow goes inside of calls, branches and scans: `|` joins the facts of branches, and of
    each turn of a scan, to the fixpoint. A while loop is one step; with `inside=False` all equations are.
    """

    def result(eqn: Any, given: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        if name == "scan":
            consts, carried = scanned(eqn)
            turn = lambda given: through(eqn.params["jaxpr"], given)
            given = list(carried_on(given, slice(consts, consts + carried), turn))
        results = [through(*each) for each in bodies(eqn, given)] if name != "while" else []
        chosen_by = given[0] if name == "cond" else nothing
        by_result = zip(*results, strict=True)
        joined = [functools.reduce(operator.or_, each, chosen_by) for each in by_result]
        return joined if results else step(eqn, given)

    through = lambda program, given: flow(program, given, step, nothing)
    given = [*[nothing] * len(bare(program).constvars), *facts]
    return evaluate(bare(program), given, result if inside else step, lambda _: nothing, known)


def flow_back(
    program: Any,
    facts: Sequence[Any],
    step: Callable[[Any, list[Any]], Sequence[Any]],
    nothing: Any,
    join: Callable[[Any, Any], Any] = operator.or_,
) -> dict[Any, Any]:
    """Return facts of the variables of one level from `facts` of its results. `step(eqn, facts of its
    results)` returns those of an equation's operands.

    `join(earlier, later)` joins the facts of several uses. An unused variable has the fact `nothing`.
    """
    known = collections.defaultdict[Any, Any](lambda: nothing)

    def note(atoms: Sequence[Any], facts: Sequence[Any]) -> None:
        for atom, fact in reversed([*zip(atoms, facts, strict=True)]):
            if not hasattr(atom, "val"):
                known[atom] = join(fact, known[atom])

    note(bare(program).outvars, facts)
    for eqn in reversed(level(program)):
        note(eqn.invars, step(eqn, [known[variable] for variable in eqn.outvars]))
    return known


def settled(step: Callable[[T], T], start: T) -> T:
    """Return the fixpoint of a step, reached from `start`."""
    while (after := step(start)) != start:
        start = after
    return start


def carried_on(
    facts: Sequence[Fact], carry: slice, turn: Callable[[tuple[Fact, ...]], Sequence[Fact]]
) -> tuple[Fact, ...]:
    """Join the facts of what a loop carries with the first facts of its `turn`, to the fixpoint."""

    def joined(facts: tuple[Any, ...]) -> tuple[Any, ...]:
        after = [old | new for old, new in zip(facts[carry], turn(facts), strict=False)]
        return *facts[: carry.start or 0], *after, *facts[carry.stop :]

    return settled(joined, tuple(facts))


def dependent(program: Any, some: Sequence[bool], *, inside: bool = True) -> set[Any]:
    """Return the variables with a dependence on some inputs."""
    known: dict[Any, bool] = {}
    step = lambda eqn, given: [any(given)] * len(eqn.outvars)
    flow(program, some, step, False, inside=inside, known=known)
    return {variable for variable, depends in known.items() if depends}


def bound(eqn: Eqn, xs: Sequence[Any]) -> Sequence[Any]:
    """Return the results of an equation on these operands, always as a list."""
    outs = eqn.primitive.bind(*xs, **eqn.primitive.get_bind_params(eqn.params))
    return outs if eqn.primitive.multiple_results else [outs]


def scanned(eqn: Eqn) -> tuple[int, int]:
    """Return the numbers of a scan's constants and of its carry."""
    asked = eqn.params
    if "ft_in" in asked:
        consts, carried, *_ = (len(tree) for tree in asked["ft_in"].unpack())
        return consts, carried
    return asked["num_consts"], asked["num_carry"]


def closed_over(program: Jaxpr) -> tuple[Any, list[Any]]:
    """Return a program with its constants as last arguments, and their values."""
    consts, jaxpr = list(getattr(program, "consts", ())), bare(program)
    if not consts:
        return jaxpr, []
    invars, names = [*jaxpr.invars, *jaxpr.constvars], jaxpr.debug_info.with_unknown_names()
    return jaxpr.replace(constvars=[], invars=invars, debug_info=names), consts

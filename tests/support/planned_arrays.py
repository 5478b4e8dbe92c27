"""The arrays of a planned program as each device has them, from its Steps alone: what they are made of, and what that sends.

Nothing is made or traced. A walk over the equations makes a `Local` of each array.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from jshard.kernels import slices
from jshard.layers.partition.cut import CUT, sent
from jshard.layers.partition.local_sizes import axes_of, local_shape, ranges_of
from jshard.layers.partition.loops import AHEAD, ONE_TURN
from jshard.layers.partition.plan import (
    AT_REST,
    DONE,
    END,
    PUT_OFF,
    SHARED,
    Brought,
    Plan,
    Step,
    key_of,
    names_of,
)
from jshard.layers.remat import policy_of
from jshard.layouts.axes import factors
from jshard.layouts.primitives import FIXED, KEPT, LOOKUP, SCATTERS
from jshard.layouts.redistribution import plan_moves
from jshard.programs.jaxprs import CHECKPOINTS, Eqn, bare, called, is_in, scanned

Names = frozenset[str]
Bill = tuple[str, tuple[str, ...], int]  # a collective, its mesh axes, and the bytes of its payload
NOTHING: Names = frozenset()

NO_GRADIENT = frozenset("stop_gradient floor ceil round sign iota argmax argmin random_bits".split())
LINEAR = frozenset(  # their backward pass reads no operand
    "add add_any sub neg reshape transpose broadcast_in_dim convert_element_type reduce_sum copy concatenate pad slice split "
    "squeeze expand_dims cumsum rev stack tile name optimization_barrier".split()
)
PRODUCTS = frozenset("dot_general conv_general_dilated ragged_dot_general".split())
BILINEAR = PRODUCTS | {"mul"}
BY_INDEX = frozenset("gather dynamic_slice select_n".split())
SUMMED_AT_ONCE = frozenset(("gather", "reduce_max", "reduce_min", *SCATTERS))
DROPPED = frozenset("sharding_constraint reshard mesh_cast".split())


@dataclasses.dataclass(eq=False)
class Anew:
    """A stretch of the program that the backward pass computes again, but for what it `keeps`."""

    keeps: Callable[[Local], bool]
    outer: Anew | None


@dataclasses.dataclass(eq=False)
class Local:
    """One device's part of an array. `bills` are paid to make it, and `back` when a gradient goes through it."""

    of: list[Local]
    is_smooth: bool
    varying: Names  # the mesh axes that it varies over
    name: str  # of the primitive that makes it
    turns: int  # how often the loops around it make it
    anew: Anew | None
    eqn: Any = None
    bills: list[Bill] = dataclasses.field(default_factory=list)
    back: list[Bill] = dataclasses.field(default_factory=list)
    cut: Sequence[Bill] = ()  # of a piece of a parameter: what it costs to cut it
    ahead: int = 0  # of a layer's parameter that is gathered one layer ahead: how many layers there are


class Walk:
    """Walks a program by its plan."""

    def __init__(self, sizes: dict[str, int]):
        self.sizes = sizes
        self.known: dict[Any, Local] = {}  # by variable
        self.made: list[dict[Any, Local]] = [{}]  # what uses share: of the program, and of each shared call around
        self.locals: list[Local] = []
        self.turns, self.anew = 1, None

    def local(self, of: Iterable[Local], dtype: Any, varying: Iterable[str] = (), name: str = "", **more: Any) -> Local:
        is_smooth = jnp.issubdtype(dtype, jnp.inexact) and name not in NO_GRADIENT
        varying = frozenset(mesh_axis for mesh_axis in varying if self.sizes[mesh_axis] >= 2)
        self.locals.append(Local(list(of), is_smooth, varying, name, self.turns, self.anew, **more))
        return self.locals[-1]

    def shape(self, shape: Sequence[int], axes: Iterable[Iterable[str]]) -> list[int]:
        return list(local_shape(tuple(shape), tuple(map(tuple, axes)), self.sizes))

    # -- programs --

    def program(self, program: Any, plan: Plan, inputs: Sequence[Local]) -> list[Local]:
        jaxpr = bare(program)
        self.known.update((v, self.local([], v.aval.dtype)) for v in jaxpr.constvars)
        self.known.update(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            step = plan[key_of(eqn)]
            if step.fused is not None:
                pieces = self.equation(eqn, list(step.fused.inputs), step)
                self.known.update((v, pieces[at]) for v, at in step.fused.pieces.items())
            elif step.how != DONE:
                self.known.update(zip(eqn.outvars, self.equation(eqn, eqn.invars, step), strict=True))
        return self.arrived(jaxpr.outvars, plan[END].brought if END in plan else ())

    def read(self, atom: Any) -> Local:
        return self.known[atom] if is_in(atom, self.known) else self.local([], atom.aval.dtype)

    def arrived(self, atoms: Sequence[Any], brought: Sequence[Brought]) -> list[Local]:
        """Read variables: those that are forced, or moved as a loop carries them, as they arrive."""
        there = {
            _root(each): local for each, local in zip(brought, self.bring(brought), strict=True)
            if (each.source == each.target and each.names == names_of(each.target)) or isinstance(each.variable, Brought)
        }  # fmt: skip
        return [there[atom] if is_in(atom, there) else self.read(atom) for atom in atoms]

    def equation(self, eqn: Eqn, atoms: Sequence[Any], step: Step) -> list[Local]:
        name, operands = eqn.primitive.name, [self.read(atom) for atom in atoms]
        if step.marks:
            return self.marked(eqn, atoms, step)
        if step.body is not None:
            return self.program(step.body, step.inside[0], operands)
        if name in DROPPED:
            return operands
        if not step.inside:
            return self.leaf(eqn, atoms, operands, step)
        operands = self.arrived(atoms, step.brought)
        if step.how == SHARED:
            self.made.append({})
            results = self.program(called(eqn), step.inside[0], operands)
            self.made.pop()
            return results
        if name == "scan":
            return self.scan(eqn, operands, step)
        if name in ("cond", "while"):
            return self.branches(eqn, operands, step)
        body = eqn.params["jaxpr"] if name == "regathered" else called(eqn)
        if name in CHECKPOINTS or name == "regathered":
            return self.again(eqn.params.get("policy", ""), body, step.inside[0], operands)
        return self.program(body, step.inside[0], operands)

    def again(self, remat: Any, body: Any, plan: Plan, operands: Sequence[Local]) -> list[Local]:
        """Walk a program that the backward pass computes again, but for what a signal's words or a policy keep."""
        outer, self.anew = self.anew, Anew(_keeping(remat), self.anew)
        results = self.program(body, plan, operands)
        self.anew = outer
        return results

    def marked(self, eqn: Eqn, atoms: Sequence[Any], step: Step) -> list[Local]:
        """Let operands vary, so that their gradients stay unreduced."""
        before = {atoms[at]: self.known[atoms[at]] for at in step.marks if is_in(atoms[at], self.known)}
        for at, names in step.marks.items():
            if (atom := atoms[at]) in before:
                of = atom.aval.shape, atom.aval.dtype, None, step.operands[at], step.operands[at]
                one = Brought(atom, *of, names, None, (), ())
                key = "varying", id(before[atom]), names
                if key not in self.made[-1]:
                    self.made[-1][key] = self.moved(one, [before[atom]], before[atom].varying, names)
                self.known[atom] = self.made[-1][key]
        results = self.equation(eqn, atoms, dataclasses.replace(step, marks={}))
        self.known |= before
        return results

    def scan(self, eqn: Eqn, operands: list[Local], step: Step) -> list[Local]:
        (count, carried), outer, begin = scanned(eqn), self.turns, len(self.locals)
        program = eqn.params["jaxpr"], step.inside[0]
        if step.how != ONE_TURN:
            self.turns *= eqn.params["length"]
        one = [self.local([x], v.aval.dtype, x.varying, "turn") for x, v in zip(operands, eqn.invars, strict=True)]
        for local, axes in zip(one[count:], step.carried, strict=False):
            local.varying = self.local([], float, names_of(axes)).varying
        here = count + carried if step.how == ONE_TURN else count  # as many are read as they are outside
        inputs, remat = [*operands[:here], *one[here:]], step.remat or ("full" if step.how == AHEAD else "")
        results = self.again(remat, *program, inputs) if remat or step.regather else self.program(*program, inputs)
        ahead = {id(x) for x, claim in zip(one, step.claims, strict=True) if claim is not None and claim.store_prefetch}
        for local in self.locals[begin:] if step.how == AHEAD else ():
            source = local
            while source.of and source.name != "turn":
                source = source.of[0]
            local.ahead = eqn.params["length"] * (local.name == "all_gather" and id(source) in ahead)
        self.turns = outer
        for local, after in zip(one[count:][:carried] if step.how != ONE_TURN else (), results, strict=False):
            local.of.append(after)
        return [self.local([x], v.aval.dtype, x.varying) for x, v in zip(results, eqn.outvars, strict=True)]

    def branches(self, eqn: Eqn, operands: list[Local], step: Step) -> list[Local]:
        """Walk the branches of a cond, each of which counts, or one turn of a while."""
        if eqn.primitive.name == "cond":
            pairs = zip(eqn.params["branches"], step.inside, strict=True)
            results = [self.program(branch, plan, operands[1:]) for branch, plan in pairs]
        else:
            of_test, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            carry = operands[of_test + of_body :]
            results = [self.program(eqn.params["body_jaxpr"], step.inside[1], [*operands[of_test:][:of_body], *carry])]
            self.program(eqn.params["cond_jaxpr"], step.inside[0], [*operands[:of_test], *carry])
        each = zip(*results, eqn.outvars, step.results, strict=True)
        return [self.local(some, v.aval.dtype, names_of(axes)) for *some, v, axes in each]

    # -- equations --

    def leaf(self, eqn: Eqn, atoms: Sequence[Any], operands: Sequence[Local], step: Step) -> list[Local]:
        name, permutes = eqn.primitive.name, self.permutes(eqn, step) if step.how == CUT else []
        if permutes and step.claims[0] is None:
            return [self.cut(eqn, self.bring(step.brought)[0], permutes)] * len(eqn.outvars)
        if step.how in (AT_REST, PUT_OFF, CUT):
            varying = operands[0].varying if operands else NOTHING
            return [self.local(operands, v.aval.dtype, varying, name, eqn=eqn, cut=permutes) for v in eqn.outvars]
        beyond = [x.varying - names_of(axes) for x, axes in zip(operands, step.operands, strict=True)]
        brought, there = self.bring(step.brought, NOTHING.union(*beyond)), {*map(_root, step.brought)}
        if name == "by_hand" and eqn.params["rule"].sent is not None:
            self.by_hand(eqn, step, brought)
        of = [*brought, *(x for x, atom in zip(operands, atoms, strict=True) if not is_in(atom, there))]
        varying, results = NOTHING.union(*(x.varying for x in of)), list[Local]()
        for number, v in enumerate(eqn.outvars):
            bills, back = self.sums(eqn, step, number)
            names = varying.difference(*(names for op, names, _ in bills if op == "all_reduce"))
            names = names if step.gathers is None else names_of(step.results[number])
            results.append(self.local(of, v.aval.dtype, names, name, eqn=eqn, bills=bills, back=back))
        return results

    def sums(self, eqn: Eqn, step: Step, number: int) -> tuple[list[Bill], list[Bill]]:
        """Return what is summed over devices for a result, and what its gradient pays."""
        name, found, bills, back = eqn.primitive.name, factors(eqn), list[Bill](), list[Bill]()
        if found is None:
            return bills, back
        of, aval, over = found.results[number], eqn.outvars[number].aval, list[tuple[str, ...]]()
        for factor, kind in enumerate(found.kinds):
            is_summed = number in found.sums and not any(factor in each for each in of)
            kept = (KEPT, FIXED) if name == "gather" else (KEPT, FIXED, LOOKUP)
            if factor in step.choice and (is_summed or kind not in kept):
                over.append(step.choice[factor])
        axes, dtype = [*map(list, axes_of(of, step.choice))], jnp.dtype("int32") if aval.dtype == bool else aval.dtype
        claim = next((claim for claim in step.claims if claim is not None), None)
        if claim is not None and name in PRODUCTS and jnp.issubdtype(dtype, jnp.floating):
            dtype = jnp.dtype(claim.dtype.reduce or claim.dtype.compute or dtype)
        for names in [tuple(itertools.chain(*over))] if name in SUMMED_AT_ONCE else over:
            for mesh_axis in [each for each in names if each in step.scattered]:
                shape = self.shape(aval.shape, axes)
                bills.append(_bill("reduce_scatter", [mesh_axis], shape, dtype))
                back.append(_bill("all_gather", [mesh_axis], shape, dtype))
                axes[1 if aval.ndim > 2 else 0].append(mesh_axis)
            left = [each for each in names if each not in step.scattered]
            bills.append(_bill("all_reduce", left, self.shape(aval.shape, axes), dtype))
        return bills, back

    def permutes(self, eqn: Eqn, step: Step) -> list[Bill]:
        """Return what a cut along a split axis sends, one bill a round."""
        aval, (axes,) = eqn.invars[0].aval, step.operands
        ((axis, ranges),) = [(axis, some) for axis, some in ranges_of(eqn, aval.shape).items() if axes[axis]]
        devices, (*shape,) = math.prod(self.sizes[name] for name in axes[axis]), self.shape(aval.shape, axes)
        bills = []
        for first, *_ in sent(ranges, shape[axis], devices):
            if first.source != first.target:
                bills.append(_bill("permute", axes[axis], [*shape[:axis], first.size, *shape[axis + 1 :]], aval.dtype))
        return bills

    def cut(self, eqn: Eqn, source: Local, bills: Sequence[Bill]) -> Local:
        key = "cut", id(source), str(eqn.params)
        if key not in self.made[-1]:
            dtype = eqn.outvars[0].aval.dtype
            self.made[-1][key] = self.local([source], dtype, source.varying, "moved", bills=bills, back=bills)
        return self.made[-1][key]

    def by_hand(self, eqn: Eqn, step: Step, brought: list[Local]) -> None:
        """Add what a rule by hand says that it sends, for each operand."""
        names, forward, backward = eqn.params["rule"].sent(eqn, step, self.sizes)
        for at, payload in enumerate(forward):
            bills, back = [("permute", names, payload)], [("permute", names, 0 if at else backward)]
            one, dtype = brought[at], eqn.invars[at].aval.dtype
            brought[at] = self.local([one], dtype, one.varying, bills=bills, back=back)

    # -- what is brought --

    def bring(self, brought: Sequence[Brought], more: Names = NOTHING) -> list[Local]:
        """Bring arrays, varying over `more` mesh axes too."""
        made: list[Local] = []
        for each in brought:
            made.append(self.one(each, made, more))
        return made

    def one(self, one: Brought, beside: Sequence[Local], more: Names) -> Local:
        while one.before is not None:
            one = one.before
        key = id(one), more
        found = next((made[key] for made in reversed(self.made) if key in made), None)
        if found is not None:
            return found
        if one.parts:
            found = self.put_off(one, more)
        elif one.variable is None:
            found = self.moved(one, beside, NOTHING.union(*(x.varying for x in beside)), more)
        else:
            inner = isinstance(one.variable, Brought)
            source = self.one(one.variable, beside, more) if inner else self.known[one.variable]
            if one.rest is None:
                found = self.moved(one, [source], source.varying, more)
            else:
                found = self.gathered(one, source, more)
        self.made[-1][key] = found
        return found

    def put_off(self, one: Brought, more: Names) -> Local:
        """Make what was put off of its operands, and move it where it is not made as it is needed."""
        is_moved, recipe = one.parts[-1].variable is None, self.known.get(one.variable)
        of = self.bring(one.parts[:-1] if is_moved else one.parts, more)
        varying = NOTHING.union(*(x.varying for x in of))
        if recipe is not None and recipe.cut:
            made = self.cut(recipe.eqn, of[0], recipe.cut)
        else:
            name, eqn = ("", None) if recipe is None else (recipe.name, recipe.eqn)
            made = self.local(of, one.dtype, varying if is_moved else varying | one.names, name, eqn=eqn)
        return self.moved(one.parts[-1], [made], varying, more) if is_moved else made

    def gathered(self, one: Brought, source: Local, more: Names) -> Local:
        """Gather a stored parameter, once for all uses that vary alike, and move it."""
        assert one.rest is not None
        names, rest, in_use = one.names | more, one.rest, names_of(one.source)
        missing = [(axis, name) for axis, each in enumerate(rest) for name in each if name not in one.source[axis]]
        own = {name for _, name in missing}
        rows = [name for name in dict.fromkeys((*slices.loaded_across(), *one.rows)) if name in names - own - in_use]
        dtype, shape = jnp.dtype(one.wire or one.dtype), self.shape(one.shape, rest)
        key = "gathered", id(source), one.dtype, dtype, names & {*own, *rows}
        if key not in self.made[-1]:
            bills, back = [], [_bill("all_reduce", [name], shape, one.dtype) for name in rows]
            for axis, name in reversed(missing):
                shape[axis] *= self.sizes[name]
                bills.append(_bill("all_gather", [name], shape, dtype))
                back += [_bill("reduce_scatter", [name], shape, one.dtype)] * (name in names)
            varying = in_use | (names & {*own, *rows})
            self.made[-1][key] = self.local([source], dtype, varying, "all_gather", bills=bills, back=back)
        full = self.made[-1][key]
        return self.moved(dataclasses.replace(one, dtype=dtype, wire=None), [full], full.varying, more)

    def moved(self, one: Brought, of: Sequence[Local], varying: Names, more: Names) -> Local:
        """Move an array from its source to its target, and let it vary."""
        names, steps, have = one.names | more, plan_moves(one.source, one.target), [*map(list, one.source)]
        bills, back, varying = list[Bill](), list[Bill](), varying | names_of(one.source)

        def vary() -> Names:
            back.append(_bill("all_reduce", sorted(names - varying), self.shape(one.shape, have), one.dtype))
            return varying | names

        if one.wire is not None and any(step.kind != "slice" for step in steps):
            varying = vary()
        for step in steps:
            over, before = [step.mesh_axis], self.shape(one.shape, have)
            if step.kind != "all_gather":
                have[step.axis].append(step.mesh_axis)
            if step.kind == "slice":
                back += [_bill("all_gather", over, before, one.dtype)] * (step.mesh_axis not in varying)
                varying |= {*over}
                continue
            have[step.source].remove(step.mesh_axis)
            if step.kind == "all_to_all":
                bills.append(_bill("all_to_all", over, before, one.dtype))
                back.append(bills[-1])
                continue
            bills.append(_bill("all_gather", over, self.shape(one.shape, have), jnp.dtype(one.wire or one.dtype)))
            if step.mesh_axis in names:
                back.append(_bill("reduce_scatter", over, self.shape(one.shape, have), one.dtype))
            else:
                varying -= {*over}
        varying = vary()
        return self.local(of, one.dtype, varying, "moved" if steps else "pvary", bills=bills, back=back)


def _bill(op: str, names: Iterable[str], shape: Iterable[int], dtype: Any) -> Bill:
    return op, tuple(names), math.prod(shape) * dtype.itemsize


def _root(one: Brought) -> Any:
    return _root(one.variable) if isinstance(one.variable, Brought) else one.variable


def _keeping(remat: Any) -> Callable[[Local], bool]:
    """Return whether a checkpoint keeps an array, by the words of a signal or the policy of a program."""
    policy: Any = policy_of(remat) if isinstance(remat, (str, tuple)) else remat

    def keeps(x: Local) -> bool:
        if x.eqn is None or policy is None:
            return remat == "" and x.name == "moved"
        is_sum = remat == "products" and bool(x.bills)
        return is_sum or policy(x.eqn.primitive, *(v.aval for v in x.eqn.invars), **x.eqn.params) is True

    return keeps

"""Bytes on the wire of a planned program, forward and backward, from its Steps alone: no array, and no trace of what devices run.

Each array becomes a node, of the nodes that it is made of. Gradients flow where an input that is differentiated leads to a result.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from jshard.kernels import slices
from jshard.kernels.collectives import COLLECTIVES
from jshard.layers.partition import Program
from jshard.layers.partition.cut import CUT, sent
from jshard.layers.partition.local_sizes import axes_of, local_shape, ranges_of
from jshard.layers.partition.loops import AHEAD, ONE_TURN
from jshard.layers.partition.plan import AT_REST, CALL, DONE, END, PUT_OFF, SHARED, Brought, Plan, Step, key_of, names_of
from jshard.layers.remat import _policy
from jshard.layouts.axes import factors
from jshard.layouts.primitives import FIXED, KEPT, LOOKUP, SCATTERS
from jshard.layouts.redistribution import plan_moves
from jshard.programs.jaxprs import CHECKPOINTS, Eqn, bare, called, scanned

Names = frozenset[str]
Bytes = dict[tuple[str, str, str], int]  # by phase, collective and mesh axes
Bill = tuple[str, tuple[str, ...], int]  # a collective, over which mesh axes, and the bytes of its payload

NO_GRADIENT = frozenset("stop_gradient floor ceil round sign iota argmax argmin random_bits".split())
LINEAR = frozenset(
    "add add_any sub neg reshape transpose broadcast_in_dim convert_element_type reduce_sum copy concatenate pad slice split "
    "squeeze expand_dims cumsum rev stack tile name optimization_barrier sharding_constraint".split()
)
BILINEAR = frozenset("mul dot_general conv_general_dilated ragged_dot_general".split())
SUMMED_AT_ONCE = frozenset(("gather", "reduce_max", "reduce_min", *SCATTERS))


@dataclasses.dataclass(eq=False)
class Region:
    """What the backward pass computes anew, but for what `keeps` says."""

    keeps: Callable[[Node], bool]
    outer: Region | None


@dataclasses.dataclass(eq=False)
class Node:
    """One device's part of an array, made of others; `bills` are paid to make it, `back` when its gradient passes."""

    of: list[Node]
    name: str
    is_smooth: bool
    varying: Names
    turns: int
    region: Region | None
    bills: list[Bill] = dataclasses.field(default_factory=list)
    back: list[Bill] = dataclasses.field(default_factory=list)
    eqn: Any = None
    cut: Sequence[Bill] = ()  # of a piece of a parameter: what it costs to cut it
    ahead: int = 0  # of what is gathered one layer ahead: of how many layers

    @property
    def flows(self) -> bool:
        return self.is_smooth and self.name not in NO_GRADIENT


LAST=[]
class Steps:
    """A walk over a program by its plan."""

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = {name: size for name, size in sizes.items() if size >= 2}
        self.all_sizes = dict(sizes)
        self.known: dict[Any, Node] = {}
        self.brought: list[dict[Any, Node]] = [{}]
        self.nodes: list[Node] = []
        self.turns, self.region = 1, None

    def node(self, of: Iterable[Node], dtype: Any, varying: Names = frozenset(), name: str = "", **more: Any) -> Node:
        is_smooth = jnp.issubdtype(dtype, jnp.inexact)
        made = Node(list(of), name, is_smooth, varying, self.turns, self.region, **more)
        self.nodes.append(made)
        return made

    def split_over(self, names: Iterable[str]) -> Names:
        return frozenset(name for name in names if name in self.sizes)

    # -- programs --

    def program(self, program: Any, plan: Plan, inputs: Sequence[Node]) -> list[Node]:
        jaxpr = bare(program)
        self.known.update((v, self.node([], v.aval.dtype)) for v in jaxpr.constvars)
        self.known.update(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            step = plan[key_of(eqn)]
            if step.fused is not None:
                pieces = self.equation(eqn, step.fused.inputs, step)
                self.known.update((v, pieces[at]) for v, at in step.fused.pieces.items())
            elif step.how != DONE:
                self.known.update(zip(eqn.outvars, self.equation(eqn, eqn.invars, step), strict=True))
        return self.arrived(jaxpr.outvars, plan[END].brought if END in plan else ())

    def read(self, atom: Any) -> Node:
        return self.node([], atom.aval.dtype) if isinstance(atom, Literal) else self.known[atom]

    def arrived(self, atoms: Sequence[Any], brought: Sequence[Brought]) -> list[Node]:
        """Read variables, those that are brought as they arrive."""
        there = {
            _root(each): node for each, node in zip(brought, self.bring(brought), strict=True)
            if each.source == each.target and each.names == names_of(each.target) or isinstance(each.variable, Brought)
        }  # fmt: skip
        return [self.read(atom) if isinstance(atom, Literal) or atom not in there else there[atom] for atom in atoms]

    def equation(self, eqn: Eqn, atoms: Sequence[Any], step: Step) -> list[Node]:
        name = eqn.primitive.name
        operands = [self.read(atom) for atom in atoms]
        if step.marks:
            return self._marked(eqn, atoms, step)
        if step.how in (CALL, SHARED):
            self.brought.append({})
            made = self.program(called(eqn), step.inside[0], self.arrived(atoms, step.brought))
            inside = self.brought.pop()
            if step.how == CALL:
                self.brought[-1].update(inside)
            return made
        if step.body is not None:
            return self.program(step.body, step.inside[0], operands)
        if name == "scan":
            return self._scan(eqn, self.arrived(atoms, step.brought), step)
        if name in ("cond", "while"):
            return self._branches(eqn, self.arrived(atoms, step.brought), step)
        if name in CHECKPOINTS or name == "regathered":
            keeps = _kept_by("") if name == "regathered" else _kept_by(eqn.params["policy"])
            return self._anew(keeps, lambda: self.program(eqn.params["jaxpr"], step.inside[0], self.arrived(atoms, step.brought)))
        if step.inside:
            return self.program(called(eqn), step.inside[0], self.arrived(atoms, step.brought))
        if name in ("sharding_constraint", "reshard", "mesh_cast"):
            return operands
        return self._leaf(eqn, atoms, operands, step)

    def _marked(self, eqn: Eqn, atoms: Sequence[Any], step: Step) -> list[Node]:
        """Let operands vary first."""
        before = {}
        for at, names in step.marks.items():
            atom = atoms[at]
            if isinstance(atom, Literal):
                continue
            before[atom] = node = self.known[atom]
            key = "varying", id(node), names
            if key not in self.brought[-1] and (missing := self.split_over(names) - node.varying):
                shape = local_shape(atom.aval.shape, step.operands[at], self.all_sizes)
                back = [self._bill("all_reduce", sorted(missing), shape, atom.aval.dtype)]
                self.brought[-1][key] = self.node([node], atom.aval.dtype, node.varying | missing, back=back)
            self.known[atom] = self.brought[-1].get(key, node)
        made = self.equation(eqn, atoms, dataclasses.replace(step, marks={}))
        self.known |= before
        return made

    def _anew(self, keeps: Any, run: Callable[[], list[Node]]) -> list[Node]:
        outer, self.region = self.region, Region(keeps, self.region)
        made = run()
        self.region = outer
        return made

    def _scan(self, eqn: Eqn, operands: list[Node], step: Step) -> list[Node]:
        count, carried = scanned(eqn)
        outer = self.turns
        if step.how != ONE_TURN:
            self.turns *= eqn.params["length"]
        one = [self.node([x], v.aval.dtype, x.varying, "turn") for x, v in zip(operands, eqn.invars, strict=True)]
        consts, over = operands[:count], one[count + carried :]
        carry = operands[count:][:carried] if step.how == ONE_TURN else one[count:][:carried]
        for node, axes in zip(carry, step.carried, strict=False):
            node.varying = self.split_over(names_of(axes))
        run = lambda: self.program(eqn.params["jaxpr"], step.inside[0], [*consts, *carry, *over])
        begin, remat = len(self.nodes), step.remat or ("full" if step.how == AHEAD else "")
        made = self._anew(_kept_by(remat), run) if remat or step.regather else run()
        for node in self.nodes[begin:] if step.how == AHEAD else ():
            node.ahead = eqn.params["length"] if node.name == "all_gather" else 0
        self.turns = outer
        if step.how != ONE_TURN:
            for node, after in zip(carry, made, strict=False):
                node.of.append(after)
        return [self.node([x], v.aval.dtype, x.varying) for x, v in zip(made, eqn.outvars, strict=True)]

    def _branches(self, eqn: Eqn, operands: list[Node], step: Step) -> list[Node]:
        if eqn.primitive.name == "cond":
            made = [
                self.program(branch, plan, operands[1:])
                for branch, plan in zip(eqn.params["branches"], step.inside, strict=True)
            ]
        else:
            of_test, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            carry = operands[of_test + of_body :]
            made = [self.program(eqn.params["body_jaxpr"], step.inside[1], [*operands[of_test:][:of_body], *carry])]
            self.program(eqn.params["cond_jaxpr"], step.inside[0], [*operands[:of_test], *carry])
        return [
            self.node(each, v.aval.dtype, self.split_over(names_of(axes)))
            for *each, v, axes in zip(*made, eqn.outvars, step.results, strict=True)
        ]

    def _leaf(self, eqn: Eqn, atoms: Sequence[Any], operands: Sequence[Node], step: Step) -> list[Node]:
        bills = self._permutes(eqn, step) if step.how == CUT else []
        if bills and step.claims[0] is None:
            node = self._cut(eqn, self.bring(step.brought)[0], eqn.outvars[0].aval.dtype, bills)
            return [node] * len(eqn.outvars)
        name = eqn.primitive.name
        if step.how in (AT_REST, PUT_OFF, CUT):
            varying = operands[0].varying if operands else frozenset()
            return [self.node(operands, v.aval.dtype, varying, eqn.primitive.name, eqn=eqn, cut=bills) for v in eqn.outvars]
        beyond = [node.varying - names_of(axes) for node, axes in zip(operands, step.operands, strict=True)]
        arrived = self.bring(step.brought, frozenset().union(*beyond))
        there = {_root(each) for each in step.brought}
        if name == "by_hand" and eqn.params["rule"].sent is not None:
            names, forward, backward = eqn.params["rule"].sent(eqn, step, self.all_sizes)
            for at, payload in enumerate(forward):
                node = arrived[at] = self.node(arrived[at : at + 1], eqn.invars[at].aval.dtype, arrived[at].varying)
                node.bills = [("permute", names, payload)]
            arrived[0].back = [("permute", names, backward)]
        of = [*arrived, *(x for x, atom in zip(operands, atoms, strict=True) if isinstance(atom, Literal) or atom not in there)]
        varying = frozenset().union(*(node.varying for node in of))
        made = []
        for number, v in enumerate(eqn.outvars):
            bills, back = self._sums(eqn, step, number)
            summed = {name for op, names, _ in bills if op == "all_reduce" for name in names}
            names = varying - summed if not step.gathers else self.split_over(names_of(step.results[number]))
            made.append(self.node(of, v.aval.dtype, names, eqn.primitive.name, bills=bills, back=back, eqn=eqn))
        return made

    def _permutes(self, eqn: Eqn, step: Step) -> list[Bill]:
        """Return what a cut along a split axis sends, a round at a time."""
        aval, (axes,) = eqn.invars[0].aval, step.operands
        ((axis, ranges),) = [(axis, some) for axis, some in ranges_of(eqn, aval.shape).items() if axes[axis]]
        devices, shape = math.prod(self.all_sizes[name] for name in axes[axis]), list(local_shape(aval.shape, axes, self.all_sizes))
        rounds = [each for each in sent(ranges, shape[axis], devices) if each[0].source != each[0].target]
        return [self._bill("permute", axes[axis], [*shape[:axis], each[0].size, *shape[axis + 1 :]], aval.dtype) for each in rounds]

    def _cut(self, eqn: Eqn, source: Node, dtype: Any, bills: Sequence[Bill]) -> Node:
        key = "cut", id(source), str(eqn.params)
        if key not in self.brought[-1]:
            self.brought[-1][key] = self.node([source], dtype, source.varying, "moved", bills=bills, back=bills)
        return self.brought[-1][key]

    def _sums(self, eqn: Eqn, step: Step, number: int) -> tuple[list[Bill], list[Bill]]:
        name, found, choice = eqn.primitive.name, factors(eqn), step.choice
        if found is None or not choice:
            return [], []
        of, aval = found.results[number], eqn.outvars[number].aval
        over = []
        for factor, kind in enumerate(found.kinds):
            if number in found.sums and not any(factor in each for each in of):
                kind = "sum"
            if kind not in (KEPT, FIXED, LOOKUP) and factor in choice:
                over.append(choice[factor])
        if name == "gather":
            over += [names for factor, names in choice.items() if found.kinds[factor] == LOOKUP]
        if name in SUMMED_AT_ONCE:
            over = [tuple(itertools.chain(*over))] if over else []
        axes, bills, back = list(axes_of(of, choice)), [], []
        dtype = jnp.int32 if aval.dtype == bool else aval.dtype
        for names in over:
            for each in [each for each in names if each in step.scattered]:
                at = 1 if aval.ndim > 2 else 0
                shape = local_shape(aval.shape, tuple(axes), self.all_sizes)
                bills.append(self._bill("reduce_scatter", [each], shape, dtype))
                back.append(self._bill("all_gather", [each], shape, dtype))
                axes[at] = (*axes[at], each)
            if left := [each for each in names if each not in step.scattered and each in self.sizes]:
                bills.append(self._bill("all_reduce", left, local_shape(aval.shape, tuple(axes), self.all_sizes), dtype))
        return bills, back

    # -- what is brought --

    def _bill(self, op: str, names: Iterable[str], shape: Sequence[int], dtype: Any) -> Bill:
        return op, tuple(names), math.prod(shape) * jnp.dtype(dtype).itemsize

    def bring(self, brought: Sequence[Brought], more: Names = frozenset()) -> list[Node]:
        made: list[Node] = []
        for each in brought:
            made.append(self._bring(each, made, more))
        return made

    def _bring(self, one: Brought, beside: Sequence[Node], more: Names) -> Node:
        while one.before is not None:
            one = one.before
        key = id(one), more
        for memo in reversed(self.brought):
            if key in memo:
                return memo[key]
        if one.parts:
            *parts, last = one.parts
            recipe = self.known.get(one.variable)
            of = self.bring(one.parts if last.variable is not None else parts, more)
            varying = frozenset().union(*(x.varying for x in of))
            node = self.node(of, one.dtype, varying, "" if recipe is None else recipe.name, eqn=recipe and recipe.eqn)
            if recipe is not None and recipe.cut:
                node = self._cut(recipe.eqn, of[0], one.dtype, recipe.cut)
            if last.variable is None:
                node = self._moved(last, [node], varying, more)
            else:
                node.varying |= self.split_over(one.names)
        elif one.variable is None:
            node = self._moved(one, list(beside), frozenset().union(*(x.varying for x in beside)), more)
        else:
            source = self._bring(one.variable, beside, more) if isinstance(one.variable, Brought) else self.known[one.variable]
            varying = source.varying | self.split_over(names_of(one.source))
            node = self._gathered(one, source, more) if one.rest is not None else self._moved(one, [source], varying, more)
        self.brought[-1][key] = node
        return node

    def _gathered(self, one: Brought, source: Node, more: Names) -> Node:
        """Gather a stored parameter."""
        names, rest = self.split_over(one.names | more), one.rest
        assert rest is not None
        missing = [(axis, name) for axis, each in enumerate(rest) for name in each if name not in one.source[axis]]
        missing = [(axis, name, name in names) for axis, name in missing if name in self.sizes]
        own = {name for _, name, _ in missing}
        between = [
            name for name in dict.fromkeys((*slices.loaded_across(), *one.rows)) if name in names - own - names_of(one.source)
        ]
        key = "gathered", id(source), one.dtype, str(one.wire), tuple(missing), tuple(between)
        if key not in self.brought[-1]:
            shape = list(local_shape(one.shape, rest, self.all_sizes))
            back = [self._bill("all_reduce", [name], shape, one.dtype) for name in between]
            bills = []
            for axis, name, varies in reversed(missing):
                shape[axis] *= self.sizes[name]
                bills.append(self._bill("all_gather", [name], shape, one.wire or one.dtype))
                if varies:
                    back.append(self._bill("reduce_scatter", [name], shape, one.dtype))
            varying = self.split_over(names_of(one.source)) | {name for _, name, varies in missing if varies} | {*between}
            self.brought[-1][key] = self.node([source], one.dtype, varying, "all_gather", bills=bills, back=back)
        gathered = self.brought[-1][key]
        return self._moved(dataclasses.replace(one, dtype=one.wire or one.dtype, wire=None), [gathered], gathered.varying, more)

    def _moved(self, one: Brought, of: list[Node], varying: Names, more: Names) -> Node:
        names, have, back, bills = self.split_over(one.names | more), list(map(list, one.source)), list[Bill](), list[Bill]()
        steps = plan_moves(one.source, one.target)
        shape = lambda: local_shape(one.shape, tuple(map(tuple, have)), self.all_sizes)

        def vary() -> Names:
            if missing := names - varying:
                back.append(self._bill("all_reduce", sorted(missing), shape(), one.dtype))
            return varying | names

        if one.wire is not None and any(step.kind != "slice" for step in steps):
            varying = vary()
        for step in steps:
            before, is_split = shape(), step.mesh_axis in self.sizes
            if step.kind == "slice":
                have[step.axis].append(step.mesh_axis)
                if is_split and step.mesh_axis not in varying:
                    back.append(self._bill("all_gather", [step.mesh_axis], before, one.dtype))
                varying |= {step.mesh_axis} if is_split else set()
                continue
            have[step.source].remove(step.mesh_axis)
            if step.kind == "all_to_all":
                have[step.axis].append(step.mesh_axis)
                if is_split:
                    bills.append(self._bill("all_to_all", [step.mesh_axis], before, one.dtype))
                    back.append(bills[-1])
            elif is_split:
                bills.append(self._bill("all_gather", [step.mesh_axis], shape(), one.wire or one.dtype))
                if step.mesh_axis in names:
                    back.append(self._bill("reduce_scatter", [step.mesh_axis], shape(), one.dtype))
                else:
                    varying -= {step.mesh_axis}
        varying = vary()
        name = "moved" if steps else "pvary"
        return self.node(of, one.dtype, varying, name, bills=bills, back=back)


def _root(one: Brought) -> Any:
    while isinstance(one.variable, Brought):
        one = one.variable
    return one.variable


def _kept_by(remat: Any) -> Callable[[Node], bool]:
    """Return whether a checkpoint keeps an array, by the word or the names of a signal, or the policy of a program."""
    policy: Any = _policy(remat) if isinstance(remat, (str, tuple)) else remat

    def keeps(node: Node) -> bool:
        if node.eqn is None:
            return remat == "" and node.name == "moved"
        eqn = node.eqn
        is_sum = remat == "products" and bool(node.bills)
        return policy is not None and (is_sum or policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params) is True)

    return keeps


def residuals(node: Node, active: set[int]) -> Iterable[Node]:
    if node.name in LINEAR or node.eqn is None:
        return ()
    if node.name in BILINEAR:
        return [x for x in node.of if any(id(y) in active for y in node.of if y is not x) or len(node.of) == 1]
    if node.name == "div" and len(node.of) == 2:
        return node.of if id(node.of[1]) in active else node.of[1:]
    if node.name in ("gather", "dynamic_slice", "select_n"):
        return [x for x in node.of if not x.is_smooth]
    return [node]


def step_bytes(program: Program) -> Bytes:
    """Return the bytes on the wire of each device of a program, and of its gradients by its parameters."""
    walk = Steps(dict(program.mesh.shape))
    inputs = [
        walk.node([], t.dtype, walk.split_over(names_of(axes)), "parameter" if i.claim is not None else "input")
        for t, i, axes in zip(program.types, program.inputs, program.use, strict=True)
    ]
    ends = walk.program(program.jaxpr, program.plan, inputs)
    total: Bytes = collections.Counter()

    def pay(phase: str, bills: Iterable[Bill], turns: int) -> None:
        for op, names, payload in bills:
            group = math.prod(walk.sizes[name] for name in names)
            total[phase, op, ", ".join(sorted(names))] += COLLECTIVES[op].wire(payload, group) * turns

    active = _reach([x for x in inputs if x.name == "parameter" and x.is_smooth], _readers(walk.nodes))
    live = _reach([x for x in ends if id(x) in active], lambda x: [y for y in x.of if id(y) in active])
    LAST[:] = walk.nodes, live
    done: set[tuple[int, int]] = set()

    def anew(node: Node, region: Region | None) -> None:
        while region is not None:
            inside = node.region
            while inside is not None and inside is not region:
                inside = inside.outer
            if inside is region:
                break
            region = region.outer
        if region is None or node.ahead or region.keeps(node) or (id(node), id(region)) in done:
            return
        done.add((id(node), id(region)))
        pay("backward", node.bills, node.turns)
        for each in node.of:
            anew(each, region)

    often: dict[int, int] = {}  # JAX takes what is the same in each turn, and is not differentiated, out of a loop
    for node in walk.nodes:
        often[id(node)] = node.turns if node.name == "turn" else max((often.get(id(each), 1) for each in node.of), default=1)
        pay("forward", node.bills, node.turns if id(node) in active else often[id(node)])
        if id(node) in live:
            pay("backward", node.back, node.turns)
            pay("backward", node.bills if node.ahead else (), node.turns - node.turns // max(node.ahead, 1))
            for each in residuals(node, active) if node.region is not None else ():
                anew(each, node.region)
    return dict(total)


def _readers(nodes: Sequence[Node]) -> Callable[[Node], list[Node]]:
    found: dict[int, list[Node]] = collections.defaultdict(list)
    for node in nodes:
        for each in node.of if node.flows else ():
            found[id(each)].append(node)
    return lambda node: found[id(node)]


def _reach(start: Iterable[Node], follow: Callable[[Node], Iterable[Node]]) -> set[int]:
    left = list(start)
    found = set(map(id, left))
    while left:
        for each in follow(left.pop()):
            if id(each) not in found:
                found.add(id(each))
                left.append(each)
    return found

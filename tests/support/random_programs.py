"""Random programs, layouts and meshes. A seed determines all of it: the statements, the parameters' sizes, the YAML, the data."""

from __future__ import annotations

import dataclasses
import functools
import linecache
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jax import lax

from tests.support import random_operations, random_statements
from tests.support.random_statements import SIZES

Axes = tuple[tuple[str, ...], ...]
LARGEST, MOST, BOUND = 768, 5, 2**12  # elements of a variable, its axes, and how large whole numbers may grow

MESHES = (
    {"data": 8},
    {"data": 2, "tensor": 4},
    {"data": 4, "tensor": 2},
    {"data": 2, "tensor": 2, "pipe": 2},
    {"data": 2, "tensor": 3},
)


class NoneFits(Exception):
    """No variable is what the statement needs."""


@jax.custom_jvp
def own_jvp(x: Any) -> Any:
    return x * x


own_jvp.defjvp(lambda xs, tangents: (xs[0] * xs[0], 3 * xs[0] * tangents[0]))


@jax.custom_vjp
def own_vjp(x: Any) -> Any:
    return x * x


own_vjp.defvjp(lambda x: (x * x, x), lambda x, ct: (5 * x * ct,))


def attend(x: Any, q: Any, k: Any, v: Any, out: Any, mask: Any) -> Any:
    scores = jnp.einsum("bthd,bshd->bhts", *(jnp.einsum("btn,nhd->bthd", x, w) for w in (q, k)))
    shares = jax.nn.softmax(jnp.where(mask, scores / 2, -1e9))
    return jnp.einsum("bhts,bsn,nhd,hdm->btm", shares, x, v, out)


def weights(shape: Sequence[int]) -> Any:
    """Whole numbers that tell places apart: a gradient at a wrong place differs."""
    return ((np.arange(math.prod(shape)) * 7 % 11 % 5) - 2.0).astype(np.float32).reshape(shape)


NAMES = {
    "jax": jax, "jnp": jnp, "lax": lax, "np": np, "own_jvp": own_jvp, "own_vjp": own_vjp, "attend": attend, "weights": weights,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Array:
    shape: tuple[int, ...]
    end: int = 0  # of an input of whole numbers from 0 to this; 0 of floats
    summed: int | None = None  # of a parameter: the size that a product sums, and the one that it keeps
    kept: int | None = None

    @property
    def type(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, jnp.int32 if self.end else jnp.float32)


@dataclasses.dataclass(frozen=True)
class Statement:
    targets: tuple[str, ...]
    source: str

    def __str__(self) -> str:
        return f"{', '.join(self.targets)} = {self.source}"


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of parameters and inputs, and how it is split."""

    seed: int
    is_whole: bool
    parameters: Mapping[str, Mapping[str, Array]]
    inputs: Mapping[str, Array]
    statements: tuple[Statement, ...]
    results: tuple[str, ...]
    losses: tuple[str, ...]  # those of the results that the loss sums
    configuration: Mapping[str, Any]
    placed: Mapping[str, Axes] = dataclasses.field(default_factory=dict)  # inputs that lie on the mesh
    how: str = "gradient"  # or "value": without a gradient, and outside of jit

    @property
    def source(self) -> str:
        terms = " + ".join(f"({name} * weights({name}.shape)).sum()" for name in self.losses)
        lines = [*map(str, self.statements), f"return {terms}, ({', '.join(self.results)},)"]
        return f"def program({', '.join(('params', *self.inputs))}):\n" + "".join(f"    {line}\n" for line in lines)

    @property
    def yaml(self) -> str:
        return yaml.safe_dump(dict(self.configuration), sort_keys=False, default_flow_style=None, width=1000)

    def __str__(self) -> str:
        kind = "whole numbers" if self.is_whole else "random numbers"
        shapes = {
            f"{layer}/{name}": each.shape for layer, some in self.parameters.items() for name, each in some.items()
        }
        shapes |= {name: each.shape for name, each in self.inputs.items()}
        lies = "".join(f"# {name} lies as {axes}\n" for name, axes in self.placed.items())
        return f"# seed {self.seed}: {self.how} of {kind}, {shapes}\n{lies}{self.source}\n{self.yaml}"

    def function(self) -> Callable[..., Any]:
        name, scope = f"<program {self.seed}>", dict(NAMES)
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        exec(compile(self.source, name, "exec"), scope)
        return scope["program"]

    def data(self, dtype: Any = np.float32) -> tuple[Any, ...]:
        """The parameters and the inputs."""
        rng = np.random.default_rng([self.seed, 1])

        def numbers(each: Array, most: int) -> np.ndarray:
            if each.end:
                return np.asarray(rng.integers(0, each.end, each.shape), np.int32)
            if self.is_whole:
                return np.asarray(rng.integers(-most, most + 1, each.shape), dtype)
            return np.asarray(np.asarray(rng.normal(size=each.shape), np.float32), dtype)

        parameters = {
            layer: {name: numbers(each, 2) for name, each in some.items()} for layer, some in self.parameters.items()
        }
        return parameters, *(numbers(each, 3) for each in self.inputs.values())


def evaluated(source: str, variables: Mapping[str, Any]) -> Any:
    return eval(_compiled(source), {**NAMES, **variables})


_compiled = functools.lru_cache(maxsize=None)(lambda source: compile(source, "<statement>", "eval"))


class Writer:
    """Writes a program, statement by statement."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.is_whole = self.chance(0.6)
        self.batch = self.one((8, 8, 8, 16, 4, 6, 12))
        features = [self.one(SIZES) for _ in range(self.one((1, 1, 1, 2, 2, 3)))]
        self.parameters: dict[str, dict[str, Array]] = {}
        self.inputs = {"x": Array((self.batch, *features))}
        self.types: dict[str, Any] = {"x": self.inputs["x"].type}
        self.bounds = {"x": 3.0}
        self.statements: list[Statement] = []

    # -- random numbers --

    def below(self, end: int) -> int:
        return int(self.rng.integers(end))

    def one(self, choices: Sequence[Any]) -> Any:
        return choices[self.below(len(choices))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def mixed(self, choices: Sequence[Any]) -> list[Any]:
        return [choices[int(at)] for at in self.rng.permutation(len(choices))]

    def some(self, choices: Sequence[Any], least: int = 0) -> list[Any]:
        return self.mixed(choices)[: max(least, self.below(len(choices) + 1))]

    # -- variables --

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.types[name].shape)

    def _pick(self, dtype: Any, least: int, most: int) -> str:
        found = [name for name, t in self.types.items() if t.dtype == dtype and least <= len(t.shape) <= most]
        if not found:
            raise NoneFits
        name = self.one(found[-2:] if self.chance(0.75) else found)
        self.picked.append(name)
        return name

    def float(self, least: int = 0, most: int = 4) -> str:
        return self._pick(jnp.float32, least, most)

    def bool(self) -> str:
        return self._pick(jnp.bool_, 0, 4)

    def int(self, least: int = 0, most: int = 4) -> str:
        try:
            return self._pick(jnp.int32, least, most)
        except NoneFits:
            return self._input(Array(self.one(((self.batch,), (self.batch, 4), (4,))), end=self.one((8, 12))))

    def alike(self, name: str) -> list[str]:
        """Other variables of this shape."""
        t = self.types[name]
        return [other for other, o in self.types.items() if (o.shape, o.dtype) == (t.shape, t.dtype) and other != name]

    def parameter(self, shape: Sequence[int], summed: int | None = None, kept: int | None = None) -> str:
        layer = f"l{len(self.parameters) - bool(self.new)}" if self.new else f"l{len(self.parameters)}"
        some = self.parameters.setdefault(layer, {})
        name = "wbcdefgh"[len(some)]
        some[name] = Array(tuple(shape), 0, summed, kept)
        self.new = True
        return f'params["{layer}"]["{name}"]'

    def indices(self, shape: Sequence[int], end: int) -> str:
        if self.chance(0.5):
            found = self.rng.integers(0, end, tuple(shape)).tolist()
            return str(found) if not shape else f"np.array({found})"
        return self._input(Array(tuple(shape), end=end))

    def _input(self, array: Array) -> str:
        name = f"i{len(self.inputs)}"
        self.inputs[name], self.types[name], self.bounds[name] = array, array.type, array.end
        return name

    def grows(self, by: float, *, to: float | None = None) -> None:
        self.growth, self.power = by, self.power if to is None else to

    # -- statements --

    @property
    def text(self) -> str:
        return "\n".join(statement.source for statement in self.statements)

    def write(self, statement: random_statements.Statement) -> bool:
        """Write it, if it fits."""
        before = {name: dict(getattr(self, name)) for name in ("inputs", "types", "bounds")}
        before["parameters"] = {layer: dict(some) for layer, some in self.parameters.items()}
        self.picked: list[str] = []
        self.new, self.growth, self.power = False, 1.0, 1.0
        if self._write(statement):
            return True
        vars(self).update(before)
        return False

    def _write(self, statement: random_statements.Statement) -> bool:
        try:
            source = statement(self)
        except NoneFits:
            return False
        if source is None:
            return False
        for name in [name for name in self.inputs if name != "x" and not _reads(f"{self.text} {source}", name)]:
            del self.inputs[name], self.types[name]
        for layer, some in list(self.parameters.items()):
            used = {name: each for name, each in some.items() if f'["{layer}"]["{name}"]' in f"{self.text} {source}"}
            self.parameters = {n: each for n, each in {**self.parameters, layer: used}.items() if each}
        params = {layer: {name: each.type for name, each in some.items()} for layer, some in self.parameters.items()}
        made = jax.eval_shape(lambda given: evaluated(source, given), {**self.types, "params": params})
        many = list(made) if isinstance(made, (list, tuple)) else [made]
        largest = max((self.bounds[name] for name in self.picked), default=3.0)
        bound = self.growth * max(largest**self.power, 8 * (not self.power))
        allowed = (jnp.float32, jnp.int32, jnp.bool_)
        if not many or any(
            t.dtype not in allowed or not 1 <= math.prod(t.shape) <= LARGEST or len(t.shape) > MOST for t in many
        ):
            return False
        if self.is_whole and bound > BOUND:
            return False
        first = len(self.statements)
        names = [f"v{first}" + ("abcdefgh"[at] if len(many) > 1 else "") for at in range(len(many))]
        if len(names) == 1 and isinstance(made, (list, tuple)):
            source = f"({source})[0]"
        self.types |= dict(zip(names, many, strict=True))
        self.bounds |= dict.fromkeys(names, bound)
        self.statements.append(Statement(tuple(names), source))
        return True

    # -- the whole --

    def program(self, seed: int, kinds: Sequence[random_statements.Statement] = ()) -> Program:
        count = self.one((1, 2, 2, 2, 3, 3, 4))
        kinds = kinds or (random_statements.WHOLE + ([] if self.is_whole else 3 * random_statements.OTHERS))
        if self.chance(0.7):
            while not self.parameters:
                self.write(self.one(random_operations.CLAIMED))
        while len(self.statements) < count:
            self.write(self.one(kinds))
        ends = [name for s in self.statements for name in s.targets if not _reads(self.text, name)]
        if not any(self.types[name].dtype == jnp.float32 for name in ends):
            ends.append(next(name for name in reversed(self.types) if self.types[name].dtype == jnp.float32))
        losses = tuple(name for name in ends if self.types[name].dtype == jnp.float32)
        mesh = self.one(MESHES)
        placed: dict[str, Axes] = {}
        if self.chance(0.3) or not self.parameters:
            placed = {name: self.lies(each.shape, mesh) for name, each in self.inputs.items() if each.shape}
            placed = {name: axes for name, axes in placed.items() if any(axes)}
        return Program(
            seed, self.is_whole, self.parameters, self.inputs, tuple(self.statements), tuple(ends), losses,
            self.layout(mesh), placed, "value" if self.chance(0.12) else "gradient",
        )  # fmt: skip

    def lies(self, shape: Sequence[int], mesh: Mapping[str, int]) -> Axes:
        """Split random axes of an array over random mesh axes that divide them."""
        axes: list[tuple[str, ...]] = [()] * len(shape)
        for name in self.mixed(list(mesh)):
            at = self.below(len(shape))
            if self.chance(0.7) and shape[at] % math.prod(mesh[n] for n in (*axes[at], name)) == 0:
                axes[at] += (name,)
        return tuple(axes)

    def layout(self, mesh: Mapping[str, int]) -> dict[str, Any]:
        """A configuration: a signal for each layer, or for what no other claims."""
        rows = [] if self.chance(0.15) else self.some(list(mesh), 1)[: self.one((1, 1, 2))]
        rows = rows if self._fits(rows, mesh, [self.batch]) or self.chance(0.02) else []
        # What XLA's partitioner does wrong, or ends the process at (docs/measurements/fuzz.md)
        is_auto = self.chance(0.2) and not re.search(
            r"reduce_xor|reduce_window|dynamic_|group_count=(?!1\b)"
            r"|conv_general_dilated\(.*?, \((?:1, )*[2-9]|dilation=\((?:1, )*[2-9]",
            self.text,
        )
        how = {"mesh": dict(mesh), "axis_types": "auto" if is_auto else "explicit"}
        signals: dict[str, Any] = {}
        claimed: list[str] = []
        for layer, some in self.parameters.items():
            if self.chance(0.2):
                continue
            claimed.append(layer)
            glob = f"{layer}/**" if self.chance(0.7) or len(some) > 1 else f"{layer}/w"
            signals[f"s{len(signals)}"] = {**self.words(rows, mesh, list(some.values())), "match": [glob]}
        rest = [each for layer, some in self.parameters.items() if layer not in claimed for each in some.values()]
        if rest:
            store = [name for name in rows if all(self._stores([name], mesh, each) for each in rest)]
            words = {"row": [*rows], "store": store} if self.chance(0.4) else {"row": [*rows]}
            signals["rest"] = {**{word: names for word, names in words.items() if names}, "match": ["**"]}
        return {"jshard": how, **signals}

    def words(self, rows: list[str], mesh: Mapping[str, int], some: Sequence[Array]) -> dict[str, Any]:
        """Random words for the parameters of a layer, which divide nearly always."""
        words: dict[str, Any] = {"row": [*rows]} if rows and self.chance(0.9) else {}
        careless = self.chance(0.02)
        free = [name for name in self.mixed(list(mesh)) if name not in words.get("row", ())]
        for word in self.mixed(("column", "reduction")):
            sizes = [each.kept if word == "column" else each.summed for each in some]
            names = free[: self.one((1, 1, 2))]
            if names and self.chance(0.5) and (careless or self._fits(names, mesh, [n for n in sizes if n])):
                words[word] = names
                free = free[len(names) :]
        used = [name for word in ("column", "reduction") for name in words.get(word, ())]
        store = [name for name in mesh if name not in used][: self.one((1, 2))]
        if store and self.chance(0.4) and (careless or all(self._stores([*store, *used], mesh, each) for each in some)):
            words["store"] = store
        if used and self.chance(0.15) and self.inputs["x"].shape[1:2] and self.inputs["x"].shape[1] % 8 == 0:
            words["sequence"] = used[:1]
        return words

    def _fits(self, names: Sequence[str], mesh: Mapping[str, int], sizes: Sequence[int]) -> bool:
        return all(n % math.prod(mesh[name] for name in names) == 0 for n in sizes)

    def _stores(self, names: Sequence[str], mesh: Mapping[str, int], each: Array) -> bool:
        return any(self._fits(names, mesh, [n]) for n in each.shape[-1:])


def _reads(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None


def program(seed: int) -> Program:
    """The program of a seed."""
    writer = Writer(seed)
    return writer.program(seed)

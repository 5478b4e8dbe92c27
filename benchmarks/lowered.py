"""Compare the programs of this checkout with those of another commit, lowered for eight pretend devices.

    python -m benchmarks.lowered --against COMMIT [NAME ...]

A program is the step of a configuration (`lm/ring`) at its small size of tests/inspect/verify, or the loss and gradients of an
adopted model under its last plan (`models/qwen3`). Its row is `same`, or has the wire bytes of `explain` and XLA's FLOPs and
temporary bytes, there and here. A program is compiled only if its text differs by more than names.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIGURES = ("wire", "FLOPs", "temporaries")
Results = dict[str, dict[str, Any]]


def normalized(text: str) -> str:
    """Return StableHLO without the names of results, and with its functions numbered."""
    numbers: dict[str, str] = {}
    for name in re.findall(r"func\.func (?:public |private )?@([\w.$-]+|\"[^\"]+\")", text):
        numbers.setdefault(name, f"f{len(numbers)}")
    text = re.sub(r"module @\S+", "module", re.sub(r'jax\.result_info = "[^"]*"', "", text))
    return re.sub(r"@([\w.$-]+|\"[^\"]+\")", lambda found: f"@{numbers.get(found[1], found[1])}", text)


def _configuration(name: str, words: list[str]) -> tuple[Any, Any]:
    """Return the lowered step of a configuration, and what makes its ledger."""
    experiment, target = (importlib.import_module(f"jshard.cli.{room}") for room in ("experiment", "target"))
    how = {"overrides": words, "args": None, "config": None, "on": None, "trust": True, "name": "lowered"}
    built = experiment.built(target.Target.of(argparse.Namespace(path=f"configs/{name}.yaml", **how)))
    return built.lowered(), built.explain


def _model(name: str) -> tuple[Any, Any]:
    """Return the lowered loss and gradients of a model under its last plan, and what makes their ledger."""
    import jshard
    from benchmarks.models import TINY, sized

    found = sized(name, TINY)
    jshard.load(list(found.plans.values())[-1])
    sharded = jshard.shard(found.loss)
    found.place(sharded)
    step = found.value_and_grad(sharded)
    ledger = lambda: jshard.explain(lambda model, *batch: step(model, *batch), found.model, *found.batch)
    return found.jit(step).lower(found.model, *found.batch), ledger


def _result(name: str, words: list[str], *, compiled: bool) -> dict[str, Any]:
    """Lower one program, or compile it. An error of this side is its result, and differs from a program."""
    try:
        model = name.removeprefix("models/")
        lowered, ledger = _configuration(name, words) if model == name else _model(model)
        if not compiled:
            return {"text": normalized(lowered.as_text())}
        program = lowered.compile()
        flops, memory = program.cost_analysis()["flops"], program.memory_analysis().temp_size_in_bytes
        return dict(zip(FIGURES, (ledger().total, int(flops), memory), strict=True))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def worker(job: dict[str, Any]) -> None:
    """Write the results of all programs of one side. This file runs by its path there, so that it uses the side's jshard."""
    import warnings

    import jshard
    from examples import english

    warnings.simplefilter("ignore")
    jshard.pretend(8)
    english.main("runs/english")
    results = {}
    for name, words in job["programs"].items():
        jshard.unload()
        results[name] = _result(name, words, compiled=job["compiled"])
    Path(job["out"]).write_text(json.dumps(results))


def sides(trees: list[Path], programs: dict[str, list[str]], folder: Path, *, compiled: bool) -> list[Results]:
    """Run the programs at both trees at once; return the results of each tree."""
    running: list[subprocess.Popen[bytes]] = []
    for at, tree in enumerate(trees):
        place = folder / f"side-{at}"
        place.mkdir(exist_ok=True)
        for each in ("configs", "examples"):
            if not (place / each).is_symlink():
                (place / each).symlink_to(tree / each)
        job = {"programs": programs, "compiled": compiled, "out": str(folder / f"{at}.json")}
        command = [sys.executable, "-P", __file__, "--worker", json.dumps(job)]
        environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
        running.append(subprocess.Popen(command, cwd=place, env=environment, stdout=subprocess.DEVNULL))
    if any(codes := [each.wait() for each in running]):
        raise SystemExit(f"the sides ended with {codes}; see above")
    return [json.loads((folder / f"{at}.json").read_text()) for at in range(len(trees))]


def row(there: dict[str, Any], here: dict[str, Any]) -> str:
    """Put the figures of two programs beside each other."""
    if "error" in there or "error" in here:
        return "; ".join(f"{side}: {each.get('error', 'lowers')}" for side, each in (("there", there), ("here", here)))
    return "   ".join(f"{key} {there[key]:,} -> {here[key]:,}" for key in FIGURES)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lowered", description="Which programs a change changes."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="lm/ring or models/qwen3; all if none is named")
    parser.add_argument("--against", metavar="COMMIT", default="HEAD", help="the commit to compare with")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.worker is not None:
        worker(asked.worker)
        return
    from tests.inspect.verify.test_configurations import FILES
    from tests.support import linen_models, other_models

    packages = {name: each.package for name, each in other_models.MODELS.items()}
    packages |= {name: linen_models.package(name) for name in linen_models.MODELS}
    models = [f"models/{name}" for name, package in packages.items() if other_models.is_installed(package)]
    every = {name: list(words) for name, words in FILES.items()} | {name: [] for name in models}
    if unknown := set(asked.names) - every.keys():
        parser.error(f"no program is named {', '.join(sorted(unknown))}; use {', '.join(every)}")
    programs = {name: every[name] for name in asked.names or every}
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([*git, "add", "--quiet", "--detach", str(folder / "tree"), asked.against], check=True)
        try:
            trees = [folder / "tree", ROOT]
            there, here = sides(trees, programs, folder, compiled=False)
            changed = {name: words for name, words in programs.items() if there[name] != here[name]}
            before, after = sides(trees, changed, folder, compiled=True) if changed else ({}, {})
        finally:
            subprocess.run([*git, "remove", "--force", str(folder / "tree")], check=True)
    for name in programs:
        fails = here[name].get("error")
        print(f"{name:24}{row(before[name], after[name]) if name in changed else fails or 'same'}")
    same = [name for name in programs if name not in changed and "error" not in here[name]]
    print(f"{len(same)} of {len(programs)} programs are the same as at {asked.against}")


if __name__ == "__main__":
    main()

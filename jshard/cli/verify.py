"""`jshard verify`: a comparison of the sharded program with the program on a single device."""

from __future__ import annotations

import argparse
import dataclasses

from jshard.cli.target import Target, function_arguments, mesh_sizes
from jshard.cli.terminal import show
from jshard.launch.cluster_env import found as membership


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mesh", action="append", default=[], metavar="data=4,tensor=2", help="compare on this mesh too"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document, its schema named in it")
    function_arguments(parser)


def run(chosen: argparse.Namespace) -> int:
    """Print the comparison; return 0 if both are equal, else 1."""
    from jshard.cli.experiment import built, pretend_where_none

    meshes, target = {words: mesh_sizes("--mesh", words) for words in chosen.mesh}, Target.of(chosen)
    if membership() is None:
        pretend_where_none(target.configuration())
        target, short = _short_enough(target)  # it imports the model, which may make arrays
        program = built(target)
    else:
        from jshard.cli.rank_main import built_alike, join

        join(target.configuration(), {}, {f"--mesh {words}": sizes for words, sizes in meshes.items()})
        target, short = _short_enough(target)
        program = built_alike(target)
    import jax

    from jshard.layers.user_code_errors import as_user_error

    with as_user_error("it is traced"):
        found = dataclasses.replace(program.verify([*meshes.values()]), short=short)
    if jax.process_index() != 0:  # process 0 prints for all
        return 0
    if chosen.json:
        print(found.to_json())
    else:
        show(str(found))
    return 0 if found.ok else 1


def _short_enough(target: Target) -> tuple[Target, str]:
    """Return the target, or its short version if the model is large, with words about it."""
    if target.function is not None:
        return target, ""
    from jshard.training.experiments.experiment import at_two_layers

    change = at_two_layers(target.configuration())
    if change is None:
        return target, ""
    shorter = dataclasses.replace(target, overrides=(*target.overrides, change[0]))
    at_two_layers(shorter.configuration())
    return shorter, change[1]

"""The single table of keys, with their kinds, descriptions and JSON Schema for editors."""

from __future__ import annotations

import dataclasses
from typing import Any

from jshard.algorithms import ALGORITHMS
from jshard.schedules import KINDS
from jshard.signals.axes import Axes, Axis, Mesh, Workers
from jshard.signals.globs import Globs
from jshard.signals.topologies import TopologyName
from jshard.signals.value_types import (
    Key,
    Keys,
    Names,
    Single,
    Stages,
    choice,
    flag,
    flag_or,
    integer,
    number,
    part_or,
    size,
    text,
)

DTYPES = ("float32", "bfloat16", "float16", "float64")
IMPORT_PATH = text("an import path", "examples.digits:Model", r"\w+(\.\w+)*:\w+(\.\w+)*")

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "permute", "all_to_all")


def _component(what: str, example: str, further: dict[str, Key] | None = None, instead: Keys | None = None) -> Key:
    """Return the key of an object named by its import path, with arguments."""
    path = dataclasses.replace(IMPORT_PATH, example=example)
    keys = {"path": Key(path, "Its import path, module:name.")} | (further or {})
    return Key(Keys(keys, bare=path, stands_for="path", open=True, required="path", instead=instead), what)


def _schedule() -> Single:
    """Return a kind for the name of a schedule, or its file."""

    def parse(value: object) -> str | None:
        return value if isinstance(value, str) and (value in KINDS or "." in value or "/" in value) else None

    form = {"anyOf": [{"enum": list(KINDS)}, {"type": "string", "pattern": "[./]"}]}
    return Single(f"{', '.join(KINDS)} or the file of a table", "1f1b", parse, form, tuple(KINDS))


READING: dict[str, Key] = {
    "shuffle": Key(flag("false"), "Each pass over the examples in another order, that the seed decides; true unless said."),
    "last": Key(choice(("drop", "fill", "keep")), "What becomes of the examples that make no whole batch at its end."),
    "ahead": Key(integer("2", least=0), "How many batches are read before they are asked for."),
}  # fmt: skip

TEXT: dict[str, Key] = {
    "text": Key(text("a file or a folder", "docs"), "Text: each file of a folder is a document, or each line of a .jsonl."),
    "made_by": Key(text("a command", "python -m examples.english runs/english"), "What to type where the text is not there."),
    "tokens": Key(text("bytes or a file", "bytes"), "bytes unless said, or a tokenizer.json; that needs jshard[text]."),
    "end": Key(text("a token", "<|endoftext|>"), "The token of that tokenizer which ends a document; none unless said."),
    "length": Key(integer("256"), "Tokens in a row; 256 unless said."),
    "held_out": Key(part_or("a file or a folder", "0.05"), "The part of the rows that is for evaluation, or the text of it."),
    "cache": Key(text("a folder", "runs/tokens"), "Where tokens are kept; tokens beside the output folder unless said."),
    **READING,
}  # fmt: skip

TRAIN: dict[str, Key] = {
    "model": _component("The model: its import path, or a mapping of path and arguments.", "examples.digits:Model"),
    "data": _component(
        "The data: its import path, or a mapping of path, arguments, and how it is read; or of text.",
        "examples.digits:data", READING, instead=Keys(TEXT, required="text"),
    ),
    "loss": Key(
        Keys(
            {
                "path": Key(dataclasses.replace(IMPORT_PATH, example="examples.digits:loss"), "Its import path, module:name."),
                "z": Key(number("1e-4"), "So many times the square of the log of softmax's denominator is added (z-loss)."),
                "chunk": Key(integer("256"), "Places of a row whose logits there are at a time; 256 unless said."),
            },
            bare=dataclasses.replace(IMPORT_PATH, example="examples.digits:loss"), stands_for="path", open=True,
        ),
        "The loss: its import path, or a mapping of path and arguments; without a path that of cross entropy.",
    ),
    "metrics": Key(
        Names("an import path or a list of import paths", "[examples.digits:hits]", each=IMPORT_PATH),
        "Functions of outputs and targets that give a number for each row; an evaluation has the mean of each.",
    ),
    "batch": Key(integer("64"), "Examples in a batch, over all devices."),
    "microbatches": Key(
        integer("8"), "How many parts a batch is taken in, one after the other, or through jshard.pipeline; 1 unless said."
    ),
    "steps": Key(integer("1000"), "How many steps to train."),
    "seed": Key(integer("0", least=0), "The seed of weights and batches."),
    "optimizer": Key(
        Keys(
            {
                "name": Key(text("a name", "adamw"), "Its name in optax, or its import path; its arguments stand beside it."),
                "clip": Key(number("1.0"), "The most that the norm of all gradients together may be; clipped before all else."),
                "schedule": Key(
                    Keys({}, bare=text("a name", "cosine"), open=True),
                    "The learning rate over the run: a short word (warmup_cosine) or an import path (optax:NAME), and its "
                    "arguments; its length is that of the run unless said.",
                ),
                "decay": Key(
                    Keys({"match": Key(Globs(), "Globs of the parameters.")}, required="match"),
                    "Which parameters weight decay holds for; all unless said.",
                ),
            },
            bare=text("a name", "adamw"), stands_for="name", open=True,
        ),
        "The optimizer: a name of optax; or names of optax or import paths with their arguments, chained in that order.",
    ),
    "evaluation": Key(
        Keys(
            {
                "every": Key(integer("100"), "After every so many steps, and the last; that alone unless said."),
                "held_out": Key(number("0.1"), "The part of the examples, at their end, that is test data and not trained on."),
            },
            integer("100"), "every",
        ),
        "Evaluate on the test data after every so many steps.",
    ),
    "output": Key(text("a folder", "runs/mlp"), "The folder that results are written to."),
    "log": Key(
        Keys(
            {
                "every": Key(integer("100"), "Figures are said and written after every so many steps; 100 unless said."),
                "ran": Key(flag(), "Each process writes what it runs, a line for each step and collective; false unless said."),
                "folder": Key(text("a folder", "runs/mlp/log"), "Where, and that it does; output/log unless said."),
                "tensorboard": Key(flag(), "Figures are written for TensorBoard too; needs jshard[tensorboard]."),
            },
            bare=flag(), stands_for="ran",
        ),
        "What is logged, and when; true is {ran: true}.",
    ),
    "checkpoint": Key(
        Keys(
            {
                "every": Key(integer("100"), "Save after every so many steps, and after the last."),
                "keep": Key(integer("3"), "How many are kept; 3 unless said."),
                "folder": Key(text("a folder", "runs/mlp/checkpoints"), "Where; checkpoints in the output folder unless said."),
            },
            bare=integer("100"), stands_for="every", required="every",
        ),
        "When all that training needs to go on is saved, and where.",
    ),
    "watchdog": Key(
        Keys({
            "step_timeout": Key(integer("300"), "Seconds without a step after which several processes count as hung."),
            "start_timeout": Key(integer("60"), "Seconds that all processes have to appear in."),
        }),
        "What watches over several processes.",
    ),
}  # fmt: skip

_KERNEL = Keys({op: Key(choice(words), f"How {op} is done.") for op, words in ALGORITHMS.items()})

JSHARD: dict[str, Key] = {
    "mesh": Key(
        Mesh(), "Mesh axes and sizes, in device order; one may be -1: all that are left. {size: 2, over: dcn} crosses slices."
    ),
    "axis_types": Key(choice(("explicit", "auto")), "explicit unless said: layouts are part of types."),
    "include": Key(Names("a file or a list of files", "base.yaml"), "Files that this one starts from."),
    "strict": Key(flag("false"), "A signal that is not written here is an error, unless false."),
    "default": Key(text("the name of a signal", "layer1"), "The signal for places that none names."),
    "train": Key(Keys(TRAIN), "The experiment; the command line overrides it by a bare key=value."),
    "topology": Key(TopologyName(), "The devices that plan, report and diff compile for where no --topology is given."),
    "kernel": Key(_KERNEL, "Which algorithm each op takes, at every place that says nothing else."),
    "pipeline": Key(
        Keys(
            {
                "axis": Key(Axis(), "The mesh axis of stages."),
                "schedule": Key(
                    _schedule(), "What each stage runs when: a name, or a file with a table of your own; 1f1b unless said."
                ),
                "chunks": Key(integer("1"), "Chunks of layers that each stage has; 1 unless said, of interleaved 2."),
            },
            elsewhere={"microbatches": "jshard.train"},
        ),
        "How the layers of signals with `stage` run as a pipeline.",
    ),
    "budget": Key(
        size(), "The most bytes that a device may hold, as in 16GiB: at rest for jshard check, at its peak for jshard plan."
    ),
}  # fmt: skip

_AXES = Axes()
SHARD: dict[str, Key] = {
    "axis": Key(integer("0", least=None), "The axis of the array that is split; -1 is the last."),
    "workers": Key(Workers(), "Device numbers; null is all of them."),
    "replicated": Key(flag(), "The whole array on each of the workers."),
    "mesh": Key(_AXES, "Mesh axes to split over, in place of workers."),
}

SIGNAL: dict[str, Key] = {
    "row": Key(_AXES, "Split rows of x and y (batch) over a mesh axis or a list; gradients of w are summed over it."),
    "column": Key(_AXES, "Split columns of w and y over a mesh axis or a list; nothing moves unless output: gather."),
    "reduction": Key(_AXES, "Split columns of x and rows of w over a mesh axis or a list; one all-reduce of y."),
    "shard": Key(Keys(SHARD), "Any array under this signal: one axis over workers or mesh axes."),
    "sequence": Key(_AXES, "Between layers, activations lie split by sequence over this mesh axis."),
    "store": Key(
        Keys(
            {
                "parameters": Key(_AXES, "Parameters and the optimizer's state (FSDP)."),
                "keep": Key(flag(), "Gathered parameters are kept for the backward pass, which else gathers them again."),
                "prefetch": Key(
                    flag(),
                    "A layer of a loop is gathered while the one before it computes, and its gradients sent while the next one "
                    "does; of each its input is kept, and what remat says. Without parameters: gradient sums alone.",
                ),
                "optimizer": Key(_AXES, "The optimizer's state alone (ZeRO-1)."),
            },
            bare=_AXES,
        ),
        "Parameters and optimizer state rest split over this mesh axis (FSDP); {optimizer: axis}: the state only.",
    ),
    "output": Key(choice(("keep", "gather", "sum", "scatter")), "What a layer hands on."),
    "backward": Key(text("the name of a signal", "other"), "The signal that cotangents of this place lie by."),
    "compile": Key(flag(), "Called outside a jit, a layer under this signal compiles as one program."),
    "dtype": Key(
        Keys({
            "param": Key(choice(DTYPES), "What parameters are stored in."),
            "compute": Key(choice(DTYPES), "What products are computed in."),
            "reduce": Key(choice(DTYPES), "What is summed over devices in."),
        }),
        "dtypes of this place.",
    ),
    "remat": Key(
        Keys(
            {"save": Key(Names("a name or a list of names", "[attention]"), "Results that checkpoint_name (JAX) names so.")},
            bare=flag_or(("full", "products", "chunk")), required="save",
        ),
        "Compute activations anew in the backward pass: all (full, true), all but products, or all but those saved; chunk: "
        "all that the layers between two stages of a pipeline compute, of their input.",
    ),
    "extends": Key(Names("the name of a signal or a list of names", "_template"), "Start from the keys of these."),
    "expect": Key(
        Keys(
            {name: Key(integer("1", least=0), f"How many times {name} runs.") for name in COLLECTIVES}
            | {"bytes": Key(size(), "The most bytes on the wire per device, as in 64MiB.")}
        ),
        "A promise about collectives that `jshard check` holds.",
    ),
    "stage": Key(
        Stages(),
        "equal: the layers of the jshard.stack that this signal matches are split over the stages of jshard.pipeline, as many "
        "for each; balance: so that each has about as many FLOP, what is before and behind the layers counted; {0..5: 0, 6..9: "
        "1}: those on stage 0, and those on 1. A number: what it matches is on that stage, counted from 0. A signal that says "
        "nothing else leaves the layout to the others.",
    ),
    "kernel": Key(_KERNEL, "Which algorithm each op takes here; xla unless said, auto is what kernels.choose says."),
    "match": Key(
        Globs(),
        'Globs of the parameters of a model that this signal claims: "layers/*/attn/{q,k}_proj/**"; "**": all others; '
        '"!layers/0/**": none of these.',
    ),
    "allow": Key(
        Names("the name of a JAX primitive or a list of names", "[sort]"),
        "Primitives that jshard.shard has no rule for, and may gather whole arrays for.",
    ),
    "ring": Key(_AXES, "Everywhere, attention too, activations lie split by places (the sequence) over this mesh axis."),
    "expert": Key(_AXES, "Kernels of many experts are split by experts over this mesh axis, and tokens go to theirs."),
    "attention": Key(choice(("ring", "ulysses")), "How such devices attend: keys go around a ring, or heads are exchanged."),
}  # fmt: skip

SIGNAL_TABLE = Keys(SIGNAL, elsewhere=dict.fromkeys(JSHARD, '"jshard:"'))
JSHARD_TABLE = Keys(JSHARD)

_HOW = (
    "For completion and checks in an editor that runs the YAML language server: `jshard schema > jshard.schema.json`, "
    "then begin a configuration with the line `# yaml-language-server: $schema=jshard.schema.json` (a path from that "
    "file). VS Code has it in the YAML extension by Red Hat; Neovim, Emacs and Helix run `yaml-language-server` itself."
)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a configuration, from the table used to check it."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": _HOW,
        "title": "jshard configuration",
        "description": "Signals by name, and jshard: the mesh and the experiment.",
        "type": "object",
        "minProperties": 1,
        "properties": {"jshard": {"description": "The mesh, and what holds for all signals.", **JSHARD_TABLE.json()}},
        "additionalProperties": {"$ref": "#/$defs/signal"},
        "$defs": {"signal": {"description": "How this place lies on the mesh.", **SIGNAL_TABLE.json()}},
    }

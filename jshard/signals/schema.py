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
    "shuffle": Key(flag("false"), "Shuffle the examples in each pass, by the seed; default: true."),
    "last": Key(choice(("drop", "fill", "keep")), "The use of a last, incomplete batch."),
    "ahead": Key(integer("2", least=0), "The number of batches to read ahead."),
}  # fmt: skip

TEXT: dict[str, Key] = {
    "text": Key(text("a file or a folder", "docs"), "Text: each file of a folder is a document, or each line of a .jsonl."),
    "made_by": Key(text("a command", "python -m examples.english runs/english"), "A command that makes a missing text."),
    "tokens": Key(text("bytes or a file", "bytes"), "bytes (the default), or a tokenizer.json, which needs jshard[text]."),
    "end": Key(text("a token", "<|endoftext|>"), "The tokenizer's token at the end of a document; default: none."),
    "length": Key(integer("256"), "Tokens in a row; default: 256."),
    "held_out": Key(part_or("a file or a folder", "0.05"), "The share of rows for evaluation, or another text for it."),
    "cache": Key(text("a folder", "runs/tokens"), "The folder of tokens; default: tokens beside the output folder."),
    **READING,
}  # fmt: skip

TRAIN: dict[str, Key] = {
    "model": _component("The model: its import path, or a mapping of path and arguments.", "examples.digits:Model"),
    "data": _component(
        "The data: its import path, or a mapping of path, arguments and reading options; or a mapping with text.",
        "examples.digits:data", READING, instead=Keys(TEXT, required="text"),
    ),
    "loss": Key(
        Keys(
            {
                "path": Key(dataclasses.replace(IMPORT_PATH, example="examples.digits:loss"), "Its import path, module:name."),
                "z": Key(number("1e-4"), "Weight of the z-loss, the squared log of the softmax denominator."),
                "chunk": Key(integer("256"), "Positions of a row with logits in memory at a time; default: 256."),
            },
            bare=dataclasses.replace(IMPORT_PATH, example="examples.digits:loss"), stands_for="path", open=True,
        ),
        "The loss: its import path, or a mapping of path and arguments; default: cross entropy.",
    ),
    "metrics": Key(
        Names("an import path or a list of import paths", "[examples.digits:hits]", each=IMPORT_PATH),
        "Functions of outputs and targets that return a number for each row; an evaluation prints their means.",
    ),
    "batch": Key(integer("64"), "Examples in a batch, over all devices."),
    "microbatches": Key(
        integer("8"), "The number of parts of a batch, run one by one, or through jshard.pipeline; default: 1."
    ),
    "steps": Key(integer("1000"), "The number of steps."),
    "seed": Key(integer("0", least=0), "The seed of weights and batches."),
    "optimizer": Key(
        Keys(
            {
                "name": Key(text("a name", "adamw"), "Its name in optax, or its import path, with its arguments beside it."),
                "clip": Key(number("1.0"), "The maximum global norm of the gradients, clipped before all else."),
                "schedule": Key(
                    Keys({}, bare=text("a name", "cosine"), open=True),
                    "The learning rate over the run: a name (warmup_cosine) or an import path (optax:NAME), with its "
                    "arguments; default length: the run's.",
                ),
                "decay": Key(
                    Keys({"match": Key(Globs(), "Globs of the parameters.")}, required="match"),
                    "The parameters with weight decay; default: all.",
                ),
            },
            bare=text("a name", "adamw"), stands_for="name", open=True,
        ),
        "The optimizer: a name in optax; or names or import paths with their arguments, chained in this order.",
    ),
    "evaluation": Key(
        Keys(
            {
                "every": Key(integer("100"), "Evaluate every N steps, and after the last step; default: only then."),
                "held_out": Key(number("0.1"), "The share of the examples, from their end, held out as test data."),
            },
            integer("100"), "every",
        ),
        "Evaluate on the test data every N steps.",
    ),
    "output": Key(text("a folder", "runs/mlp"), "The folder that results are written to."),
    "log": Key(
        Keys(
            {
                "every": Key(integer("100"), "Print and log figures every N steps; default: 100."),
                "ran": Key(flag(), "Log each process's steps and collectives, a line each; default: false."),
                "folder": Key(text("a folder", "runs/mlp/log"), "Log as with ran, to this folder; default: output/log."),
                "tensorboard": Key(flag(), "Write figures for TensorBoard too; needs jshard[tensorboard]."),
            },
            bare=flag(), stands_for="ran",
        ),
        "Logging; true means {ran: true}.",
    ),
    "checkpoint": Key(
        Keys(
            {
                "every": Key(integer("100"), "Save every N steps, and after the last step."),
                "keep": Key(integer("3"), "The number of checkpoints to keep; default: 3."),
                "folder": Key(text("a folder", "runs/mlp/checkpoints"), "Their folder; default: OUTPUT/checkpoints."),
            },
            bare=integer("100"), stands_for="every", required="every",
        ),
        "Checkpoints to continue training: when, where and how many.",
    ),
    "watchdog": Key(
        Keys({
            "step_timeout": Key(integer("300"), "Seconds without a step before several processes count as hung."),
            "start_timeout": Key(integer("60"), "Seconds for all processes to start."),
        }),
        "Timeouts of several processes.",
    ),
}  # fmt: skip

_KERNEL = Keys({op: Key(choice(words), f"The algorithm of {op}.") for op, words in ALGORITHMS.items()})

JSHARD: dict[str, Key] = {
    "mesh": Key(
        Mesh(), "Mesh axes and sizes in device order; -1 means all other devices. {size: 2, over: dcn} is across slices."
    ),
    "axis_types": Key(choice(("explicit", "auto")), "explicit (the default): layouts are part of types; auto: left to XLA."),
    "include": Key(Names("a file or a list of files", "base.yaml"), "Files to start from."),
    "strict": Key(flag("false"), "A signal missing from the file is an error; default: true."),
    "default": Key(text("the name of a signal", "layer1"), "The signal for places without a named signal."),
    "train": Key(Keys(TRAIN), "The experiment; the command line overrides it by a bare key=value."),
    "topology": Key(TopologyName(), "The devices for plan, report and diff without --topology."),
    "kernel": Key(_KERNEL, "The algorithm of each op, for signals without their own."),
    "pipeline": Key(
        Keys(
            {
                "axis": Key(Axis(), "The mesh axis of stages."),
                "schedule": Key(
                    _schedule(), "The operations of each stage in time: a name, or a file with your own table; default: 1f1b."
                ),
                "chunks": Key(integer("1"), "Chunks of layers in each stage; default: 1, or 2 for interleaved."),
            },
            elsewhere={"microbatches": "jshard.train"},
        ),
        "How the layers of signals with `stage` run as a pipeline.",
    ),
    "budget": Key(
        size(), "Maximum bytes on a device, as in 16GiB: at rest for jshard check, at the peak for jshard plan."
    ),
}  # fmt: skip

_AXES = Axes()
SHARD: dict[str, Key] = {
    "axis": Key(integer("0", least=None), "The array axis to split; -1 is the last."),
    "workers": Key(Workers(), "Device numbers; null means all."),
    "replicated": Key(flag(), "The whole array on each of the workers."),
    "mesh": Key(_AXES, "Mesh axes to split over, in place of workers."),
}

SIGNAL: dict[str, Key] = {
    "row": Key(_AXES, "Split rows of x and y (batch) over a mesh axis or a list; gradients of w are summed over it."),
    "column": Key(_AXES, "Split columns of w and y over a mesh axis or a list; nothing moves unless output: gather."),
    "reduction": Key(_AXES, "Split columns of x and rows of w over a mesh axis or a list; one all-reduce of y."),
    "sequence": Key(_AXES, "Split activations between products by sequence; attention sees whole rows. Needs reduction."),
    "ring": Key(_AXES, "Split activations by sequence everywhere; `attention` says how devices see other keys."),
    "attention": Key(choice(("ring", "ulysses")), "Under ring: pass keys around (the default), or exchange heads for places."),
    "expert": Key(_AXES, "Split stacked kernels by experts over this mesh axis, and send tokens to their experts."),
    "stage": Key(
        Stages(),
        "equal: split the layers of the matched jshard.stack over the stages of jshard.pipeline, equally many for each; "
        "balance: about equal FLOP for each, with the program before and after the layers; {0..5: 0, 6..9: 1}: ranges of "
        "layers with their stages. A number: all matched parameters are on this stage, from 0. A signal with nothing but "
        "stage leaves the layout to other signals.",
    ),
    "store": Key(
        Keys(
            {
                "parameters": Key(_AXES, "Parameters and the optimizer's state (FSDP)."),
                "keep": Key(flag(), "Keep gathered parameters for the backward pass; default: gather again."),
                "prefetch": Key(
                    flag(),
                    "Gather a layer of a loop while the layer before computes, and send its gradients while the next "
                    "computes; each keeps its input and the results saved by remat. Without parameters: only gradient sums.",
                ),
                "optimizer": Key(_AXES, "Only the optimizer's state (ZeRO-1)."),
            },
            bare=_AXES,
        ),
        "Parameters and optimizer state rest split over this mesh axis (FSDP); {optimizer: axis}: the state only.",
    ),
    "remat": Key(
        Keys(
            {"save": Key(Names("a name or a list of names", "[attention]"), "Results to save, by their JAX checkpoint_name.")},
            bare=flag_or(("full", "products", "chunk")), required="save",
        ),
        "Recompute activations of a loop's layers in the backward pass: all (full, true), all except products, or all except "
        "saved results; chunk: all of a pipeline's chunk of layers, from its input. store.keep is for gathered parameters.",
    ),
    "dtype": Key(
        Keys({
            "param": Key(choice(DTYPES), "The dtype of stored parameters."),
            "compute": Key(choice(DTYPES), "The dtype of products."),
            "reduce": Key(choice(DTYPES), "The dtype of sums over devices."),
        }),
        "dtypes of this place.",
    ),
    "match": Key(
        Globs(),
        'Globs of the parameters claimed by this signal: "layers/*/attn/{q,k}_proj/**"; "**": all others; '
        '"!layers/0/**": except these.',
    ),
    "output": Key(
        choice(("keep", "gather", "sum", "scatter")),
        "The output of a product. scatter and sum: jshard's own layers only; jshard.shard refuses them.",
    ),
    "kernel": Key(_KERNEL, "The algorithm of each op here; default: xla; auto: as kernels.choose decides."),
    "shard": Key(Keys(SHARD), "Any array under this signal: one axis over workers or mesh axes."),
    "extends": Key(Names("the name of a signal or a list of names", "_template"), "Signals or templates to start from."),
    "expect": Key(
        Keys(
            {name: Key(integer("1", least=0), f"The number of {name} collectives.") for name in COLLECTIVES}
            | {"bytes": Key(size(), "Maximum bytes on the wire per device, as in 64MiB.")}
        ),
        "A promise about collectives for `jshard check`.",
    ),
    "allow": Key(
        Names("the name of a JAX primitive or a list of names", "[sort]"),
        "Primitives without a rule in jshard.shard, allowed to gather whole arrays.",
    ),
    "backward": Key(
        text("the name of a signal", "other"),
        "The signal for the layout of cotangents: jshard's own layers and numbered stages only.",
    ),
    "compile": Key(flag(), "Compile a layer as one program, if called outside jit: jshard's own layers only."),
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
        "properties": {"jshard": {"description": "The mesh, and settings for all signals.", **JSHARD_TABLE.json()}},
        "additionalProperties": {"$ref": "#/$defs/signal"},
        "$defs": {"signal": {"description": "The layout of this place on the mesh.", **SIGNAL_TABLE.json()}},
    }

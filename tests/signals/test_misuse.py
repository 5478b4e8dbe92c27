"""Every way that a configuration can be wrong, each with the whole sentence that tells it, which signals/source.py,
signals/nodes.py, signals/value_types.py, signals/axes.py, signals/globs.py, signals/compose.py and signals/resolve.py write."""

from __future__ import annotations

import difflib
import errno
import os
from pathlib import Path

import pytest

from jshard.errors import JShardError
from jshard.signals.config import load_configuration

PIPE = "jshard: {mesh: {stage: 2}, train: {microbatches: 4}, pipeline: {axis: stage}}\nblocks: {stage: {0..5: 0, 6..7: 1}}\n"
MESH = "jshard:\n  mesh: {data: 2, tensor: 4}\n"
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)
AN_EXAMPLE = "write jshard: {mesh: {data: -1}} and a signal, as in layer1: {row: data}"
DEEP = "a: " + "[" * 200 + "]" * 200
DEEP_BY_ALIASES = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 80))

# What is written -> what is told; FILE stands for configs/mlp.yaml.
IN_A_FILE = {
    "unknown key": (
        MESH + "layer1: {row: data, colum: tensor}\n",
        'signal "layer1" (FILE:3) has an unknown key "colum"; did you mean "column"?',
    ),
    "unknown key far": (
        MESH + "layer1: {row: data, zzz: tensor}\n",
        'signal "layer1" (FILE:3) has an unknown key "zzz"; write row, column, reduction, '
        "sequence, ring, attention, expert, stage, store, remat, dtype, match, output, kernel or one of 6 more",
    ),
    "unknown nested key": (
        MESH + "layer1: {shard: {axes: 0, workers: [0]}}\n",
        'signal "layer1" (FILE:3) has an unknown key "shard.axes"; did you mean "shard.axis"?',
    ),
    "unknown jshard key": (
        "jshard: {mehs: {data: 2}}\n",
        'jshard (FILE:1) has an unknown key "mehs"; did you mean "mesh"?',
    ),
    "unknown train key": (
        MESH + "  train: {stepps: 3}\n",
        'jshard.train (FILE:3) has an unknown key "stepps"; did you mean "steps"?',
    ),
    "key of jshard in signal": (
        MESH + "layer1: {axis_types: auto}\n",
        'signal "layer1" (FILE:3) has an unknown key "axis_types"; write it under "jshard:"',
    ),
    "jshard misspelt": (
        "jshrad: {mesh: {data: 2}}\nlayer1: {row: []}\n",
        '"jshrad" (FILE:1) has the keys of jshard; did you mean "jshard"?',
    ),
    "jshard misspelt, behind what would follow": (
        "layer1: {row: data, column: tnsor}\njhsard: {mesh: {data: 2, tensor: 4}, kernel: {all_reduce: ring}, strct: true}\n",
        'signal "layer1" (FILE:1) names mesh axis "tnsor", which is not in jshard.mesh (FILE:2: data, tensor); did you mean '
        '"tensor"?',
        '"jhsard" (FILE:2) has the keys of jshard; did you mean "jshard"?',
        'jshard (FILE:2) has an unknown key "strct"; did you mean "strict"?',
    ),
    "jshard misspelt, with an include": (
        "layer1: {extends: _base}\njshrd: {include: base.yaml}\n",
        '"jshrd" (FILE:2) has the keys of jshard; did you mean "jshard"?',
    ),
    "mesh at top": (
        "mesh: {data: 2}\n",
        '"mesh" (FILE:1) is outside jshard; write it under "jshard:"',
    ),
    "train at top": (
        MESH + "train: {steps: 3}\n",
        '"train" (FILE:3) is outside jshard; write it under "jshard:"',
    ),
    "what follows from a fault": (
        MESH + "layer1: {reduction: tensr, output: scatter}\n",
        'signal "layer1" (FILE:3) names mesh axis "tensr", which is not in jshard.mesh '
        '(FILE:2: data, tensor); did you mean "tensor"?',
    ),
    "what follows from a fault over a template": (
        MESH + "_a: {output: keep}\nlayer1: {extends: _a, output: 3, reduction: tensor}\n",
        'signal "layer1" (FILE:4) has output: 3, which is not keep, gather, sum or scatter; write output: keep',
    ),
    "dup signal": (
        MESH + "layer1: {row: data}\nlayer1: {column: tensor}\n",
        'signal "layer1" (FILE:4) is already at FILE:3; keep one of the two',
    ),
    "dup key": (
        MESH + "layer1:\n  row: data\n  row: tensor\n",
        'signal "layer1" (FILE:5) has the key "row" again, after FILE:4; keep one of the two',
    ),
    "dup nested": (
        MESH + "layer1:\n  shard: {axis: 0, workers: [0], axis: 1}\n",
        'signal "layer1" (FILE:4) has the key "shard.axis" again, after FILE:4; keep one of the two',
    ),
    "dup in jshard": (
        MESH + "  mesh: {data: 8}\n",
        'jshard (FILE:3) has the key "mesh" again, after FILE:2; keep one of the two',
    ),
    "axis true": (
        MESH + "layer1: {shard: {axis: true, workers: [0, 1]}}\n",
        'signal "layer1" (FILE:3) has shard.axis: true, which is not a whole number; write axis: 0',
    ),
    "row number": (
        MESH + "layer1: {row: 3}\n",
        'signal "layer1" (FILE:3) has row: 3, which is not a mesh axis or a list of them; write row: data',
    ),
    "row null": (
        MESH + "layer1:\n  row:\n",
        'signal "layer1" (FILE:4) has row: nothing, which is not a mesh axis or a list of them; write row: data',
    ),
    "row list of number": (
        MESH + "layer1: {row: [data, 3]}\n",
        'signal "layer1" (FILE:3) has row: 3, which is not a mesh axis or a list of them; write row: data',
    ),
    "compile text": (
        MESH + "layer1: {compile: yes}\n",
        'signal "layer1" (FILE:3) has compile: "yes", which is not true or false; write compile: true',
    ),
    "store true": (
        MESH + "layer1: {store: true}\n",
        'signal "layer1" (FILE:3) has store: true, which is not a mesh axis or a list of them; write store: data',
    ),
    "store of nothing": (
        MESH + "layer1:\n  store:\n",
        'signal "layer1" (FILE:4) has store: nothing, which is not a mesh axis or a list of them or a mapping of parameters, keep, '
        "prefetch and optimizer; write store: data",
    ),
    "remat number": (
        MESH + "layer1: {remat: 1}\n",
        'signal "layer1" (FILE:3) has remat: 1, which is not full, products, chunk, true or false; write remat: full',
    ),
    "remat of chunks of no pipeline": (
        MESH + "layer1: {remat: chunk}\n",
        'signal "layer1" (FILE:3) has remat: chunk for layers on stages, but there is no jshard.pipeline; write '
        "remat: full",
    ),
    "remat of nothing": (
        MESH + "layer1: {remat: {keep: [a]}}\n",
        'signal "layer1" (FILE:3) has remat without save; write save: [attention]',
        'signal "layer1" (FILE:3) has an unknown key "remat.keep"; did you mean "remat.save"?',
    ),
    "output unknown": (
        MESH + "layer1: {output: gathr}\n",
        'signal "layer1" (FILE:3) has output: "gathr", which is not keep, gather, sum or scatter; did '
        'you mean "gather"?',
    ),
    "output far": (
        MESH + "layer1: {output: 3}\n",
        'signal "layer1" (FILE:3) has output: 3, which is not keep, gather, sum or scatter; write output: keep',
    ),
    "dtype word": (
        MESH + "layer1: {dtype: bfloat16}\n",
        'signal "layer1" (FILE:3) has dtype: "bfloat16", which is not a mapping of param, compute and '
        "reduce; write dtype: {param: float32}",
    ),
    "dtype unknown": (
        MESH + "layer1: {dtype: {compute: bfloat15}}\n",
        'signal "layer1" (FILE:3) has dtype.compute: "bfloat15", which is not float32, bfloat16, '
        'float16 or float64; did you mean "bfloat16"?',
    ),
    "strict text": (
        "jshard: {strict: 'no'}\nlayer1: {}\n",
        'jshard.strict (FILE:1) is "no", which is not true or false; write strict: false',
    ),
    "axis between slices with nothing said": (
        "jshard:\n  mesh: {slice: {}, data: 4}\n",
        "jshard.mesh.slice (FILE:2) has no over; write over: dcn",
        "jshard.mesh.slice (FILE:2) has no size; write slice: {size: 2, over: dcn}",
    ),
    "axis over another network": (
        "jshard:\n  mesh: {slice: {size: 2, over: ici}, data: 4}\n",
        'jshard.mesh.slice.over (FILE:2) is "ici", which is not dcn; write over: dcn',
    ),
    "axis between slices of open size": (
        "jshard:\n  mesh: {slice: {size: -1, over: dcn}, data: 4}\n",
        "jshard.mesh.slice.size (FILE:2) is -1, which is not a whole number of 1 or more; write size: 2",
    ),
    "axis not in mesh": (
        MESH + "layer1: {row: data, column: tensr}\n",
        'signal "layer1" (FILE:3) names mesh axis "tensr", which is not in jshard.mesh (FILE:2: data, '
        'tensor); did you mean "tensor"?',
    ),
    "axis far": (
        MESH + "layer1: {row: stage}\n",
        'signal "layer1" (FILE:3) names mesh axis "stage", which is not in jshard.mesh (FILE:2: data, '
        "tensor); write data or tensor",
    ),
    "axis with no mesh": (
        "layer1: {row: data}\n",
        'signal "layer1" (FILE:1) names mesh axis "data", but there is no jshard.mesh; write jshard: '
        "{mesh: {data: -1}}",
    ),
    "layers left out": (
        PIPE + "layer1: {stage: {0..5: 0, 7..11: 1}}\n",
        'signal "layer1" (FILE:3) has layers 7..11 where layer 6 is next; write 6..11',
    ),
    "layers said twice": (
        PIPE + "layer1: {stage: {0..5: 0, 3..7: 1}}\n",
        'signal "layer1" (FILE:3) has layers 3..7 where layer 6 is next; write 6..7',
    ),
    "no range of layers": (
        PIPE + "layer1: {stage: {0-5: 0}}\n",
        'signal "layer1" (FILE:3) has stage "0-5", which is no range of layers; write {0..5: 0, 6..11: 1}, with the first and the '
        "last layer of each range",
    ),
    "layers on no number": (
        PIPE + "layer1: {stage: {0..5: first}}\n",
        'signal "layer1" (FILE:3) has layers 0..5 on stage "first", which is no number; write 0..5: 0',
    ),
    "no layers": (
        PIPE + "layer1: {stage: {}}\n",
        'signal "layer1" (FILE:3) has stage: a mapping, which is not equal, balance, a number, or ranges of layers with the stage of '
        "each; write stage: equal",
    ),
    "balance misspelled": (
        PIPE + "layer1: {stage: balanced}\n",
        'signal "layer1" (FILE:3) has stage: "balanced", which is not equal, balance, a number, or ranges of layers with the stage of '
        'each; did you mean "balance"?',
    ),
    "axis listed twice": (
        MESH + "layer1: {row: [data, data]}\n",
        'signal "layer1" (FILE:3) lists mesh axis "data" twice in row; keep one',
    ),
    "row column": (
        MESH + "layer1: {row: data, column: data}\n",
        'signal "layer1" (FILE:3) names mesh axis "data" for column and for row (FILE:3), which would '
        "split y over it twice; use another mesh axis for one of them",
    ),
    "row reduction": (
        MESH + "layer1:\n  row: [data, tensor]\n  reduction: tensor\n",
        'signal "layer1" (FILE:5) names mesh axis "tensor" for reduction and for row (FILE:4), which '
        "would split x over it twice; use another mesh axis for one of them",
    ),
    "column reduction": (
        MESH + "layer1: {column: tensor, reduction: tensor}\n",
        'signal "layer1" (FILE:3) names mesh axis "tensor" for reduction and for column (FILE:3), which '
        "would split w over it twice; use another mesh axis for one of them",
    ),
    "row sequence": (
        MESH + "layer1: {row: data, sequence: data}\n",
        'signal "layer1" (FILE:3) names mesh axis "data" for sequence and for row (FILE:3), which would '
        "split x over it twice; use another mesh axis for one of them",
    ),
    "store column": (
        MESH + "layer1: {column: tensor, store: tensor}\n",
        'signal "layer1" (FILE:3) names mesh axis "tensor" for store and for column (FILE:3), which '
        "would split w over it twice; use another mesh axis for one of them",
    ),
    "store opt reduction": (
        MESH + "layer1: {reduction: tensor, store: {optimizer: [data, tensor]}}\n",
        'signal "layer1" (FILE:3) names mesh axis "tensor" for store.optimizer and for reduction '
        "(FILE:3), which would split the optimizer's state of w over it twice; use another mesh axis "
        "for one of them",
    ),
    "store that only keeps": (
        MESH + "layer1: {store: {keep: true}}\n",
        'signal "layer1" (FILE:3) has store without parameters; write parameters: data',
    ),
    "store of both": (
        MESH + "layer1:\n  store:\n    parameters: data\n    optimizer: tensor\n",
        'signal "layer1" (FILE:5) has store.parameters beside store.optimizer; remove parameters',
    ),
    "store of the state, and keep": (
        MESH + "layer1: {store: {optimizer: tensor, keep: true}}\n",
        'signal "layer1" (FILE:3) has store.keep beside store.optimizer; remove keep',
    ),
    "store prefetch and keep": (
        MESH + "layer1: {store: {parameters: data, keep: true, prefetch: true}}\n",
        'signal "layer1" (FILE:3) has store.keep beside store.prefetch, which keeps nothing; remove one',
    ),
    "store keep of nothing": (
        MESH + "layer1: {store: {parameters: data, keep: 1}}\n",
        'signal "layer1" (FILE:3) has store.keep: 1, which is not true or false; write keep: true',
    ),
    "store bad key": (
        MESH + "layer1: {store: {optimiser: data}}\n",
        'signal "layer1" (FILE:3) has an unknown key "store.optimiser"; did you mean "store.optimizer"?',
    ),
    "output scatter alone": (
        MESH + "layer1: {column: tensor, output: scatter}\n",
        'signal "layer1" (FILE:3) has output: scatter without reduction, so nothing is summed; name a '
        "mesh axis for reduction, or remove output",
    ),
    "output sum alone": (
        MESH + "layer1: {output: sum}\n",
        'signal "layer1" (FILE:3) has output: sum without reduction, so nothing is summed; name a mesh '
        "axis for reduction, or remove output",
    ),
    "output gather alone": (
        MESH + "layer1: {row: data, output: gather}\n",
        'signal "layer1" (FILE:3) has output: gather without column, so nothing is gathered; name a '
        "mesh axis for column, or remove output",
    ),
    "output keep": (
        MESH + "layer1:\n  reduction: tensor\n  output: keep\n",
        'signal "layer1" (FILE:5) has output: keep with reduction (FILE:4), but partial sums can\'t be '
        "returned; write output: sum or output: scatter",
    ),
    "shard row": (
        MESH + "layer1: {shard: {axis: 0, workers: null}, row: data}\n",
        'signal "layer1" (FILE:3) has shard beside row (FILE:3), and both split arrays; remove shard, or row',
    ),
    "shard no axis": (
        MESH + "layer1: {shard: {workers: [0, 1]}}\n",
        'signal "layer1" (FILE:3) has shard without an axis; write axis: 0, or replicated: true',
    ),
    "shard mesh workers": (
        MESH + "layer1: {shard: {axis: 0, mesh: data, workers: [0]}}\n",
        'signal "layer1" (FILE:3) has shard.mesh beside shard.workers (FILE:3); keep one of the two',
    ),
    "shard mesh replicated": (
        MESH + "layer1: {shard: {axis: 0, mesh: data, replicated: true}}\n",
        'signal "layer1" (FILE:3) has shard.mesh beside shard.replicated (FILE:3); keep one of the two',
    ),
    "shard word": (
        MESH + "layer1: {shard: data}\n",
        'signal "layer1" (FILE:3) has shard: "data", which is not a mapping of axis, workers, '
        "replicated and mesh; write shard: {axis: 0}",
    ),
    "workers twice": (
        MESH + "layer1: {shard: {axis: 0, workers: [0, 1, 1]}}\n",
        'signal "layer1" (FILE:3) names worker 1 twice; keep one',
    ),
    "workers negative": (
        MESH + "layer1: {shard: {axis: 0, workers: [0, -1]}}\n",
        'signal "layer1" (FILE:3) names worker -1; count workers from 0',
    ),
    "workers beyond": (
        MESH + "layer1: {shard: {axis: 0, workers: [0, 8]}}\n",
        'signal "layer1" (FILE:3) names worker 8, but jshard.mesh (FILE:2) has 8 devices; use numbers from 0 to 7',
    ),
    "workers empty": (
        MESH + "layer1: {shard: {axis: 0, workers: []}}\n",
        'signal "layer1" (FILE:3) names no worker; write workers: null for all of them',
    ),
    "workers number": (
        MESH + "layer1: {shard: {axis: 0, workers: 4}}\n",
        'signal "layer1" (FILE:3) has shard.workers: 4, which is not a list of device numbers; write workers: [0, 1]',
    ),
    "workers text": (
        MESH + "layer1: {shard: {axis: 0, workers: [0, one]}}\n",
        'signal "layer1" (FILE:3) has shard.workers: "one", which is not a list of device numbers; '
        "write workers: [0, 1]",
    ),
    "backward nowhere": (
        MESH + "layer1: {row: data, backward: layr2}\nlayer2: {}\n",
        'signal "layer1" (FILE:3) names backward "layr2", which is not in FILE; did you mean "layer2"?',
    ),
    "backward template": (
        MESH + "_back: {}\nlayer1: {row: data, backward: _back}\n",
        'signal "layer1" (FILE:4) names backward "_back", which is only a template; name a signal, or call it "back"',
    ),
    "backward self": (
        MESH + "layer1: {row: data, backward: layer1}\n",
        'signal "layer1" (FILE:3) is its own backward; remove backward',
    ),
    "backward loop": (
        MESH + "layer1: {backward: layer2}\nlayer2: {backward: layer3}\nlayer3: {backward: layer1}\n",
        'signal "layer1" (FILE:3) is its own backward by way of "layer3" (FILE:5); remove one backward',
    ),
    "backward two globs": (
        MESH + "a*: {}\n'*b': {}\nlayer1: {backward: ab}\n",
        'signal "layer1" (FILE:5) names backward "ab", which both "a*" (FILE:3) and "*b" (FILE:4) '
        "match; name one of the two",
    ),
    "extends unknown": (
        MESH + "_base: {row: data}\nlayer1: {extends: _bsae}\n",
        'signal "layer1" (FILE:4) extends "_bsae", which is not in FILE; did you mean "_base"?',
    ),
    "extends self": (
        MESH + "layer1: {extends: layer1}\n",
        'signal "layer1" (FILE:3) extends itself; remove it',
    ),
    "extends loop": (
        MESH + "_a: {extends: _b}\n_b: {extends: _a}\nlayer1: {extends: _a}\n",
        'signal "_a" (FILE:3) extends itself by way of "_b" (FILE:4); remove one extends',
    ),
    "extends number": (
        MESH + "layer1: {extends: 3}\n",
        'signal "layer1" (FILE:3) has extends: 3, which is not the name of a signal or a list of names; '
        "write extends: _template",
    ),
    "extends twice": (
        MESH + "_a: {}\nlayer1: {extends: [_a, _a]}\n",
        'signal "layer1" (FILE:4) lists "_a" twice in extends; keep one',
    ),
    "fault in template": (
        MESH + "_a: {column: tensr}\nlayer1: {extends: _a, row: data}\nlayer2: {extends: _a}\n",
        'signal "_a" (FILE:3) names mesh axis "tensr", which is not in jshard.mesh (FILE:2: data, '
        'tensor); did you mean "tensor"?',
    ),
    "conflict by template": (
        MESH + "_a: {column: tensor}\nlayer1: {extends: _a, reduction: tensor}\n",
        'signal "layer1" (FILE:4) names mesh axis "tensor" for reduction and for column (FILE:3), which '
        "would split w over it twice; use another mesh axis for one of them",
    ),
    "default unknown": (
        MESH + "  default: layr1\nlayer1: {}\n",
        'jshard.default (FILE:3) names "layr1", which is not in FILE; did you mean "layer1"?',
    ),
    "default template": (
        MESH + "  default: _t\n_t: {}\n",
        'jshard.default (FILE:3) names "_t", which is only a template; name a signal, or call it "t"',
    ),
    "mesh empty": (
        "jshard: {mesh: {}}\nlayer1: {row: data}\n",
        "jshard.mesh (FILE:1) names no mesh axis; write mesh: {data: -1} for all devices",
    ),
    "mesh list": (
        "jshard: {mesh: [data, tensor]}\nlayer1: {row: data}\n",
        "jshard.mesh (FILE:1) is a list, which is not a mapping of mesh axes to sizes; write mesh: "
        "{data: 2, tensor: 4}",
    ),
    "mesh zero": (
        "jshard: {mesh: {data: 0}}\n",
        "jshard.mesh.data (FILE:1) is 0, which is not a size of a mesh axis; write data: 2, or -1 for "
        "all devices that are left",
    ),
    "mesh negative": (
        "jshard: {mesh: {data: -2}}\n",
        "jshard.mesh.data (FILE:1) is -2, which is not a size of a mesh axis; write data: 2, or -1 for "
        "all devices that are left",
    ),
    "mesh two open": (
        "jshard: {mesh: {data: -1, tensor: -1}}\n",
        "jshard.mesh.tensor (FILE:1) is -1, as jshard.mesh.data (FILE:1) is; leave one size open and "
        "give the other a number",
    ),
    "mesh bool": (
        "jshard: {mesh: {data: true}}\n",
        "jshard.mesh.data (FILE:1) is true, which is not a size of a mesh axis; write data: 2, or -1 "
        "for all devices that are left",
    ),
    "mesh text": (
        "jshard: {mesh: {data: two}}\n",
        'jshard.mesh.data (FILE:1) is "two", which is not a size of a mesh axis; write data: 2, or -1 '
        "for all devices that are left",
    ),
    "mesh huge": (
        "jshard: {mesh: {data: 2147483648}}\n",
        "jshard.mesh.data (FILE:1) is 2147483648, which is not a size of a mesh axis; write data: 2, or -1 for "
        "all devices that are left",
    ),
    "mesh of which one size is wrong": (
        "jshard: {mesh: {data: 0, tensor: 4}}\nlayer1: {shard: {axis: 0, workers: [5]}}\n",
        "jshard.mesh.data (FILE:1) is 0, which is not a size of a mesh axis; write data: 2, or -1 for "
        "all devices that are left",
    ),
    "worker huge": (
        "layer1: {shard: {axis: 0, workers: [2147483648]}}\n",
        'signal "layer1" (FILE:1) names worker 2147483648; use the number of a device',
    ),
    "axis not in mesh, twice": (
        MESH + "layer1: {row: tensr, column: tensr}\n",
        'signal "layer1" (FILE:3) names mesh axis "tensr", which is not in jshard.mesh (FILE:2: data, tensor); '
        'did you mean "tensor"?',
    ),
    "extends a signal misspelt that comes later": (
        MESH + "a: {extends: laier}\nlayer: {}\n",
        'signal "a" (FILE:3) extends "laier", which is not in FILE; did you mean "layer"?',
    ),
    "extends itself by way of one before it in the alphabet": (
        MESH + "y: {extends: x}\nx: {extends: y}\n",
        'signal "y" (FILE:3) extends itself by way of "x" (FILE:4); remove one extends',
    ),
    "default that three globs match": (
        MESH + "  default: ab\n'a*': {}\n'*b': {}\n'?b': {}\n",
        'jshard.default (FILE:3) names "ab", which both "a*" (FILE:4) and "*b" (FILE:5) match; name one of the two',
    ),
    "one mesh axis twice, the later key first in the table": (
        MESH + "layer1:\n  reduction: tensor\n  row: tensor\n",
        'signal "layer1" (FILE:5) names mesh axis "tensor" for row and for reduction (FILE:4), which would split x over it '
        "twice; use another mesh axis for one of them",
    ),
    "one mesh axis twice on a line, the later key first in the table": (
        MESH + "layer1: {reduction: tensor, row: tensor}\n",
        'signal "layer1" (FILE:3) names mesh axis "tensor" for row and for reduction (FILE:3), which would split x over it '
        "twice; use another mesh axis for one of them",
    ),
    "fewer than no collective": (
        MESH + "layer1: {expect: {all_reduce: 0}}\nlayer2: {expect: {all_reduce: -1}}\n",
        'signal "layer2" (FILE:4) has expect.all_reduce: -1, which is not a whole number of 0 or more; write all_reduce: 1',
    ),
    "key again deeper": (
        MESH + "  train: {steps: 1, steps: 2}\na: {shard: {axis: 0, axis: 1}}\n",
        'jshard.train (FILE:3) has the key "steps" again, after FILE:3; keep one of the two',
        'signal "a" (FILE:4) has the key "shard.axis" again, after FILE:4; keep one of the two',
    ),
    "signals before jshard in the alphabet": (
        MESH
        + "a: {row: 3}\nb: {colum: tensor}\nc: {stage: data}\nd: {store: {}}\ne: {remat: {}}\nf: {shard: {axes: 0}}\n",
        'signal "a" (FILE:3) has row: 3, which is not a mesh axis or a list of them; write row: data',
        'signal "b" (FILE:4) has an unknown key "colum"; did you mean "column"?',
        'signal "c" (FILE:5) has stage: "data", which is not equal, balance, a number, or ranges of layers with the stage of each; write stage: equal',
        'signal "d" (FILE:6) has store without parameters; write parameters: data',
        'signal "e" (FILE:7) has remat without save; write save: [attention]',
        'signal "f" (FILE:8) has an unknown key "shard.axes"; did you mean "shard.axis"?',
    ),
    "expert": (
        MESH + "layer1: {expert: tensor, column: tensor}\nlayer2: {expert: data, row: [data, tensor]}\n",
        'signal "layer1" (FILE:3) names mesh axis "tensor" for column and for expert (FILE:3), which would split w over it twice; '
        "use another mesh axis for one of them",
        'signal "layer2" (FILE:4) names mesh axis "data" for expert, which is not last in row (FILE:4); write row: [tensor, '
        "data]",
    ),
    "expert before a later name": (
        MESH + "layer1: {expert: tensor, row: [tensor, data]}\n",
        'signal "layer1" (FILE:3) names mesh axis "tensor" for expert, which is not last in row (FILE:3); write row: [data, '
        "tensor]",
    ),
    "stage": (
        MESH + "layer1: {stage: equal}\n",
        'signal "layer1" (FILE:3) has stage, but there is no jshard.pipeline; write jshard: {pipeline: {axis: stage}, '
        "train: {microbatches: 8}}",
    ),
    "ring": (
        MESH + "layer1: {row: data, ring: data}\nlayer2: {ring: rign}\nlayer3: {attention: ulises, ring: tensor}\n"
        "layer4: {attention: ulysses}\n",
        'signal "layer1" (FILE:3) names mesh axis "data" for ring and for row (FILE:3), which would split x over it twice; use '
        "another mesh axis for one of them",
        'signal "layer2" (FILE:4) names mesh axis "rign", which is not in jshard.mesh (FILE:2: data, tensor); write data or tensor',
        'signal "layer3" (FILE:5) has attention: "ulises", which is not ring or ulysses; did you mean "ulysses"?',
        'signal "layer4" (FILE:6) has attention: ulysses without ring, so the sequence is not split; name a mesh axis for ring, or '
        "remove attention",
    ),
    "kernel": (
        MESH + "layer1: {kernel: {matmul: palas}}\n",
        'signal "layer1" (FILE:3) has kernel.matmul: "palas", which is not auto, pallas or xla; did you mean "pallas"?',
    ),
    "match of no globs": (
        MESH + "layer1:\n  match:\n    - 3\n    - ''\n    - {q,k}\n",
        'signal "layer1" (FILE:5) has match: 3, which is not a glob or a list of globs; write match: ["layers/*/mlp/**"]',
        'signal "layer1" (FILE:6) has match: "", which is not a glob or a list of globs; write match: ["layers/*/mlp/**"]',
        'signal "layer1" (FILE:7) has match: a mapping, which is not a glob or a list of globs; write match: '
        '["layers/*/mlp/**"]',
    ),
    "match broken globs": (
        MESH
        + "layer1:\n  match:\n    - a/{q,k\n    - a/q}/b\n    - a/{q,{k,v}}\n    - /a\n    - 'a**/b'\n    - b\n    - b\n",
        'signal "layer1" (FILE:5) has match "a/{q,k", whose "{" is not closed; write "}" after the last alternative',
        'signal "layer1" (FILE:6) has match "a/q}/b", whose "}" has no "{" before it; write "{" before the first alternative',
        'signal "layer1" (FILE:7) has match "a/{q,{k,v}}", whose braces are nested or in the wrong order; '
        'write "{a,b,c}"',
        'signal "layer1" (FILE:8) has match "/a", which has an empty part; write "a"',
        'signal "layer1" (FILE:9) has match "a**/b", which has "**" and other letters in one part; write "*" within a part, '
        'and "**" for any number of parts',
        'signal "layer1" (FILE:11) lists glob "b" twice in match; keep one',
    ),
    "match of exceptions alone": (
        MESH + "layer1: {match: '!a/**'}\n",
        'signal "layer1" (FILE:3) has match of exceptions alone; write match: ["**", "!a/**"]',
    ),
    "match broken exceptions": (
        MESH + "layer1:\n  match:\n    - a\n    - '!a/{q,k'\n    - '!'\n",
        'signal "layer1" (FILE:6) has match "!a/{q,k", whose "{" is not closed; write "}" after the last alternative',
        'signal "layer1" (FILE:7) has match "!", which has an empty part; write "**"',
    ),
    "match with an unquoted exception": (
        MESH + "layer1:\n  match:\n    - value/**\n    - !value/output/**\n",
        'FILE:6 has the tag "!value/output/**", but tags are not allowed; quote it: "!value/output/**"',
    ),
    "match with a brace behind alternatives": (
        MESH + "layer1: {match: '{a,b}/q}'}\n",
        'signal "layer1" (FILE:3) has match "{a,b}/q}", whose "}" has no "{" before it; write "{" before the first alternative',
    ),
    "match with two stars behind letters": (
        MESH + "layer1: {match: 'a/$**'}\n",
        'signal "layer1" (FILE:3) has match "a/$**", which has "**" and other letters in one part; write "*" within a part, and '
        '"**" for any number of parts',
    ),
    "match of many spellings": (
        MESH + "layer1: {match: 'abc" + "{a,b}" * 10 + "'}\n",
        'signal "layer1" (FILE:3) has match "abc'
        + "{a,b}" * 10
        + '", which has 1,024 spellings, more than 1,000; write "*" for '
        "some of the alternatives",
    ),
    "match under a glob": (
        MESH + "block*/attn: {match: '**'}\n",
        'signal "block*/attn" (FILE:3) has match, but its name is a glob, which means many places; give it a name of its own',
    ),
    "match beside workers": (
        MESH + "layer1: {match: '**', shard: {axis: 0, workers: [0, 1]}}\n",
        'signal "layer1" (FILE:3) has match beside shard.workers (FILE:3), which are a mesh of their own; write shard: {axis: 0, '
        "mesh: data}",
    ),
    "match with an unquoted star": (
        MESH + "layer1: {match: [**]}\n",
        'FILE:3 starts a word with "*" or "&", which mean aliases in YAML; quote it, as in "*/mlp": {row: data}',
    ),
    "match with an unquoted name behind a star": (
        MESH + "layer1: {match: [*_proj]}\n",
        'FILE:3 has "*_proj", but no "&_proj" is above it; quote it: "*_proj"',
    ),
    "match with unquoted braces": (
        MESH + "layer1: {match: [layers/{q,k}_proj]}\n",
        'FILE:3 has a "{" inside a word of a list, where it means something else in YAML; quote the word: ["layer?/{q,k}"]',
    ),
    "match with an unquoted question mark": (
        MESH + "layer1: {match: [layer?/kernel]}\n",
        'FILE:3 has a "?" inside a word of a list, where it means something else in YAML; quote the word: ["layer?/{q,k}"]',
    ),
    "match with unquoted braces first": (
        MESH + "layer1:\n  match:\n    - {q,k}_proj/**\n",
        'FILE:5 has more text after a "}", "]" or quote; quote the whole value',
    ),
    "jshard kernel": (
        MESH + "  kernel: {matmull: pallas}\n",
        'jshard.kernel (FILE:3) has an unknown key "matmull"; did you mean "matmul"?',
    ),
    "pipeline": (
        MESH + "  pipeline: 1f1b\n",
        'jshard.pipeline (FILE:3) is "1f1b", which is not a mapping of axis, schedule and chunks; write pipeline: {axis: '
        "stage}",
    ),
    "pipeline of wrong words": (
        MESH + "  pipeline: {axis: stage, schedule: 1f1, chunks: [2]}\n  train: {microbatches: 0}\na: {stage: equal}\n",
        'jshard.pipeline.axis (FILE:3) names mesh axis "stage", which is not in jshard.mesh (FILE:2: data, tensor); write data or '
        "tensor",
        'jshard.pipeline.schedule (FILE:3) is "1f1", which is not gpipe, 1f1b, interleaved, zero_bubble or the file of a table; '
        'did you mean "1f1b"?',
        "jshard.pipeline.chunks (FILE:3) is a list, which is not a whole number of 1 or more; write chunks: 1",
        "jshard.train.microbatches (FILE:4) is 0, which is not a whole number of 1 or more; write microbatches: 8",
    ),
    "pipeline with microbatches": (
        MESH + "  pipeline: {axis: data, microbatches: 2}\na: {stage: equal}\n",
        'jshard.pipeline (FILE:3) has an unknown key "microbatches"; write it under jshard.train',
    ),
    "pipeline of two axes": (
        MESH + "  pipeline: {axis: [data, tensor]}\n  train: {microbatches: 2}\na: {stage: equal}\n",
        "jshard.pipeline.axis (FILE:3) is a list, which is not a mesh axis; write axis: stage",
    ),
    "pipeline without more": (
        MESH + "  pipeline: {}\n",
        "jshard.pipeline (FILE:3) has no axis; write axis: stage",
        "jshard.pipeline (FILE:3) has no jshard.train.microbatches; write train: {microbatches: 8} beside it",
        "jshard.pipeline (FILE:3) has no layers: no signal has stage; write layers: {stage: equal, match: "
        '["blocks/**"]}, with the path of a jshard.stack',
    ),
    "pipeline without layers, beside workers and a mesh": (
        MESH + "  pipeline: {axis: data}\n  train: {microbatches: 2}\na: {shard: {axis: 0, workers: [0, 1]}}\n",
        "jshard.pipeline (FILE:3) has no layers: no signal has stage; write layers: {stage: equal, match: "
        '["blocks/**"]}, with the path of a jshard.stack',
    ),
    "pipeline without layers, beside no workers": (
        "jshard: {train: {microbatches: 2}, pipeline: {axis: stage}}\na: {shard: {axis: 0}}\n",
        "jshard.pipeline (FILE:1) has no layers: no signal has stage; write layers: {stage: equal, match: "
        '["blocks/**"]}, with the path of a jshard.stack',
    ),
    "pipeline beside": (
        MESH + "  axis_types: auto\n  train: {microbatches: 2}\n  pipeline: {axis: data}\n"
        "a: {stage: equal, row: data}\nb: {shard: {axis: 0, mesh: data}}\n",
        "jshard.pipeline (FILE:5) is beside axis_types: auto (FILE:3), which leaves the program to XLA; write axis_types: explicit",
        'signal "a" (FILE:6) names mesh axis "data" for row, which is the axis of jshard.pipeline (FILE:5); use another mesh '
        "axis",
        'signal "b" (FILE:7) names mesh axis "data" for shard.mesh, which is the axis of jshard.pipeline (FILE:5); use another '
        "mesh axis",
    ),
    "topology": (
        MESH + "  topology: v5x:4x4\n",
        'jshard.topology (FILE:3) is "v5x:4x4", which is no topology: there is no chip "v5x"; use v5e:4x4, v6e:4x4 or '
        "v5p:4x4x8",
    ),
    "topology without a size": (
        MESH + "  topology: v5e\n",
        'jshard.topology (FILE:3) is "v5e", which is no topology: v5e takes 2 sizes after the colon; use v5e:1x1, v5e:2x2, '
        "v5e:2x4 or v5e:4x4",
    ),
    "topology in capitals": (
        MESH + "  topology: V5E:4x4\n",
        'jshard.topology (FILE:3) is "V5E:4x4", which is no topology; write topology: v5e:4x4',
    ),
    "topology with a blank": (
        MESH + "  topology: 'v5e:4x4 '\n",
        'jshard.topology (FILE:3) is "v5e:4x4 ", which is no topology; write topology: v5e:4x4',
    ),
    "topology that is a number": (
        MESH + "  topology: 8\n",
        "jshard.topology (FILE:3) is 8, which is not a topology; write topology: v5e:4x4",
    ),
    "budget": (
        MESH + "  budget: much\n",
        'jshard.budget (FILE:3) is "much", which is not a size; write budget: 64MiB',
    ),
    "watchdog": (
        MESH + "  train: {watchdog: 100}\n",
        "jshard.train.watchdog (FILE:3) is 100, which is not a mapping of step_timeout and start_timeout; write watchdog: "
        "{step_timeout: 300}",
    ),
    "batch zero": (
        MESH + "  train: {batch: 0}\n",
        "jshard.train.batch (FILE:3) is 0, which is not a whole number of 1 or more; write batch: 64",
    ),
    "steps negative": (
        MESH + "  train: {steps: -3}\n",
        "jshard.train.steps (FILE:3) is -3, which is not a whole number of 1 or more; write steps: 1000",
    ),
    "steps fraction": (
        MESH + "  train: {steps: 2.5}\n",
        "jshard.train.steps (FILE:3) is 2.5, which is not a whole number of 1 or more; write steps: 1000",
    ),
    "seed text": (
        MESH + "  train: {seed: one}\n",
        'jshard.train.seed (FILE:3) is "one", which is not a whole number of 0 or more; write seed: 0',
    ),
    "model not import": (
        MESH + "  train: {model: examples.digits}\n",
        'jshard.train.model (FILE:3) is "examples.digits", which is not an import path; write model: '
        "examples.digits:Model",
    ),
    "model no path": (
        MESH + "  train: {model: {hidden: 3}}\n",
        "jshard.train.model (FILE:3) has no path; write path: examples.digits:Model",
    ),
    "optimizer number": (
        MESH + "  train: {optimizer: 3}\n",
        "jshard.train.optimizer (FILE:3) is 3, which is not a name; write optimizer: adamw",
    ),
    "optimizer clip": (
        MESH + "  train: {optimizer: {name: adamw, clip: 0}}\n",
        "jshard.train.optimizer.clip (FILE:3) is 0, which is not a number above 0; write clip: 1.0",
    ),
    "optimizer decay": (
        MESH + "  train: {optimizer: {adamw: {}, decay: {mtch: a}}}\n",
        'jshard.train.optimizer.decay (FILE:3) has an unknown key "mtch"; did you mean "match"?',
    ),
    "metrics number": (
        MESH + "  train: {metrics: [m:f, hits]}\n",
        'jshard.train.metrics (FILE:3) is "hits", which is not an import path or a list of import paths; write metrics: '
        "[examples.digits:hits]",
    ),
    "evaluation held out": (
        MESH + "  train: {evaluation: {held_out: -1}}\n",
        "jshard.train.evaluation.held_out (FILE:3) is -1, which is not a number above 0; write held_out: 0.1",
    ),
    "evaluation zero": (
        MESH + "  train: {evaluation: 0}\n",
        "jshard.train.evaluation (FILE:3) is 0, which is not a whole number of 1 or more; write evaluation: 100",
    ),
    "log word": (
        MESH + "  train: {log: often}\n",
        'jshard.train.log (FILE:3) is "often", which is not true or false; write log: true',
    ),
    "output number": (
        MESH + "  train: {output: 3}\n",
        "jshard.train.output (FILE:3) is 3, which is not a folder; write output: runs/mlp",
    ),
    "expect word": (
        MESH + "layer1: {expect: {psum: 1}}\n",
        'signal "layer1" (FILE:3) has an unknown key "expect.psum"; did you mean "expect.all_reduce"?',
    ),
    "expect count": (
        MESH + "layer1: {expect: {all_reduce: -1}}\n",
        'signal "layer1" (FILE:3) has expect.all_reduce: -1, which is not a whole number of 0 or more; write all_reduce: 1',
    ),
    "expect bytes": (
        MESH + "layer1: {expect: {bytes: 64 MegaBytes}}\n",
        'signal "layer1" (FILE:3) has expect.bytes: "64 MegaBytes", which is not a size; write bytes: 64MiB',
    ),
    "list at top": (
        "- layer1\n- layer2\n",
        "FILE:1 is a list, not a mapping of signals; write signals by name, as in layer1: {row: data}",
    ),
    "text at top": (
        "layer1\n",
        'FILE:1 is "layer1", not a mapping of signals; write signals by name, as in layer1: {row: data}',
    ),
    "empty": (
        "",
        "FILE is empty; write jshard: {mesh: {data: -1}} and a signal, as in layer1: {row: data}",
    ),
    "signal null": (
        MESH + "layer1:\n",
        'signal "layer1" (FILE:3) has no value; write {} after it to replicate, or keys such as row: data',
    ),
    "signal text": (
        MESH + "layer1: data\n",
        'signal "layer1" (FILE:3) is "data", which is not a mapping of keys such as row, column and '
        "reduction; write layer1: {row: data}",
    ),
    "signal list": (
        MESH + "layer1: [row, data]\n",
        'signal "layer1" (FILE:3) is a list, which is not a mapping of keys such as row, column and '
        "reduction; write layer1: {row: data}",
    ),
    "jshard null": (
        "jshard:\nlayer1: {}\n",
        "jshard (FILE:1) is nothing, which is not a mapping of keys such as mesh, axis_types and "
        "include; write jshard: {mesh: {data: 2, tensor: 4}}",
    ),
    "jshard list": (
        "jshard: [data]\n",
        "jshard (FILE:1) is a list, which is not a mapping of keys such as mesh, axis_types and "
        "include; write jshard: {mesh: {data: 2, tensor: 4}}",
    ),
    "name empty part": (
        MESH + "decoder//attn: {}\n",
        'signal "decoder//attn" (FILE:3) has a name with an empty part; write "decoder/attn"',
    ),
    "key number": (
        MESH + "1: {row: data}\n",
        'FILE:3 has 1 for a key, which is not a name; write "1" in quotes',
    ),
    "key bool": (
        MESH + "layer1: {true: data}\n",
        'FILE:3 has true for a key, which is not a name; write "true" in quotes',
    ),
    "key null": (
        MESH + "layer1: {~: data}\n",
        "FILE:3 has nothing for a key, which is not a name; write a name before the colon",
    ),
    "key list": (
        MESH + "? [a, b]\n: {row: data}\n",
        "FILE:3 has a list for a key; write a name before the colon",
    ),
    "unclosed brace": (
        MESH + "layer1: {row: data\nlayer2: {}\n",
        'FILE:3 has a "{" that is not closed; write "}" at its end, and commas between',
    ),
    "unclosed bracket": (
        MESH + "layer1: {row: [data, tensor}\n",
        'FILE:3 has a "[" that is not closed; write "]" at its end, and commas between',
    ),
    "tab": (
        "jshard:\n	mesh: {data: 2}\n",
        "FILE:2 is indented by a tab; indent by spaces",
    ),
    "two colons": (
        "jshard: mesh: {data: 2}\n",
        'FILE:1 has a second ":" out of place; quote the text, or start a new line',
    ),
    "bad indent": (
        "layer1:\n    row: data\n  column: tensor\n",
        "FILE:3 is indented unlike the lines above it; indent keys of one mapping alike",
    ),
    "no colon": (
        MESH + "layer1\nlayer2: {}\n",
        'FILE:3 has a line without ":"; write it as key: value',
    ),
    "no colon inside": (
        MESH + "layer1:\n  row: data\n  column\n  output: sum\n",
        'FILE:5 has a line without ":"; write it as key: value',
    ),
    "open quote": (
        MESH + 'layer1: {row: "data}\n',
        "FILE:3 opens a quote that is never closed; close it",
    ),
    "star name": (
        MESH + "*/mlp: {row: data}\n",
        'FILE:3 starts a word with "*" or "&", which mean aliases in YAML; quote it, as in "*/mlp": {row: data}',
    ),
    "star value": (
        MESH + "layer1: {row: *}\n",
        'FILE:3 starts a word with "*" or "&", which mean aliases in YAML; quote it, as in "*/mlp": {row: data}',
    ),
    "at": (
        MESH + "layer1: {row: @data}\n",
        "FILE:3 starts a value with a character that means something else in YAML; quote the value",
    ),
    "control character": (
        MESH + "layer1: {row: data}\n",
        "FILE:3 has the character U+0007, which YAML does not allow; remove it",
    ),
    "bad escape": (
        MESH + 'layer1: {row: "d\\qata"}\n',
        "FILE:3 has a backslash in double quotes that YAML does not know; use single quotes",
    ),
    "huge escape": (
        MESH + 'layer1: {row: "\\UFFFFFFFF"}\n',
        "FILE:3 has an escape or a % line with an impossible number; remove it",
    ),
    "dash": (
        MESH + "layer1: - row\n",
        'FILE:3 has a "- " where no list can start; start the list on a line of its own',
    ),
    "python tag": (
        MESH + "layer1: !!python/object/apply:os.system ['echo hacked']\n",
        'FILE:3 has the tag "!!python/object/apply:os.system", but tags are not allowed; remove '
        "it, and quote the value if it is text",
    ),
    "python name tag": (
        MESH + "layer1: {row: !!python/name:os.system ''}\n",
        'FILE:3 has the tag "!!python/name:os.system", but tags are not allowed; remove it, and '
        "quote the value if it is text",
    ),
    "own tag": (
        MESH + "layer1: {row: !axis data}\n",
        'FILE:3 has the tag "!axis", but tags are not allowed; remove it, and quote the value if it is text',
    ),
    "unknown tag handle": (
        MESH + "layer1: {row: !e!axis data}\n",
        "FILE:3 has a tag that can't be read; remove it",
    ),
    "undefined alias": (
        MESH + "base: &base {row: data}\nlayer1: *bsae\n",
        'FILE:4 has "*bsae", but no "&bsae" is above it; did you mean "*base"?',
    ),
    "recursive alias": (
        MESH + "layer1: &a {shard: *a}\n",
        'FILE:3 has "*a" inside "&a" itself; remove it',
    ),
    "alias to what is being said anew": (
        MESH + "_a: &a {row: data}\nlayer1: &a {shard: *a}\n",
        'FILE:4 has "*a" inside "&a" itself; remove it',
    ),
    "merge": (
        MESH + "_b: &b {row: data}\nlayer1: {<<: *b}\n",
        'FILE:4 has "<<", but nothing is merged here; write extends: with the name of a signal',
    ),
    "two documents": (
        MESH + "---\nlayer1: {}\n",
        "FILE:3 starts a second document; keep one in each file",
    ),
    "alias bomb": (
        BOMB,
        "FILE:5 expands to more than 50,000 values; write fewer aliases or split it",
    ),
    "deep": (
        DEEP,
        "FILE:1 nests deeper than 50 levels; write it flatter",
    ),
    "alias deep": (
        DEEP_BY_ALIASES,
        "FILE:48 nests deeper than 50 levels; write it flatter",
    ),
    "fault in alias": (
        MESH + "  train: {batch: &x -3, steps: *x}\n",
        "jshard.train.batch (FILE:3) is -3, which is not a whole number of 1 or more; write batch: 64",
        "jshard.train.steps (FILE:3) is -3, which is not a whole number of 1 or more; write steps: 1000",
    ),
    "many": (
        MESH + "  strct: true\nlayer1: {row: dat, colum: tensor}\nlayer2:\n  shard: {axis: true}\n  output: gathr\n",
        'jshard (FILE:3) has an unknown key "strct"; did you mean "strict"?',
        'signal "layer1" (FILE:4) names mesh axis "dat", which is not in jshard.mesh (FILE:2: data, '
        'tensor); did you mean "data"?',
        'signal "layer1" (FILE:4) has an unknown key "colum"; did you mean "column"?',
        'signal "layer2" (FILE:6) has shard.axis: true, which is not a whole number; write axis: 0',
        'signal "layer2" (FILE:7) has output: "gathr", which is not keep, gather, sum or scatter; did '
        'you mean "gather"?',
    ),
    "include missing": (
        "jshard: {include: bse.yaml}\n",
        'jshard.include (FILE:1) names "configs/bse.yaml", which is not there; give the path of a YAML file',
    ),
    "include number": (
        "jshard: {include: 3}\n",
        "jshard.include (FILE:1) is 3, which is not a file or a list of files; write include: base.yaml",
    ),
    "long value": (
        MESH + "layer1: {row: " + "x" * 100 + "}\n",
        'signal "layer1" (FILE:3) names mesh axis '
        '"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...", which is not in jshard.mesh '
        "(FILE:2: data, tensor); write data or tensor",
    ),
    "newline in name": (
        MESH + 'layer1: {"ro\\nw": data}\n',
        'signal "layer1" (FILE:3) has an unknown key "ro\\nw"; did you mean "row"?',
    ),
    "octal": (
        MESH + "layer1: {shard: {axis: 0, workers: [010]}}\n",
        'signal "layer1" (FILE:3) names worker 10, but jshard.mesh (FILE:2) has 8 devices; use numbers from 0 to 7',
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty `configs`, and the working directory beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    return tmp_path / "configs"


def faults_of(source, overrides=()) -> list[str]:
    with pytest.raises(JShardError) as told:
        load_configuration(source, overrides)
    assert str(told.value).split("\n") == list(told.value.faults)
    return list(told.value.faults)


@pytest.mark.parametrize("text, sentences", [(text, told) for text, *told in IN_A_FILE.values()], ids=list(IN_A_FILE))
def test_misuse_in_a_file_is_told(folder: Path, text: str, sentences: list[str]):
    (folder / "mlp.yaml").write_text(text)
    assert faults_of("configs/mlp.yaml") == [sentence.replace("FILE", "configs/mlp.yaml") for sentence in sentences]


def test_misuse_is_of_forty_kinds_at_least():
    assert len({tuple(told) for _, *told in IN_A_FILE.values()}) >= 100


@pytest.mark.parametrize(
    "data, sentence",
    [
        ("# caf\xe9\n".encode("latin-1"), "configs/mlp.yaml:1 is not UTF-8 text; save the file as UTF-8"),
        ("layer1: {}\n".encode("utf-16"), "configs/mlp.yaml:1 is not UTF-8 text; save the file as UTF-8"),
        (b"\nlayer1: \xff\n", "configs/mlp.yaml:2 is not UTF-8 text; save the file as UTF-8"),
        (b"\n\n\0", "configs/mlp.yaml:3 has the character U+0000, which YAML does not allow; remove it"),
        (b"layer1: {}\n\0", "configs/mlp.yaml:2 has the character U+0000, which YAML does not allow; remove it"),
        *((data, f"configs/mlp.yaml is empty; {AN_EXAMPLE}") for data in (b"", b"# to come\n", b"~\n", b"{}\n")),
        (b"#" * 1_000_001, "configs/mlp.yaml has more than 1,000,000 bytes; split it"),
    ],
    ids=["latin-1", "utf-16", "line", "nul above", "nul", "empty", "comment", "null", "no signal", "huge"],
)
def test_misuse_of_bytes_is_told(folder: Path, data: bytes, sentence: str):
    (folder / "mlp.yaml").write_bytes(data)
    assert faults_of("configs/mlp.yaml") == [sentence]


def test_misuse_of_a_path_is_told(folder: Path):
    (folder / "mlp.yaml").write_text("layer1: {}\n")
    assert faults_of("configs/mpl.yaml") == ['configs/mpl.yaml is not there; did you mean "configs/mlp.yaml"?']
    assert faults_of("configs/zzzzzzz") == ["configs/zzzzzzz is not there; give the path of a YAML file"]
    assert faults_of("cfg/mlp.yaml") == ['cfg/mlp.yaml is not there; is the folder "cfg" spelled right?']
    assert faults_of("configs") == ["configs is a folder; give the path of a YAML file"]
    assert faults_of("configs/mlp.yaml/x") == ["configs/mlp.yaml/x is inside a file; give the path of a YAML file"]
    assert faults_of("a\0b") == ["a\\x00b has a character that is not allowed in a path; give the path of a file"]
    assert faults_of("x" * 5000)[0].endswith("can't be read: file name too long; name a file that can be read")
    assert faults_of(3) == [
        'jshard.load is given something of type int; give it a path or a mapping, as in "configs/mlp.yaml"'
    ]
    assert faults_of(None) == ['jshard.load is given nothing; give it a path or a mapping, as in "configs/mlp.yaml"']


@pytest.mark.timeout(60)
def test_misuse_of_a_pipe_or_a_device_is_told_and_neither_is_read(folder: Path):
    os.mkfifo(folder / "pipe.yaml")
    assert faults_of("configs/pipe.yaml") == ["configs/pipe.yaml is a pipe or a device; give it as a file"]
    assert faults_of("/dev/zero") == ["/dev/zero is a pipe or a device; give it as a file"]
    (folder / "mlp.yaml").write_text("jshard: {include: pipe.yaml}\n")
    assert faults_of("configs/mlp.yaml") == [
        'jshard.include (configs/mlp.yaml:1) names "configs/pipe.yaml", which is a pipe or a device; give it as a file'
    ]


UNKNOWN = {
    "keys": "layer1:\n" + "".join(f"  k{n}: 1\n" for n in range(3000)),
    "keys of jshard": "jshard:\n" + "".join(f"  k{n}: 1\n" for n in range(3000)),
    "names": "layer1: {extends: [" + ", ".join(f"k{n}" for n in range(3000)) + "]}\n",
    "mesh axes": "".join(f"s{n}: {{row: x{n}}}\n" for n in range(3000)),
    "the same key": "layer1: {}\n" * 3000,
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_misuse_by_thousands_is_told_by_the_first(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    asked, close = [], difflib.get_close_matches
    monkeypatch.setattr(difflib, "get_close_matches", lambda *words, **how: asked.append(words) or close(*words, **how))
    (folder / "mlp.yaml").write_text(MESH + UNKNOWN[kind].removeprefix("jshard:\n" if "jshard" in kind else ""))
    *first, last = faults_of("configs/mlp.yaml")
    assert (len(first), last) == (20, "there are more than these 20 mistakes; mend them first")
    assert len([known for _, known, *_ in asked if known != ["jshard"]]) <= 100  # each signal might be meant as jshard


def test_misuse_of_a_closed_file_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def closed(*_: object) -> None:  # root, who may run the tests, can read every file
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("builtins.open", closed)
    sentence = "configs/mlp.yaml can't be read: permission denied; name a file that can be read"
    assert faults_of("configs/mlp.yaml") == [sentence]


def test_misuse_in_a_mapping_is_told_without_lines():
    assert faults_of({"jshard": {"mesh": {"data": 2}}, "layer1": {"row": "dta", "colum": "data"}}) == [
        'signal "layer1" (<dict>) names mesh axis "dta", which is not in jshard.mesh (<dict>: data); '
        'did you mean "data"?',
        'signal "layer1" (<dict>) has an unknown key "colum"; did you mean "column"?',
    ]
    assert faults_of({3: {}, "layer1": {None: 1, b"x": 2}}) == [
        "<dict> has 3 for a key, which is not a name; use a str",
        'signal "layer1" (<dict>) has nothing for a key, which is not a name; use a str',
        'signal "layer1" (<dict>) has something of type bytes for a key, which is not a name; use a str',
    ]
    assert faults_of({"jshard": {"train": {"model": object}}})[0] == (
        "jshard.train.model (<dict>) has a value of type type, which YAML can't express; "
        "write text, a number, true, false, a list or a mapping"
    )
    assert faults_of({}) == [f"<dict> is empty; {AN_EXAMPLE}"]
    endless: dict = {}
    endless["layer1"] = endless
    assert faults_of(endless) == ["<dict> nests deeper than 50 levels; make it flatter"]
    wide = ["x"] * 1000
    assert faults_of({"layer1": [wide] * 1000}) == ["<dict> holds more than 50,000 values; make it smaller"]


ON_THE_COMMAND_LINE = {
    "steps": ['"steps" (the command line) is not key=value; write it like steps=20 or layer1.column=tensor'],
    "=3": ['"=3" (the command line) is not key=value; write it like steps=20 or layer1.column=tensor'],
    "mesh=\r": ['"mesh=\\r" (the command line) names no signal and no key of jshard.train; write jshard.mesh=\\r'],
    "layer1={row: data, row: data}": [
        '"layer1={row: data, row: data}" (the command line) has the key "row" again; keep one of the two'
    ],
    "stepps=3": ['"stepps=3" (the command line) names no signal and no key of jshard.train; did you mean "steps"?'],
    "laier1.row=data": [
        '"laier1.row=data" (the command line) names no signal and no key of jshard.train; did you mean "layer1"?'
    ],
    "zzz=1": [
        '"zzz=1" (the command line) names no signal and no key of jshard.train; write model, data, loss, metrics, batch, microbatches, steps, '
        "seed, optimizer, evaluation, output, log, checkpoint, watchdog or a signal"
    ],
    "mesh.data=4": [
        '"mesh.data=4" (the command line) names no signal and no key of jshard.train; write jshard.mesh.data=4'
    ],
    "lr=1e-3": [
        '"lr=1e-3" (the command line) names no signal and no key of jshard.train; write optimizer.learning_rate=1e-3'
    ],
    "learning_rate=1e-3": [
        '"learning_rate=1e-3" (the command line) names no signal and no key of jshard.train; write '
        "optimizer.learning_rate=1e-3"
    ],
    "layer1.row=dta": [
        'signal "layer1" (the command line) names mesh axis "dta", which is not in jshard.mesh '
        '(configs/mlp.yaml:2: data, tensor); did you mean "data"?'
    ],
    "layer1.rwo=data": ['signal "layer1" (the command line) has an unknown key "rwo"; did you mean "row"?'],
    "layer1.row=": [
        'signal "layer1" (the command line) has row: nothing, which is not a mesh axis or a list of them; '
        "write row: data"
    ],
    "layer1.row=[data": [
        '"layer1.row=[data" (the command line) has a "[" that is not closed; write "]" at its end, and commas between'
    ],
    "layer1.row=!!python/name:os.system": [
        '"layer1.row=!!python/name:os.system" (the command line) has the tag "!!python/name:os.system", but tags are '
        "not allowed; remove it, and quote the value if it is text"
    ],
    "steps=0": [
        "jshard.train.steps (the command line) is 0, which is not a whole number of 1 or more; write steps: 1000"
    ],
    "jshard.mesh.data=0": [
        "jshard.mesh.data (the command line) is 0, which is not a size of a mesh axis; write data: 2, or -1 for all "
        "devices that are left"
    ],
    "jshard.mesh.dta=4": [
        '"jshard.mesh.dta=4" (the command line) sets mesh axis "dta", which is not in jshard.mesh (configs/mlp.yaml:2); '
        'did you mean "data"?'
    ],
    "jshard.mesh.zzz=4": [
        '"jshard.mesh.zzz=4" (the command line) sets mesh axis "zzz", which is not in jshard.mesh (configs/mlp.yaml:2); '
        "give the whole mesh: jshard.mesh={...}"
    ],
    "jshard.include=base.yaml": [
        '"jshard.include=base.yaml" (the command line) can\'t include a file; write jshard.include in the file'
    ],
    "jshard={include: base.yaml}": [
        '"jshard={include: base.yaml}" (the command line) can\'t include a file; write jshard.include in the file'
    ],
    "laier1.dtype.compute=bfloat16": [
        '"laier1.dtype.compute=bfloat16" (the command line) names no signal and no key of jshard.train; did you mean '
        '"layer1"?'
    ],
    "decodr.attn.mlp.row=data": [
        '"decodr.attn.mlp.row=data" (the command line) names no signal and no key of jshard.train; did you mean '
        '"decoder.attn.mlp"?'
    ],
    "attn={include: base.yaml}": [
        'signal "attn" (the command line) has an unknown key "include"; write it under "jshard:"'
    ],
    "layer1={include: base.yaml}": [
        'signal "layer1" (the command line) has an unknown key "include"; write it under "jshard:"'
    ],
    "jshard.train.include=base.yaml": [
        'jshard.train (the command line) has an unknown key "include"; write model, data, loss, metrics, batch, microbatches, steps, seed, '
        "optimizer, evaluation, output, log, checkpoint or watchdog"
    ],
    "jshard.mesh.dta.x=1": [
        '"jshard.mesh.dta.x=1" (the command line) sets mesh axis "dta", which is not in jshard.mesh (configs/mlp.yaml:2); '
        'did you mean "data"?'
    ],
    "layer1.row.x=1": [
        'signal "layer1" (configs/mlp.yaml:3) has row: a mapping, which is not a mesh axis or a list of them; write row: data'
    ],
    "layer1.foo.bar=1": [
        'signal "layer1" (the command line) has an unknown key "foo"; write row, column, reduction, sequence, ring, '
        "attention, expert, stage, store, remat, dtype, match, output, kernel or one of 6 more"
    ],
    "layer1." + ".".join("x" * 49) + "=1": [
        '"layer1.x.x.x.x.x.x.x.x.x.x.x.x.x.x.x.x.x.x.x.x.x.x.x.x.x.x.x..." (the command line) nests deeper than 50 '
        "levels; write it flatter"
    ],
}


@pytest.mark.parametrize("word", ON_THE_COMMAND_LINE)
def test_misuse_on_the_command_line_is_told(folder: Path, word: str):
    (folder / "mlp.yaml").write_text(MESH + "layer1: {row: data}\nattn: {}\ndecoder.attn.mlp: {}\n")
    assert faults_of("configs/mlp.yaml", [word]) == ON_THE_COMMAND_LINE[word]


def test_misuse_in_included_files_points_into_them(folder: Path):
    (folder / "parts").mkdir()
    (folder / "mlp.yaml").write_text(
        "jshard: {include: [parts/a.yaml, parts/b.yaml, none.yaml]}\nlayer1: {rwo: data}\n"
    )
    (folder / "parts" / "a.yaml").write_text(MESH + "layer2: {row: dta}\nattn: {}\n")
    (folder / "parts" / "b.yaml").write_text("jshard:\n  mesh: {data: 8}\nlayer3: {}\nlayer2: {}\nattn: {}\n")
    assert faults_of("configs/mlp.yaml") == [
        'jshard.include (configs/mlp.yaml:1) names "configs/none.yaml", which is not there; '
        "give the path of a YAML file",
        'signal "layer1" (configs/mlp.yaml:2) has an unknown key "rwo"; did you mean "row"?',
        'signal "layer2" (configs/parts/a.yaml:3) names mesh axis "dta", which is not in jshard.mesh '
        '(configs/parts/a.yaml:2: data, tensor); did you mean "data"?',
        "jshard.mesh (configs/parts/b.yaml:2) is already at configs/parts/a.yaml:2, and configs/mlp.yaml includes both"
        "; keep one of the two",
        'signal "layer2" (configs/parts/b.yaml:4) is already at configs/parts/a.yaml:3, and configs/mlp.yaml includes '
        "both; keep one of the two",
        'signal "attn" (configs/parts/b.yaml:5) is already at configs/parts/a.yaml:4, and configs/mlp.yaml includes '
        "both; keep one of the two",
    ]
    (folder / "mlp.yaml").write_text("jshard: {include: [parts/a.yaml, parts/b.yaml]}\n")
    (folder / "parts" / "a.yaml").write_text("jshard: {include: c.yaml, axis_types: auto}\n")
    (folder / "parts" / "b.yaml").write_text("jshard: {include: c.yaml, axis_types: auto}\n")
    (folder / "parts" / "c.yaml").write_text("layer1: {}\n")
    assert faults_of("configs/mlp.yaml") == [
        "jshard.axis_types (configs/parts/b.yaml:1) is already at configs/parts/a.yaml:1, and configs/mlp.yaml includes "
        "both; keep one of the two"
    ]


def test_misuse_of_include_is_told(folder: Path):
    (folder / "mlp.yaml").write_text("jshard:\n  include: bsae.yaml\n")
    (folder / "base.yaml").write_text("jshard:\n  include: other.yaml\n")
    (folder / "other.yaml").write_text("jshard:\n  include: base.yaml\n")
    (folder / "self.yaml").write_text("jshard:\n  include: self.yaml\n")
    (folder / "dir.yaml").write_text("jshard:\n  include: .\n")
    (folder / "nul.yaml").write_text('jshard:\n  include: "a\\0b"\n')
    assert faults_of("configs/mlp.yaml") == [
        'jshard.include (configs/mlp.yaml:2) names "configs/bsae.yaml", which is not there; did you mean "base.yaml"?'
    ]
    (folder / "mlp.yaml").write_text("jshard:\n  include: slf.yaml\n")
    assert faults_of("configs/mlp.yaml") == [
        'jshard.include (configs/mlp.yaml:2) names "configs/slf.yaml", which is not there; did you mean "self.yaml"?'
    ]
    assert faults_of("configs/base.yaml") == [
        'jshard.include (configs/other.yaml:2) includes "base.yaml", which includes this file; '
        "remove one of the includes"
    ]
    assert faults_of("configs/self.yaml") == [
        'jshard.include (configs/self.yaml:2) includes "self.yaml", which is this file; remove it'
    ]
    assert faults_of("configs/dir.yaml") == [
        'jshard.include (configs/dir.yaml:2) names "configs", which is a folder; give the path of a YAML file'
    ]
    assert faults_of("configs/nul.yaml") == [
        'configs/nul.yaml:2 has the character "\\0", which no name or path can hold; remove it'
    ]
    for number in range(60):
        (folder / f"{number}.yaml").write_text(f"jshard: {{include: {number + 1}.yaml}}\n")
    assert faults_of("configs/0.yaml") == [
        "jshard.include (configs/49.yaml:1) nests deeper than 50 files; include them from one file"
    ]


def test_misuse_of_extends_in_a_long_chain_is_told(folder: Path):
    chain = "".join(f"s{number}: {{extends: s{number + 1}}}\n" for number in range(60)) + "s60: {}\n"
    (folder / "mlp.yaml").write_text(chain)
    assert faults_of("configs/mlp.yaml") == [
        'signal "s49" (configs/mlp.yaml:50) extends a chain of more than 50 signals; extend fewer'
    ]


def test_misuse_by_a_program_is_told(folder: Path):
    (folder / "mlp.yaml").write_text("attn: {}\ndecoder/mlp: {}\n_t: {}\n'block*/a': {}\n'*/a': {}\n")
    configuration = load_configuration("configs/mlp.yaml")
    sentences = {
        ("atn",): 'signal "atn" is not in configs/mlp.yaml; did you mean "attn"?',
        ("decoder", "atn"): 'signal "decoder/atn" is not in configs/mlp.yaml; did you mean "attn"?',
        ("zzz",): 'signal "zzz" is not in configs/mlp.yaml; use attn, decoder/mlp, block*/a or */a',
        ("_t",): 'signal "_t" is not in configs/mlp.yaml; names that start with "_" are only templates: use another',
        ("decoder",): 'signal "decoder" is not in configs/mlp.yaml; write decoder: {} beside "decoder/mlp"',
        ("block1", "a"): 'signal "block1/a" is matched by both "block*/a" (configs/mlp.yaml:4) and "*/a" '
        '(configs/mlp.yaml:5); write "block1/a" itself',
    }
    for path, sentence in sentences.items():
        for ask in (configuration.lookup, configuration.digest):
            with pytest.raises(JShardError) as told:
                ask(path)
            assert str(told.value) == sentence
    with pytest.raises(JShardError) as told:
        load_configuration({"jshard": {"mesh": {"data": 2}}}).lookup(("a",))
    assert str(told.value) == 'signal "a" is not in <dict>; write a: {} in it'

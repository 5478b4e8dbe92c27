"""What a new user gets wrong in Python: one sentence each, whose traceback ends in the user's own line or in jshard."""

from __future__ import annotations

import copy
import os
import pickle
import traceback
import warnings
from pathlib import Path

import flax
import jax
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.errors import JShardError

CONFIGURATION = {
    "jshard": {"mesh": {"data": 2, "tensor": 4}},
    "up": {"row": "data", "column": "tensor", "match": ["up/**"]},
    "down": {"row": "data", "reduction": "tensor", "match": ["down/**"]},
    "inputs": {"row": "data"},
}
NET = """
import contextlib
import jax, jax.numpy as jnp, numpy as np, optax
from flax import linen as nn, nnx
import jshard
from jax import P

X, Y = np.ones((8, 8), np.float32), np.zeros(8, np.int32)

class Net(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))

def loss(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

def step(model, optimizer, x, y):
    value, gradients = jshard.value_and_grad(loss)(model, x, y)
    optimizer.update(model, gradients)
    return value

def objects():
    model = Net()
    return model, jshard.Optimizer(model, optax.adam(1e-3))

def split():
    jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 4}}, "all": {"row": "data", "column": "tensor", "match": ["**"]}})

def sharded():
    return jshard.shard(Net(), X)

def inside(f):
    class Odd(Net):
        def __call__(self, x):
            return self.down(f(self.up(x)))

    return jshard.shard(Odd(), X)

def per_device(f):
    x = jshard.place(X, P("data"))
    return jax.shard_map(f, mesh=jshard.mesh(), in_specs=P("data"), out_specs=P("data"))(x)
"""

# What a user writes, after NET -> the whole sentence that answers.
CASES = {
    "pretend too late": (
        "jshard.pretend(16)",
        "16 devices can't be pretended: JAX has already started with 8 CPU devices; call jshard.pretend(16) before "
        "anything that makes an array, or start Python with JAX_NUM_CPU_DEVICES=16 PJRT_NPROC=64 JAX_PLATFORMS=cpu",
    ),
    "pretend nothing after a refusal": (
        "with contextlib.suppress(ValueError):\n    jshard.pretend(16)\njshard.pretend(0)",
        "jshard.pretend was given 0; give it a number of devices: jshard.pretend(8)",
    ),
    "pretend a word": (
        "jshard.pretend('8')",
        "jshard.pretend was given '8'; give it a number of devices: jshard.pretend(8)",
    ),
    "mesh before load": (
        "jshard.unload()\njshard.mesh()",
        'no configuration is loaded; call jshard.load("configs/mlp.yaml") or set JSHARD_CONFIG',
    ),
    "a file that is not there": (
        "jshard.load('tpp.yaml')",
        "tpp.yaml is not there; give the path of a YAML file",
    ),
    "yaml in place of its path": (
        "jshard.load('up: {row: data}')",
        "up: {row: data} is not there; give the path of a YAML file",
    ),
    "load nothing": (
        "jshard.load(None)",
        'jshard.load is given nothing; give it a path or a mapping, as in "configs/mlp.yaml"',
    ),
    "more devices than there are": (
        "jshard.load({'jshard': {'mesh': {'data': 16}}, 'a': {'row': 'data', 'match': ['**']}})\njshard.mesh()",
        "jshard.mesh (<dict>) asks for data 16 = 16 devices, but 8 are here; make it smaller, or pretend with "
        "JAX_NUM_CPU_DEVICES=16 PJRT_NPROC=32 JAX_PLATFORMS=cpu",
    ),
    "a layout without its mesh": (
        "jshard.Layout('data', None)",
        'jshard.Layout was given a str as its mesh; write jshard.Layout(jshard.mesh(), "data")',
    ),
    "a layout over a typo": (
        "jshard.Layout(jshard.mesh(), 'dta')",
        'axis 0 is laid over mesh axis "dta", which the mesh does not have; use one of data, tensor',
    ),
    "a signal that is misspelt": (
        "with jshard.signal('dwon'):\n    pass",
        'signal "dwon" is not in <dict>; did you mean "down"?',
    ),
    "a signal without a name": (
        "with jshard.signal(None):\n    pass",
        'a signal is named by None; give it a name, like jshard.signal("layer1")',
    ),
    "a signal called with an array": (
        "jshard.signal('up')(X)",
        'signal "up" is called with a ndarray; write `with jshard.signal("up"):`, or jshard.signal.tensor(x, name="up")',
    ),
    "an array under no signal": (
        "jshard.signal.tensor(X)",
        'jshard.signal.tensor(x) is under no signal of <dict>; write `with jshard.signal("up"):` around it',
    ),
    "nothing under a signal": (
        "jshard.signal.tensor(None, 'inputs')",
        'signal "inputs" (<dict>) takes an array, a list of numbers or a number, and was given None; use jax.tree.map to '
        "give it each array of a tree by itself",
    ),
    "a number under a signal of rows": (
        "jshard.signal.tensor(1.0, 'inputs')",
        'signal "inputs" (<dict>) splits a rank-0 array; place it outside the signal',
    ),
    "seven rows under a signal": (
        "jshard.signal.tensor(X[:7], 'inputs')",
        'signal "inputs" (<dict>) splits axis 0 of size 7 over mesh axis "data" of size 2; use 6 or 8, or pad',
    ),
    "words under a signal": (
        "jshard.signal.tensor(['x'], 'inputs')",
        'signal "inputs" (<dict>) takes an array, a list of numbers or a number, and was given a list; use jax.tree.map '
        "to give it each array of a tree by itself",
    ),
    "name and array the other way": (
        "jshard.signal.tensor('inputs', 3)",
        'a signal is named by 3; give it a name, like jshard.signal("layer1")',
    ),
    "onto other workers inside jit": (
        "jshard.load({'jshard': {'mesh': {'data': 8}}, 'a': {'shard': {'axis': 0, 'workers': [0, 1]}}, 'b': {'row': 'data'}})\n"
        "x = jshard.signal.tensor(X, 'b')\n"
        "jax.jit(lambda x: jshard.signal.tensor(x, 'a') * 2)(x)",
        'signal "a" (<dict>) moves an array from the mesh {data: 8} to the mesh {workers: 2}, which no compiled '
        "program can; place it first, outside jax.jit",
    ),
    "a class": (
        "jshard.shard(Net)",
        "jshard.shard was given the class Net; build it: jshard.shard(Net(...))",
    ),
    "a Linen class": (
        "jshard.shard(nn.Dense, X)",
        "jshard.shard was given the class Dense; build it: jshard.shard(Dense(...))",
    ),
    "an optimizer": (
        "jshard.shard(nnx.Optimizer(Net(), optax.adam(1e-3), wrt=nnx.Param))",
        "jshard.shard was given an Optimizer; give it a Flax model, or a function that takes one",
    ),
    "a list of models": (
        "jshard.shard([Net(), Net()])",
        "jshard.shard was given a list; give it a Flax model, or a function that takes one",
    ),
    "nothing": (
        "jshard.shard(None)",
        "jshard.shard was given None; give it a Flax model, or a function that takes one",
    ),
    "an array": (
        "jshard.shard(X)",
        "jshard.shard was given a ndarray; give it a Flax model, or a function that takes one",
    ),
    "a state": (
        "jshard.shard(nnx.state(Net()))",
        "jshard.shard was given a State; give it a Flax model, or a function that takes one",
    ),
    "an example for Linen": (
        "jshard.shard(nn.Dense(16), X)",
        "jshard.shard was given arguments for Dense, which holds no parameters; write shard(module).init(...), which "
        "returns them placed",
    ),
    "the shape of an example": (
        "jshard.shard(Net(), (8, 8))",
        "net.py:16 (in __call__) fails while it is traced: TypeError: dot_general requires contracting dimensions to "
        "have the same shape, got (2,) and (8,); fix net.py:16",
    ),
    "a model in a closure": (
        "model = Net()\njshard.shard(lambda x: model(x))(X)",
        "<lambda> (mine.py:2) uses the model model and does not take it: its parameters would not be placed, and stay "
        "what they are now; give it model as an argument",
    ),
    "place with no arguments": (
        "jshard.shard(loss).place()",
        "loss() missing 3 required positional arguments: 'model', 'x', and 'y'; call it as loss(model, x, y)",
    ),
    "seven rows over two devices": (
        "sharded()(X[:7])",
        'signal "down" (<dict>) splits 7 rows over mesh axis "data" of size 2; use 6 or 8, or pad',
    ),
    "seven rows in a loss": (
        "jshard.shard(loss)(Net(), X[:7], Y[:7])",
        'signal "down" (<dict>) splits 7 rows over mesh axis "data" of size 2; use 6 or 8, or pad',
    ),
    "one feature too many": (
        "sharded()(np.ones((8, 9), np.float32))",
        "net.py:16 (in __call__) fails while it is traced: TypeError: dot_general requires contracting dimensions to "
        "have the same shape, got (9,) and (8,); fix net.py:16",
    ),
    "no array": (
        "sharded()(None)",
        "net.py:16 (in __call__) fails while it is traced: AttributeError: 'NoneType' object has no attribute 'ndim'; "
        "fix net.py:16",
    ),
    "a number for a batch": (
        "sharded()(3)",
        "net.py:16 (in __call__) fails while it is traced: TypeError: dot_general requires lhs dimension numbers to be "
        "nonnegative and less than the number of axes of the lhs value, got lhs_batch of () and lhs_contracting of (-1,) "
        "for lhs of rank 0; fix net.py:16",
    ),
    "a word for a batch": (
        "sharded()('x')",
        "net.py:16 (in __call__) fails while it is traced: TypeError: Value 'x' with dtype <U1 is not a valid JAX array "
        "type. Only arrays of numeric types are supported by JAX; fix net.py:16",
    ),
    "an array of objects": (
        "sharded()(np.array([None] * 8))",
        "an array of shape (8,) has the dtype object, and JAX holds numbers; give it as numbers: x.astype(np.float32)",
    ),
    "an argument forgotten": (
        "sharded()()",
        "Net.__call__() missing 1 required positional argument: 'x'; call it as Net.__call__(self, x)",
    ),
    "an argument too many": (
        "sharded()(X, X)",
        "Net.__call__() takes 2 positional arguments but 3 were given; call it as Net.__call__(self, x)",
    ),
    "an argument misspelt": (
        "sharded()(inputs=X)",
        "Net.__call__() got an unexpected keyword argument 'inputs'; call it as Net.__call__(self, x)",
    ),
    "the model forgotten": (
        "jshard.shard(loss)(X, Y)",
        "loss() missing 1 required positional argument: 'y'; call it as loss(model, x, y)",
    ),
    "a tree by another name": (
        "jshard.shard(lambda theta, x: x @ theta['up']['kernel'])({'up': {'kernel': np.ones((8, 16), np.float32)}}, X)",
        '<lambda> takes a tree of arrays as "theta", and no model or tree of parameters for <dict> to claim; if "theta" '
        'holds the parameters, write jshard.shard(<lambda>, parameters="theta")',
    ),
    "Linen without variables": (
        "jshard.shard(nn.Dense(16)).apply({}, X)",
        'the program fails while it is traced: ScopeCollectionNotFound: Tried to access "kernel" from collection '
        '"params" in "/" but the collection is empty. '
        "(https://flax.readthedocs.io/en/latest/api_reference/flax.errors.html#flax.errors.ScopeCollectionNotFound); "
        "call it by itself to see all of Python's frames",
    ),
    "a mesh of jax.set_mesh": (
        "model = sharded()\nwith jax.set_mesh(jax.make_mesh((8,), ('z',))):\n    model(X)",
        "jax.set_mesh has set the mesh {z: 8}, and this program is over the mesh {data: 2, tensor: 4}; remove "
        "jax.set_mesh, or write jax.set_mesh(jshard.mesh())",
    ),
    "a mesh of jax.set_mesh around jit": (
        "model = sharded()\n"
        "with jax.set_mesh(jax.make_mesh((8,), ('z',))):\n"
        "    nnx.jit(lambda model, x: model(x))(model, X)",
        "jax.set_mesh has set the mesh {z: 8}, and this program is over the mesh {data: 2, tensor: 4}; remove "
        "jax.set_mesh, or write jax.set_mesh(jshard.mesh())",
    ),
    "a model of the mesh before": (
        "model = sharded()\n"
        "jshard.load({'jshard': {'mesh': {'data': 4}}, 'a': {'row': 'data', 'match': ['**']}})\n"
        "nnx.jit(lambda model, x: model(x))(model, X)",
        "jshard.shard (down/bias) moves an array from the mesh {data: 2, tensor: 4} to the mesh {data: 4}, which no "
        "compiled program can; place it first, outside jax.jit",
    ),
    "a gradient outside jit": (
        "nnx.value_and_grad(jshard.shard(loss))(sharded(), X, Y)",
        "loss is differentiated outside jax.jit, where JAX does not know the mesh; write @nnx.jit above the step, or "
        "`with jax.set_mesh(jshard.mesh()):` around it",
    ),
    "a gradient of a sharded model outside jit": (
        "nnx.grad(lambda model: model(X).sum())(sharded())",
        "Net.__call__ is differentiated outside jax.jit, where JAX does not know the mesh; write @nnx.jit above the "
        "step, or `with jax.set_mesh(jshard.mesh()):` around it",
    ),
    "forwards": (
        "model = sharded()\njax.jvp(lambda x: model(x).sum(), (X,), (X,))",
        "Net.__call__ moves arrays between devices, which jshard differentiates backwards, and jax.jvp forwards; use "
        "jax.vjp, jax.grad or jax.jacrev",
    ),
    "statistics under vmap": (
        "class Normed(nnx.Module):\n"
        "    def __init__(self):\n"
        "        self.up = nnx.BatchNorm(8, rngs=nnx.Rngs(0))\n"
        "\n"
        "    def __call__(self, x):\n"
        "        return self.up(x)\n"
        "\n"
        "jshard.load({'jshard': {'mesh': {'data': 2}}, 'a': {'row': 'data', 'match': ['**']}})\n"
        "model = jshard.shard(Normed(), X)\n"
        "jax.vmap(model)(np.ones((3, 8, 8), np.float32))",
        "Normed.__call__ changes variables of its model inside a JAX transformation that does not take the model; place "
        "the model by jshard.shard(model, x), and give it to nnx.vmap or nnx.grad as an argument",
    ),
    "with_sharding_constraint": (
        "inside(lambda x: jax.lax.with_sharding_constraint(x, P('data')))",
        "mine.py:1 shards an array by with_sharding_constraint, and <dict> shards all arrays of Odd.__call__; "
        "remove with_sharding_constraint",
    ),
    "with_sharding_constraint by a sharding": (
        "inside(lambda x: jax.lax.with_sharding_constraint(x, jax.NamedSharding(jshard.mesh(), P('data'))))",
        "mine.py:1 shards an array by with_sharding_constraint, and <dict> shards all arrays of Odd.__call__; "
        "remove with_sharding_constraint",
    ),
    "reshard": (
        "inside(lambda x: jax.sharding.reshard(x, P('data')))",
        "mine.py:1 shards an array by reshard, and <dict> shards all arrays of Odd.__call__; remove reshard",
    ),
    "shard_map": (
        "inside(jax.shard_map(lambda x: x * 2, mesh=jshard.mesh(), in_specs=P('data'), out_specs=P('data')))",
        "net.py:39 calls shard_map, which has collectives and devices of its own; give the model its path without it, or "
        "write axis_types: auto under jshard, to leave the program to XLA",
    ),
    "shard_map without a mesh": (
        "inside(lambda x: jax.shard_map(lambda x: x * 2, in_specs=P('data'), out_specs=P('data'))(x))",
        "mine.py:1 calls shard_map, which has collectives and devices of its own; give the model its path without it, or "
        "write axis_types: auto under jshard, to leave the program to XLA",
    ),
    "psum": (
        "inside(lambda x: jax.lax.psum(x, 'data'))",
        "mine.py:1 calls psum over a mesh axis, and Odd.__call__ is given whole arrays; remove psum: <dict> says what is "
        "summed over devices",
    ),
    "axis_index": (
        "inside(lambda x: x * jax.lax.axis_index('data'))",
        "mine.py:1 calls axis_index over a mesh axis, and Odd.__call__ is given whole arrays; remove axis_index: <dict> "
        "says what is summed over devices",
    ),
    "if of an array": (
        "inside(lambda x: x if x.sum() > 0 else -x)",
        "mine.py:1 needs the numbers of an array while Odd.__call__ is traced for arrays of any numbers; return the "
        "array, or use jnp.where or jax.lax.cond for if, and jnp for np",
    ),
    "numpy of an array": (
        "inside(lambda x: x + np.asarray(x))",
        "mine.py:1 needs the numbers of an array while Odd.__call__ is traced for arrays of any numbers; return the "
        "array, or use jnp.where or jax.lax.cond for if, and jnp for np",
    ),
    "a word for a layout": (
        "jshard.place(X, 'data')",
        'signal "data" is not in <dict>; use up, down or inputs',
    ),
    "a typo in a layout": (
        "jshard.place(X, P('dta'))",
        'axis 0 is laid over mesh axis "dta", which the mesh does not have; use one of data, tensor',
    ),
    "too many axes in a layout": (
        "jshard.place(X, P('data', None, None))",
        "jshard.place lays out 3 axes, but the array (8, 8) has 2; give 2 axes",
    ),
    "seven rows to two devices": (
        "jshard.place(X[:7], P('data'))",
        'jshard.place splits axis 0 of size 7 over mesh axis "data" of size 2; use 6 or 8, or pad',
    ),
    "a layout with nothing loaded": (
        "jshard.unload()\njshard.place(X, P('data'))",
        "jshard.place was given P('data',), but no mesh is set or loaded; give it "
        "jax.NamedSharding(mesh, P('data',)), or call jshard.load first",
    ),
    "another mesh inside jit": (
        "other = jax.make_mesh((2,), ('a',), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])\n"
        "x = jax.device_put(X, jax.NamedSharding(other, P('a')))\n"
        "jax.jit(lambda x: jshard.place(x, P('data')))(x)",
        "jshard.place moves an array from the mesh {a: 2} to the mesh {data: 2, tensor: 4}, which no compiled program "
        "can; place it first, outside jax.jit",
    ),
    "another mesh set around jit": (
        "to = jax.NamedSharding(jshard.mesh(), P('data'))\n"
        "with jax.set_mesh(jax.make_mesh((8,), ('z',))):\n"
        "    jax.jit(lambda x: jshard.place(x, to))(X)",
        "jax.set_mesh has set the mesh {z: 8}, and this program is over the mesh {data: 2, tensor: 4}; remove "
        "jax.set_mesh, or write jax.set_mesh(jshard.mesh())",
    ),
    "a root that is not there": (
        "jshard.scatter(X, P('data'), root=3)",
        "jshard.scatter names root 3, but there is one process; use 0",
    ),
    "nothing to scatter": (
        "jshard.scatter(None, P('data'))",
        "process 0 is the root of jshard.scatter and gave no array; give it one",
    ),
    "a method misspelt": (
        "jshard.scatter(X, P('data'), method='brodcast')",
        'jshard.scatter has no method "brodcast"; did you mean "broadcast"?',
    ),
    "a model to scatter": (
        "jshard.scatter(Net(), P('data'))",
        "jshard.scatter was given an array of object, which it can't scatter; give it numbers, for instance "
        "x.astype(np.float32)",
    ),
    "nothing to gather": (
        "jshard.gather(None)",
        "jshard.gather takes an array, a list of numbers or a number, and was given None; use jax.tree.map to give it "
        "each array of a tree by itself",
    ),
    "to a kind of device": (
        "jshard.place(Net(), 'gpu')",
        'jshard.place of a Net to signal "gpu", but signals claim its parameters one by one; write jshard.shard(model, '
        "x), or name a mesh",
    ),
    "to nowhere": (
        "jshard.place(Net(), None)",
        "jshard.place: down.bias was given None as layout; give it a jshard.Layout, a NamedSharding or a PartitionSpec, "
        'as in jax.P("data")',
    ),
    "a model to a spec": (
        "jshard.place(sharded(), P('data', None, None))",
        "jshard.place: down.bias lays out 3 axes, but the array (8,) has 1; give 1 axes",
    ),
    "a model to a signal": (
        "jshard.place(Net(), 'up')",
        'jshard.place of a Net to signal "up", but signals claim its parameters one by one; write jshard.shard(model, '
        "x), or name a mesh",
    ),
    "to a memory that is none": (
        "jshard.place(X, jax.memory.Space.Device)",
        "jshard.place to MemorySpace.Device; use jax.memory.Space.Host, a mesh or devices",
    ),
    "to a mesh inside jit": (
        "jax.jit(lambda x: jshard.place(x, jshard.mesh()))(X)",
        "jshard.place to a mesh, devices or a memory was called inside jit, which runs on one mesh; name a layout, as in "
        'jax.P("data"), or call it outside of jit',
    ),
    "to a number": (
        "jshard.place(X, 3)",
        "jshard.place was given an int as layout; give it a jshard.Layout, a NamedSharding or a PartitionSpec, as in "
        'jax.P("data")',
    ),
    "to a device too far": (
        "jshard.place(Net(), [9])",
        "jshard.place to device 9, but 8 are here; use 0 to 7",
    ),
    "a layer with a key": (
        "with jshard.signal('up'):\n    jshard.Linear(8, 16, rngs=jax.random.key(0))",
        "jshard.Linear was given a PRNGKeyArray as rngs; write rngs=nnx.Rngs(0)",
    ),
    "a layer with a seed": (
        "with jshard.signal('up'):\n    jshard.Linear(8, 16, rngs=0)",
        "jshard.Linear was given an int as rngs; write rngs=nnx.Rngs(0)",
    ),
    "a layer of odd columns": (
        "with jshard.signal('up'):\n    jshard.Linear(8, 15, rngs=nnx.Rngs(0))",
        'signal "up" (<dict>) splits 15 columns over mesh axis "tensor" of size 4; use 12 or 16, or pad',
    ),
    "a layer of float columns": (
        "with jshard.signal('up'):\n    jshard.Linear(8, 16.0, rngs=nnx.Rngs(0))",
        "a new array has the shape (8, 16.0); give it whole numbers",
    ),
    "a layer called with one feature too many": (
        "with jshard.signal('up'):\n    jshard.Linear(8, 16, rngs=nnx.Rngs(0))(np.ones((8, 9)))",
        'signal "up" (<dict>) has a Linear of 8 inputs, called with an array of shape (8, 9); give it arrays whose last '
        "axis is 8",
    ),
    "a layer called with nothing": (
        "with jshard.signal('up'):\n    jshard.Linear(8, 16, rngs=nnx.Rngs(0))(None)",
        'signal "up" (<dict>) takes an array, a list of numbers or a number, and was given None; use jax.tree.map to '
        "give it each array of a tree by itself",
    ),
    "a layer called with seven rows": (
        "with jshard.signal('up'):\n    jshard.Linear(8, 16, rngs=nnx.Rngs(0))(X[:7])",
        'signal "up" (<dict>) splits 7 rows over mesh axis "data" of size 2; use 6 or 8, or pad',
    ),
    "a layer under another mesh of jax.set_mesh": (
        "with jshard.signal('up'):\n"
        "    layer = jshard.Linear(8, 16, rngs=nnx.Rngs(0))\n"
        "with jax.set_mesh(jax.make_mesh((8,), ('z',))):\n"
        "    layer(X)",
        "jax.set_mesh has set the mesh {z: 8}, and this program is over the mesh {data: 2, tensor: 4}; remove "
        "jax.set_mesh, or write jax.set_mesh(jshard.mesh())",
    ),
    "a layer whose signal is gone": (
        "with jshard.signal('up'):\n"
        "    layer = jshard.Linear(8, 16, rngs=nnx.Rngs(0))\n"
        "jshard.load({'jshard': {'mesh': {'data': 4}}, 'upper': {'row': 'data'}})\n"
        "layer(X)",
        'signal "up" is not in <dict>; use upper',
    ),
    "a layer of the mesh before": (
        "with jshard.signal('up'):\n"
        "    layer = jshard.Linear(8, 16, rngs=nnx.Rngs(0))\n"
        "jshard.load({'jshard': {'mesh': {'data': 4}}, 'up': {'row': 'data'}})\n"
        "nnx.jit(lambda layer, x: layer(x))(layer, X)",
        'signal "up" (<dict>) moves an array from the mesh {data: 2, tensor: 4} to the mesh {data: 4}, which no '
        "compiled program can; place it first, outside jax.jit",
    ),
    "an optimizer that multiplies parameters": (
        "jshard.Optimizer(sharded(), optax.contrib.muon(1e-3))",
        'the optimizer multiplies whole parameters, and down.kernel of shape (16, 8) is split over mesh axis "tensor"; '
        "use one that treats each element by itself, such as adamw, or do not split the parameter: write only row",
    ),
    "a product that does not fit": (
        "jshard.matmul(X, np.ones((9, 16), np.float32))",
        "jshard.matmul of (8, 8) and (9, 16): the last axis of x does not match the first of w; use x[..., K] and w[K, N]",
    ),
    "a product with nothing": (
        "jshard.matmul(X, None)",
        "jshard.matmul takes an array, a list of numbers or a number, and was given None; use jax.tree.map to give it "
        "each array of a tree by itself",
    ),
    "the mean of nothing": (
        "jshard.mean(None)",
        "jshard.mean takes an array, a list of numbers or a number, and was given None; use jax.tree.map to give it each "
        "array of a tree by itself",
    ),
    "layers without a number": (
        "jshard.stack(Net, '3', rngs=nnx.Rngs(0))",
        "jshard.stack of '3' layers; give it 1 or more",
    ),
    "a collective outside shard_map": (
        "jshard.collectives.all_reduce(X, 'data')",
        'all_reduce over mesh axis "data" was called outside a shard_map that has that axis; call it inside '
        "jax.shard_map(f, mesh=jshard.mesh(), in_specs=..., out_specs=...)",
    ),
    "a collective over a typo": (
        "per_device(lambda x: jshard.collectives.all_reduce(x, 'dta'))",
        'all_reduce over mesh axis "dta" inside a shard_map over "data", "tensor"; did you mean "data"?',
    ),
    "all_to_all without its axes": (
        "per_device(lambda x: jshard.collectives.all_to_all(x, 'data'))",
        'all_to_all over mesh axis "data" needs the axes it splits and joins; write all_to_all(x, mesh_axis, '
        "split_axis=0, concat_axis=1)",
    ),
    "jit of a number": (
        "jshard.jit(3)",
        "jshard.jit was given an int; give it a Flax model, or a function that takes one",
    ),
    "jit of a class": (
        "jshard.jit(Net)",
        "jshard.jit was given the class Net; build it: jshard.jit(Net(...))",
    ),
    "an optimizer forgotten": (
        "jshard.jit(step)(Net(), X, Y)",
        "step() missing 1 required positional argument: 'y'; call it as step(model, optimizer, x, y)",
    ),
    "a batch forgotten": (
        "jshard.jit(step)(*objects(), None, Y)",
        "net.py:16 (in __call__) fails while it is traced: AttributeError: 'NoneType' object has no attribute 'ndim'; "
        "fix net.py:16",
    ),
    "seven rows in a step": (
        "jshard.jit(step)(*objects(), X[:7], Y[:7])",
        'signal "down" (<dict>) splits 7 rows over mesh axis "data" of size 2; use 6 or 8, or pad',
    ),
    "labels of another number": (
        "jshard.jit(step)(*objects(), X, Y[:5])",
        "net.py:19 (in loss) fails while it is traced: ValueError: Incompatible shapes for broadcasting: shapes=[(5, 1), "
        "(8, 1)]; fix net.py:19",
    ),
    "a step under another mesh of jax.set_mesh": (
        "model, optimizer = objects()\n"
        "with jax.set_mesh(jax.make_mesh((8,), ('z',))):\n"
        "    jshard.jit(step)(model, optimizer, X, Y)",
        "jax.set_mesh has set the mesh {z: 8}, and this program is over the mesh {data: 2, tensor: 4}; remove "
        "jax.set_mesh, or write jax.set_mesh(jshard.mesh())",
    ),
    "the model sharded, the loss not": (
        "@jshard.jit\n"
        "def step(model, x, y):\n"
        "    return nnx.value_and_grad(loss)(model, x, y)\n"
        "\n"
        "split()\n"
        "step(jshard.shard(Net(), X), X, Y)",
        "net.py:19 computes in global view with a split array, and JAX can't derive the sharding of the result; "
        "give loss to jshard.shard, write output: gather for the signal of the product before it, or axis_types: auto "
        "under jshard",
    ),
    "a sum over devices in a loss": (
        "@jshard.jit\n"
        "def step(model, x, y):\n"
        "    return jshard.value_and_grad(lambda model: jax.lax.psum(loss(model, x, y), 'data'))(model)\n"
        "\n"
        "step(Net(), X, Y)",
        "mine.py:3 calls psum over a mesh axis, and <lambda> is given whole arrays; remove psum: <dict> says what is "
        "summed over devices",
    ),
    "a number of a loss": (
        "@jshard.jit\n"
        "def step(model, x, y):\n"
        "    return float(jshard.value_and_grad(loss)(model, x, y)[0])\n"
        "\n"
        "step(Net(), X, Y)",
        "mine.py:3 needs the numbers of an array while step is traced for arrays of any numbers; return the array, or "
        "use jnp.where or jax.lax.cond for if, and jnp for np",
    ),
    "if of a loss": (
        "@jshard.jit\n"
        "def step(model, x, y):\n"
        "    value, gradients = jshard.value_and_grad(loss)(model, x, y)\n"
        "    if value > 1:\n"
        "        return gradients\n"
        "\n"
        "step(Net(), X, Y)",
        "mine.py:4 needs the numbers of an array while step is traced for arrays of any numbers; return the array, or "
        "use jnp.where or jax.lax.cond for if, and jnp for np",
    ),
    "a step that closes over its model": (
        "model, optimizer = objects()\n"
        "\n"
        "@jshard.jit\n"
        "def step(x, y):\n"
        "    return jshard.value_and_grad(loss)(model, x, y)\n"
        "\n"
        "step(X, Y)",
        "step (mine.py:3) uses the model model and does not take it: its parameters would not be placed, and stay what "
        "they are now; give it model as an argument",
    ),
    "muon in a user's loop": (
        "split()\n"
        "model = Net()\n"
        "jshard.jit(step)(model, nnx.Optimizer(model, optax.contrib.muon(1e-3), wrt=nnx.Param), X, Y)",
        "net.py:23 updates split parameters by an optimizer that multiplies whole parameters; use one that treats "
        "each element by itself, such as optax.adamw",
    ),
    "a placement in a step": (
        "jshard.jit(lambda model, x: jax.lax.with_sharding_constraint(model(x), P('data')))(Net(), X)",
        "mine.py:1 shards an array by with_sharding_constraint, and <dict> shards all arrays of <lambda>; "
        "remove with_sharding_constraint",
    ),
    "a gradient by nothing": (
        "jshard.value_and_grad(loss)()",
        "loss is given 0 arguments, and differentiated by argument 0, from 0; call it as loss(model, x, y)",
    ),
    "a gradient by an argument too far": (
        "jshard.value_and_grad(loss, argnums=5)(Net(), X, Y)",
        "loss is given 3 arguments, and differentiated by argument 5, from 0; call it as loss(model, x, y)",
    ),
    "a loss of whole numbers": (
        "jshard.value_and_grad(lambda model, x: model(x).argmax())(Net(), X)",
        "<lambda> returns an array of int32, which has no gradient; return the loss, or with has_aux=True a pair "
        "(loss, aux)",
    ),
    "more than a loss": (
        "jshard.value_and_grad(lambda model, x: (model(x).mean(), 1))(Net(), X)",
        "<lambda> returns a tuple, which has no gradient; return the loss, or with has_aux=True a pair (loss, aux)",
    ),
    "a loss that is none": (
        "jshard.value_and_grad(lambda model, x: None)(Net(), X)",
        "<lambda> returns None, which has no gradient; return the loss, or with has_aux=True a pair (loss, aux)",
    ),
}


def run(code: str, folder: str | Path) -> dict[str, object]:
    """Run a user's program, whose model stands in net.py and whose mistake in mine.py."""
    names: dict[str, object] = {"__name__": "net"}
    exec(compile(NET, f"{folder}/net.py", "exec"), names)
    exec(compile(code, f"{folder}/mine.py", "exec"), names)
    return names


def check_frames(error: JShardError) -> None:
    """No frame of JAX is shown, and none of Flax but of a transformation that the user calls. Nothing stands behind the error."""
    jax_s, flax_s, own = (f"{Path(str(module.__file__)).parent}/" for module in (jax, flax, jshard))
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    first = next((at for at, file in enumerate(files) if file.startswith(own)), len(files))
    assert not [file for file in files if file.startswith(jax_s)]
    assert not [file for file in files[first:] if file.startswith(flax_s)]
    assert not files[-1].startswith(flax_s)
    shown = "".join(traceback.format_exception(error))
    assert shown.count("Traceback (most recent call last)") == 1
    assert shown.endswith(f"JShardError: {error}\n")


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jshard.load(CONFIGURATION)
    yield
    jshard.unload()


@pytest.mark.parametrize("mistake", CASES)
def test_a_mistake_is_one_sentence_and_no_frame_of_jax_or_flax(mistake, tmp_path):
    code, sentence = CASES[mistake]
    with pytest.raises(JShardError) as error:
        run(code, tmp_path)
    assert str(error.value) == sentence
    check_frames(error.value)


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


X = np.arange(64, dtype=np.float32).reshape(8, 8) / 64

NO_MISTAKES = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model))(X),
    "deepcopy": lambda model: copy.deepcopy(model)(X),
    "clone": lambda model: nnx.clone(model)(X),
    "split and merge": lambda model: nnx.merge(*nnx.split(model))(X),
    "tree.map": lambda model: jax.tree.map(lambda x: x, model)(X),
    "jit of the model": lambda model: jax.jit(model)(X),
    "vmap over a closure": lambda model: jax.vmap(model)(X[None])[0],
    "checkpoint over a closure": lambda model: jax.jit(jax.checkpoint(lambda x: model(x)))(X),
    "a gradient over a closure": lambda model: jax.jit(jax.grad(lambda x: model(x).sum()))(X),
}


@pytest.mark.parametrize("use", NO_MISTAKES)
def test_what_a_flax_model_can_do_a_sharded_one_can(use):
    wanted = NO_MISTAKES[use](Net())
    np.testing.assert_allclose(NO_MISTAKES[use](jshard.shard(Net(), X)), wanted, rtol=1e-5, atol=1e-6)


def test_a_pickled_model_is_sharded_and_its_parameters_are_placed_by_its_first_call():
    model = pickle.loads(pickle.dumps(jshard.shard(Net(), X)))
    assert type(model) is not Net and isinstance(model, Net)
    model(X)
    assert model.up.kernel[...].sharding.is_equivalent_to(jax.NamedSharding(jshard.mesh(), jax.P(None, "tensor")), 2)


def test_a_refused_pretend_leaves_the_environment_as_it_was(monkeypatch):
    before = dict(os.environ)
    with pytest.raises(JShardError):
        jshard.pretend(16)
    assert dict(os.environ) == before


def test_a_signal_that_is_never_entered_is_warned_of_at_its_line():
    with pytest.warns(UserWarning) as told:
        jshard.signal("up")
    (warning,) = told
    assert str(warning.message) == 'signal "up" is named but never entered; write `with jshard.signal("up"):`'
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jshard.signal("up")(lambda: None)()


@pytest.mark.parametrize("error", [AttributeError, KeyError, ValueError])
def test_an_error_of_the_users_own_stays_as_it_is(error):
    class Odd(Net):
        def __call__(self, x):
            raise error("mine")

    with pytest.raises(error, match="mine") as told:
        jshard.shard(Odd(), X)
    assert type(told.value) is error

"""How what is made of parameters is needed, as far back as where it is made."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jshard.layers.partition.choice import wanted
from jshard.programs.jaxprs import bare, called

P, X = np.ones(4, np.float32), np.ones((8, 4), np.float32)
DATA, TENSOR, BOTH = (("data",), ()), ((), ("tensor",)), (("data",), ("tensor",))
made = lambda p: lax.broadcast_in_dim(p, (8, 4), (1,))


def looked_at_twice(p, x, other):
    first = made(p) * x
    return first + other


CASES = {  # how x and another array are split; then how the first equation's result and its operand are needed
    "as what it meets": (lambda p, x, _: made(p) * x, BOTH, (), BOTH, (("tensor",),)),
    "in a function": (lambda p, x, _: jax.jit(lambda y, x: y * x)(made(p), x), BOTH, (), BOTH, (("tensor",),)),
    "by what a function makes of it": (lambda p, x, _: jax.jit(jnp.sin)(made(p)) * x, BOTH, (), BOTH, (("tensor",),)),
    "first by what it meets": (looked_at_twice, DATA, (("tensor",), ()), DATA, None),
    "not where what it meets is whole": (looked_at_twice, DATA, BOTH, DATA, None),
    "as neither of two is": (lambda _, x, y: jnp.sin(x * y), DATA, TENSOR, BOTH, BOTH),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_made_of_parameters_is_needed(case):
    f, x, other, result, operand = CASES[case]
    jaxpr = bare(jax.make_jaxpr(f)(P, X, X))
    found = {variable: axes for variable, axes in zip(jaxpr.invars[1:], (x, other), strict=True) if axes}
    for eqn in jaxpr.eqns:
        if (body := bare(called(eqn))) is not None:  # the first run has found how these are split, as all
            found |= {one: found[other] for one, other in zip(body.invars, eqn.invars, strict=True) if other in found}
    want = wanted(jaxpr, found, {"data": 2, "tensor": 4})
    first = jaxpr.eqns[0]
    assert (want.get(first.outvars[0]), want.get(first.invars[0])) == (result, operand)

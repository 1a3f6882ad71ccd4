"""The target kernel: the logit of each token's target.

    target_i = z_i,t_i

The kernel loads each token's row of e and the row of c that its target names, and takes their dot product.
Read: e once, and one row of c a token. Written: 4 bytes a token. Never written: another logit.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cce_kernels.engines.engine import Problem, Step
from cce_kernels.engines.order import cdiv
from cce_kernels.engines.triton.launch import How, launch
from cce_kernels.engines.triton.loads import indices, inside, load_scalar, load_vector
from cce_kernels.engines.triton.logits import product_tile
from cce_kernels.numbers import FLOAT32_MAX, Inputs


def _kernel(how: How, inputs: Inputs, target_ref):
    head, tiles = how.head, how.tiles
    tokens, vocabulary = target_ref.shape[0], head.vocabulary(inputs.c)
    rows = indices(pl.program_id(0), tiles.rows)
    rows_ok = inside(rows, tokens, tiles.rows)
    targets = load_vector(inputs.targets, rows, rows_ok, other=-1)
    named = (targets >= 0) & (targets < vocabulary)
    columns = jnp.where(named, targets, 0)

    products = product_tile(inputs.e, inputs.c, rows, columns, rows_ok, None, head=head, depth=tiles.depth)
    own = jnp.arange(tiles.rows)
    raw = jnp.sum(jnp.where(own[:, None] == own[None, :], products, 0.0), axis=1)  # the diagonal: each row's own target
    bias = None if inputs.bias is None else load_vector(inputs.bias, columns, None).astype(jnp.float32)
    logit = head.logits(raw, bias, load_scalar(inputs.scale))
    if inputs.inverse_temperature is not None:
        logit *= load_vector(inputs.inverse_temperature, rows, rows_ok, other=1)
    target = jnp.where(named, logit, jnp.where(targets < 0, FLOAT32_MAX, -FLOAT32_MAX))
    plgpu.store(target_ref.at[rows], target, mask=rows_ok)


def target(step: Step, problem: Problem) -> jax.Array:
    """engine.Launched.target. inputs.targets: (rows,), the kept tokens first.

    It is FLOAT32_MAX for an ignored token, so that the sum of exp(z − reference) is small. It is −FLOAT32_MAX where the
    target names no column.
    """
    inputs, tokens = problem.inputs, problem.inputs.targets.size
    given, programs = inputs._replace(weights=None), cdiv(tokens, step.tiles.rows)
    out = jax.ShapeDtypeStruct((tokens,), jnp.float32)
    return launch(_kernel, How.of(step, problem), given, programs=programs, name="cce_target", out_shape=out)

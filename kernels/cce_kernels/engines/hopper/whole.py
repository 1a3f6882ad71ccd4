"""The kernel of whole logits for Hopper GPUs: float32 logits, the largest of each token, and Σ exp(z − largest).

A pair of programs owns 256 tokens and a run of the vocabulary, as in statistics.py. Read: e once per 256 columns and c
once per 256 rows, from L2 where programs that run at the same time share them. Written: 4 bytes a logit; 8 bytes a
token and split; for `logits_and_maxima` 4 bytes a token and block of columns, which is the columns of a tile.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from cce_kernels.divergence_terms import Whole
from cce_kernels.engines.engine import Problem, Step
from cce_kernels.engines.hopper.every_tile import PAIR_GROUP, padded
from cce_kernels.engines.hopper.logits import divided, logits
from cce_kernels.engines.hopper.matmul import Multiply, Origin, Sum, Work, launch
from cce_kernels.engines.hopper.registers import BLOCK, ROWS, along_rows, parts_of, quotient, vector_of, zero_vector
from cce_kernels.engines.hopper.tiles import DEPTH, PAIR_ROWS
from cce_kernels.engines.order import cdiv, grouped_order, row_group
from cce_kernels.numbers import FLOAT32_MAX, LOG2_E


def at_most(x: jax.Array, limit: float, otherwise: float, exists: Any) -> jax.Array:
    """x, a number for each row, at most `limit`, or `otherwise` where the part that x is of lies beyond the columns."""
    return x if exists is True else jnp.minimum(x, jnp.where(exists, limit, otherwise))


def whole_logits(step: Step, problem: Problem, count: jax.Array) -> Whole:
    """engine.Launched.whole_logits."""
    return _launched(step, problem, count, with_maxima=False)[0]


def logits_and_maxima(step: Step, problem: Problem, count: jax.Array) -> tuple[Whole, jax.Array]:
    """engine.Launched.logits_and_maxima."""
    whole, maxima = _launched(step, problem, count, with_maxima=True)
    assert maxima is not None
    return whole, maxima.T


def _launched(step: Step, problem: Problem, count: jax.Array, with_maxima: bool) -> tuple[Whole, jax.Array | None]:
    """The maxima: (blocks, n)."""
    (e, c, *_), head, columns, splits = problem.inputs, problem.head, step.tiles.columns, step.splits
    tokens, width, vocabulary = *e.shape, problem.request.vocabulary
    pairs, column_tiles = cdiv(tokens, PAIR_ROWS), cdiv(vocabulary, columns)

    def kernel(others, x_ref, largest_ref, mass_ref, maxima_ref):
        inverse_ref, count_ref, scale_ref = others

        def run(unit):
            pair, split = grouped_order(unit, pairs, splits, row_group(width, e.dtype.itemsize, PAIR_ROWS, PAIR_GROUP))
            first = quotient(split * column_tiles, splits)
            return pair, split, first, quotient((split + 1) * column_tiles, splits) - first

        def work(unit, program) -> Work:
            pair, _split, first, length = run(unit)
            length = jnp.where(pair * PAIR_ROWS < count_ref[0], length, 0)
            row = pair * PAIR_ROWS + program * BLOCK
            return Work(length, lambda n: (row, (first + n) * columns), Sum(width // DEPTH, Origin))

        def compute(warpgroup, work, product):
            pair, split, first = run(lax.axis_index("pair"))[:3]
            row = warpgroup.first_row(pair * PAIR_ROWS + lax.axis_index("cluster") * BLOCK)
            inverse = None if inverse_ref is None else vector_of(inverse_ref, row)
            scale, steps = None if scale_ref is None else scale_ref[0], work.sum.steps

            def tile(n, carry):
                before, mass = carry
                column, raw = (first + n) * columns, product(n * steps, steps)

                def parts():
                    """The logits of each part, before and after the temperature, and whether its columns exist."""
                    for begin, part in parts_of(raw, jnp.float32):
                        x = logits(part, head, scale)
                        yield x, divided(x, inverse), vocabulary % columns == 0 or column + begin < vocabulary

                own = zero_vector() - jnp.inf
                for _, z, exists in parts():
                    found = jnp.max(jnp.where(z == z, z, -jnp.inf), axis=1)
                    own = jnp.maximum(own, at_most(found, jnp.inf, -jnp.inf, exists))
                if maxima_ref is not None:
                    maxima_ref[first + n, pl.ds(row, ROWS)] = own
                largest = jnp.maximum(before, own)
                sums = [mass * jnp.exp2((before - largest) * LOG2_E)]

                def written():
                    for x, z, exists in parts():
                        total = jnp.sum(jnp.exp2((z - along_rows(largest, z.shape)) * LOG2_E), axis=1)
                        sums.append(at_most(total, FLOAT32_MAX, 0.0, exists))
                        yield x

                warpgroup.write(written(), x_ref, row, column)  # TMA writes nothing beyond the edges of x_ref
                return largest, sum(sums[1:], sums[0])

            begin = zero_vector() - FLOAT32_MAX, zero_vector()
            found = lax.fori_loop(jnp.int32(0), work.tiles, tile, begin)
            for ref, value in zip((largest_ref, mass_ref), found, strict=True):
                ref[split, pl.ds(row, ROWS)] = value
            return work.tiles * steps

        return work, compute

    inverse = problem.inputs.inverse_temperature
    of_runs = jax.ShapeDtypeStruct((splits, pairs * PAIR_ROWS), jnp.float32)
    others = None if inverse is None else padded(inverse), count.reshape(1), problem.inputs.scale
    maxima = jax.ShapeDtypeStruct((column_tiles, pairs * PAIR_ROWS), jnp.float32) if with_maxima else None
    outputs = jax.ShapeDtypeStruct((tokens, vocabulary), jnp.float32), of_runs, of_runs, maxima
    multiply = Multiply(step.tiles, right_axis=1 - head.vocab_axis, written=jnp.float32)
    name, gpu = "cce_whole_logits", problem.gpu
    found = launch((e, c), others, outputs, multiply, kernel, pairs=pairs * splits, name=name, gpu=gpu)
    x, *of_tokens = found
    assert x is not None
    largest, mass, maxima = (part if part is None else part[:, :tokens] for part in of_tokens)
    return Whole.of_runs(x, largest, mass), maxima  # type: ignore[reportArgumentType]

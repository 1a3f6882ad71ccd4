"""The statistics kernel for Hopper GPUs: the log-mass and the mean of each token's logits, and exponentials to save.

The maths is that of cce_kernels/engines/triton/statistics.py. A pair of programs owns 256 tokens and a run of the
vocabulary.
Read: e once per 256 columns and c once per 256 rows, from L2 where programs that run at the same time share them.
Written: 4 bytes a token and split, and 4 for the mean; 2 bytes for each saved exponential; with a
gradient_tolerance 4 bytes a token and 64 columns. Never written: a logit.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from cce_kernels.block_sparse import PART
from cce_kernels.engines.engine import Problem, Step, Sums
from cce_kernels.engines.hopper.every_tile import PAIR_GROUP, padded
from cce_kernels.engines.hopper.logits import divided, logits
from cce_kernels.engines.hopper.matmul import Multiply, Origin, Sum, Work, launch
from cce_kernels.engines.hopper.registers import (
    BLOCK,
    ROWS,
    along_rows,
    column_numbers,
    parts_of,
    quotient,
    vector_of,
    zero_vector,
)
from cce_kernels.engines.hopper.tiles import DEPTH, PAIR_ROWS
from cce_kernels.engines.order import cdiv, grouped_order, row_group
from cce_kernels.exponentials import LARGEST, saved_shape
from cce_kernels.mean import quotient as mean_of
from cce_kernels.numbers import LOG2_E, logarithm


def sums(step: Step, problem: Problem, count: jax.Array | None, reference: jax.Array, save: bool) -> Sums:
    """engine.Launched.sums."""
    (e, c, *_), head, tiles, splits = problem.inputs, problem.head, step.tiles, step.splits
    tokens, width, vocabulary, columns = reference.size, e.shape[1], problem.request.vocabulary, tiles.columns
    pairs, column_tiles = cdiv(tokens, PAIR_ROWS), cdiv(vocabulary, columns)
    count = jnp.full(1, tokens, jnp.int32) if count is None else count

    def kernel(others, total_ref, saved_ref, masses_ref, moment_ref):
        reference_ref, inverse_ref, count_ref, scale_ref = others

        def run(unit):
            pair, split = grouped_order(unit, pairs, splits, row_group(width, e.dtype.itemsize, PAIR_ROWS, PAIR_GROUP))
            first = quotient(split * column_tiles, splits)
            return pair, split, first, quotient((split + 1) * column_tiles, splits) - first

        def work(unit, program) -> Work:
            pair, _split, first, length = run(unit)
            row = pair * PAIR_ROWS + program * BLOCK
            length = jnp.where(pair * PAIR_ROWS < count_ref[0], length, 0)
            return Work(length, lambda n: (row, (first + n) * columns), Sum(width // DEPTH, Origin))

        def compute(warpgroup, work, product):
            program = lax.axis_index("cluster")
            pair, split, first = run(lax.axis_index("pair"))[:3]
            row = warpgroup.first_row(pair * PAIR_ROWS + program * BLOCK)
            origin = vector_of(reference_ref, row)
            inverse = None if inverse_ref is None else vector_of(inverse_ref, row)
            scale = None if scale_ref is None else scale_ref[0]

            steps = work.sum.steps

            def tile(n, totals):
                column = (first + n) * columns
                sums, moments = ([x] for x in totals)  # Σ p and Σ p·log p

                def exponentials():
                    for begin, raw in parts_of(product(n * steps, steps), e.dtype):
                        x = logits(raw, head, scale)
                        log_p = divided(x, inverse) - along_rows(origin, raw.shape)
                        p = jnp.exp2(log_p * LOG2_E)
                        if vocabulary % columns:
                            p = jnp.where(column_numbers(p.shape) < vocabulary - column - begin, p, 0.0)
                        sums.append(jnp.sum(p, axis=1))
                        if moment_ref is not None:
                            moments.append(jnp.sum(p * logarithm(log_p), axis=1))
                        if saved_ref is not None and head.softcap is not None:
                            p *= head.slope(x)
                        if masses_ref is not None:
                            mass = sums[-1] if head.softcap is None else jnp.sum(p, axis=1)
                            masses_ref[quotient(column + begin, PART), pl.ds(row, ROWS)] = mass
                        yield p.astype(e.dtype)

                if saved_ref is None:
                    for _ in exponentials():
                        pass
                else:  # TMA writes nothing beyond the rows of saved_ref
                    warpgroup.write(exponentials(), saved_ref, row, column)
                return sum(sums[1:], sums[0]), None if moment_ref is None else sum(moments[1:], moments[0])

            begin = zero_vector(), None if moment_ref is None else zero_vector()
            total, moment = lax.fori_loop(jnp.int32(0), work.tiles, tile, begin)
            total_ref[split, pl.ds(row, ROWS)] = total
            if moment_ref is not None:
                moment_ref[split, pl.ds(row, ROWS)] = moment
            return work.tiles * steps

        return work, compute

    saved = jax.ShapeDtypeStruct(saved_shape(tokens, vocabulary), e.dtype) if save else None
    multiply = Multiply(tiles, right_axis=1 - head.vocab_axis, written=e.dtype if save else None)
    masses = None
    if save and problem.request.gradient_tolerance:
        masses = jax.ShapeDtypeStruct((column_tiles * (columns // PART), pairs * PAIR_ROWS), jnp.float32)
    inverse = problem.inputs.inverse_temperature
    others = padded(reference), None if inverse is None else padded(inverse), count, problem.inputs.scale
    parts = jax.ShapeDtypeStruct((splits, pairs * PAIR_ROWS), jnp.float32)
    outputs = parts, saved, masses, parts if problem.request.numbers.mean else None
    name, programs = "cce_statistics", pairs * splits
    total, p, masses, moment = launch(
        (e, c), others, outputs, multiply, kernel, pairs=programs, name=name, gpu=problem.gpu
    )
    assert total is not None
    total, mean = total[:, :tokens], None
    log_mass = jnp.log(total)
    if moment is not None:
        moment = moment[:, :tokens]
        mean = mean_of(moment, total)
        log_mass = jnp.where(log_mass < LARGEST, log_mass, jnp.inf)
    return Sums(log_mass, None, p, masses, mean)

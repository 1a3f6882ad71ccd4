"""The dz kernel for Hopper GPUs: dz (N, V_g) of one window of columns, from logits that the kernel computes again.

The maths is that of cce_kernels/engines/triton/dz.py. Read: e once per 256 columns and c_g once per 256 rows, from L2
where programs that run at the same time share them. Written: dz once, 2 bytes an element. Never written: a logit.
The kernel computes a window's first column from the window's number, which is the counter of XLA's loop: no other
kernel has to be launched to compute it.
"""

import jax
import jax.numpy as jnp

from cce_kernels.engines.engine import Problem, Step
from cce_kernels.engines.hopper.every_tile import PAIR_GROUP, Extent, every_tile, live_pairs, padded
from cce_kernels.engines.hopper.logits import divided, logits
from cce_kernels.engines.hopper.matmul import Multiply, Origin, Sum
from cce_kernels.engines.hopper.registers import along_rows, column_numbers, parts_of, vector_of
from cce_kernels.engines.hopper.tiles import DEPTH, PAIR_ROWS
from cce_kernels.engines.order import row_group
from cce_kernels.numbers import LOG2_E, Cotangents, Numbers
from cce_kernels.windows import FormDz, Window


def form_dz(step: Step, problem: Problem, numbers: Numbers, of: Cotangents, count: jax.Array) -> FormDz:
    """engine.Launched.form_dz. windows.columns: a multiple of DEPTH. dz is 0 from column V on."""
    head, windows, inputs = problem.head, step.windows, problem.inputs
    e, c, vocabulary = inputs.e, inputs.c, problem.request.vocabulary
    # the same for all windows
    of_rows = numbers.reference, numbers.most(inputs), inputs.targets, of, inputs.inverse_temperature
    of_tokens = jax.tree.map(padded, of_rows), count, inputs.scale
    multiply = Multiply(step.tiles, right_axis=1 - head.vocab_axis)
    group = row_group(e.shape[1], e.dtype.itemsize, PAIR_ROWS, PAIR_GROUP)

    def extent(others) -> Extent:
        (_, count_ref, _scale_ref), number_ref = others
        start = windows.window(number_ref[0]).start
        left = jnp.minimum(windows.columns, windows.vocabulary - start)
        logits_sum = Sum(e.shape[1] // DEPTH, lambda row, column: Origin(row, start + column))
        return Extent(live_pairs(count_ref[0]), left, logits_sum, group)

    def write(warpgroup, product, row, column, dz_ref, others):
        (rows_refs, _, scale_ref), number_ref = others
        start = windows.window(number_ref[0]).start
        origin, most, targets, of, inverse = jax.tree.map(lambda ref: vector_of(ref, row), rows_refs)
        scale = None if scale_ref is None else scale_ref[0]

        def parts():
            for first, raw in parts_of(product(), e.dtype):
                x, shape = logits(raw, head, scale), raw.shape
                log_p = divided(x, inverse, most) - along_rows(origin, shape)
                p = jnp.exp2(log_p * LOG2_E)
                begin = start + column + first
                if vocabulary % DEPTH:
                    p = jnp.where(column_numbers(shape) < vocabulary - begin, p, 0.0)
                is_target = column_numbers(shape) == along_rows(targets - begin, shape)
                of_part = jax.tree.map(lambda x, shape=shape: along_rows(x, shape), of)
                factor = scale
                if inverse is not None:
                    factor = along_rows(inverse if scale is None else inverse * scale, shape)
                yield head.cotangent(x, p, is_target, of_part, None, factor, log_p).astype(e.dtype)

        warpgroup.write(parts(), dz_ref, row, column)

    def form(window: Window) -> tuple[jax.Array, None]:
        others, out = (of_tokens, window.number.reshape(1)), jax.ShapeDtypeStruct((len(e), windows.columns), e.dtype)
        return every_tile((e, c), others, out, multiply, extent, write, name="cce_dz", gpu=problem.gpu), None

    return form

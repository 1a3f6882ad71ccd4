"""The launch of one Triton kernel, and what it knows when it is compiled."""

from functools import partial
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cce_kernels.compat import ignore_deprecation_of_triton
from cce_kernels.engines.engine import Problem, Step
from cce_kernels.engines.triton.tiles import TileConfig
from cce_kernels.head import Head


class How(NamedTuple):
    """What a kernel knows when it is compiled."""

    head: Head
    tiles: TileConfig
    interpret: bool
    splits: int = 1
    windows: Any = None  # windows.Windows

    @classmethod
    def of(cls, step: Step, problem: Problem) -> "How":
        return cls(problem.head, step.tiles, problem.gpu.interpreted, step.splits, step.windows)


def launch(kernel, how: How, *operands: Any, programs: int, name: str, out_shape=None, in_place=None):
    """One Pallas call of kernel(how, ...) over a one-dimensional grid. operands: arrays, tuples of arrays, or None.

    in_place: the operands, one or a tuple, whose buffers become the first outputs, or all where out_shape is None.
    Elements that the kernel does not write keep the operand's values.
    """
    ignore_deprecation_of_triton()
    if out_shape is None:
        out_shape = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), in_place)
    arrays = jax.tree.leaves(operands)
    aliased = [[x is y for x in arrays].index(True) for y in jax.tree.leaves(in_place)]
    request = pl.pallas_call(
        partial(kernel, how),
        out_shape=out_shape,
        grid=(programs,),
        input_output_aliases={operand: output for output, operand in enumerate(aliased)},
        compiler_params=plgpu.CompilerParams(num_warps=how.tiles.warps, num_stages=how.tiles.stages),
        interpret=how.interpret,
        name=name,
    )
    return request(*operands)

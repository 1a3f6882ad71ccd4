"""The JAX programs of a process that holds a shard of the vocabulary. The processes exchange numbers in between.

`columns`, int32, are the targets as columns of the shard: negative for an ignored token, the number of the shard's
columns where the shard does not hold the token's target. `reference` is the logit of each token's target, which one of
the shards holds. All shards get it, as the kernels' exponentials are relative to it. It is −inf where no shard holds
the target, and None for plain XLA, which needs no reference.

Where the forward pass forms the gradients, the programs are those of on_jax/chunk_programs.py.
"""

from collections.abc import Callable
from functools import lru_cache

import jax
import torch
from torch import Tensor

from cce_jax import passes
from cce_kernels.numbers import Cotangents, Statistics, Wanted
from cce_kernels.residuals import Residuals
from cce_torch.call import Call, Operands
from cce_torch.on_jax import bridge, programs
from cce_torch.on_jax.chunk_programs import finite, inputs_of
from cce_torch.on_jax.kinds import Kind, kind_of_tensors
from cce_torch.processes.shard_ops import Held


class _Shard(programs.Tokens):
    """The tensors of a call on a shard, as its programs take them."""

    def __init__(self, kind: Kind, operands: Operands, scale: float) -> None:
        e, c, bias, columns, weights, inverse_temperature, ids = operands
        super().__init__(kind, e.shape[0])
        self.c = kind.in_memory(c)
        self.arrays = [
            self.padded(e, 0),
            self.c,
            programs.dense(bias),
            self.padded(columns, -1),
            programs.dense(programs.real(weights)),
            programs.scale_of(scale),
            self.padded(inverse_temperature, 1),
            self.padded(ids, -1),
        ]

    def of_tokens(self, *each: Tensor | None) -> list[Tensor | None]:
        """(..., N) with as many tokens as the programs take; the new ones hold 0. None stays None."""
        return [None if x is None else self.padded(x, 0, axis=x.dim() - 1) for x in each]


def target(operands: Operands, saving_for: tuple[bool, ...], call: Call, scale: float) -> Tensor:
    """The logit of each token's target, (N,) float32: 0 where the shard does not hold it."""
    shard = _Shard(kind_of_tensors(operands.e, operands.c, call), operands, scale)
    output = operands.e.new_empty(shard.size, dtype=torch.float32)
    program = _target_program(shard.kind, shard.size, Wanted(*saving_for) if any(saving_for) else None)
    return shard.first(bridge.run(program, shard.arrays, [output])[0])


def statistics(
    operands: Operands, reference: Tensor | None, saving_for: tuple[bool, ...], call: Call, scale: float
) -> tuple[Tensor, Tensor | None]:
    """The statistics over the shard's columns, and the saved exponentials or None."""
    shard, new = _Shard(kind_of_tensors(operands.e, operands.c, call), operands, scale), operands.e.new_empty
    wanted = Wanted(*saving_for) if any(saving_for) else None
    left = programs.handover_of(shard.kind, shard.size, operands.bias is not None, wanted)
    outputs = [new((call.rows, shard.size), dtype=torch.float32), *(new(x, dtype=dtype) for x, dtype in left.leaves)]
    program = _statistics_program(shard.kind, shard.size, wanted, len(outputs))
    found, *exponentials = bridge.run(program, [*shard.of_tokens(reference), *shard.arrays], outputs)
    return shard.first(found), exponentials[0] if exponentials else None


def gradients(
    kind: Kind, cotangents: Tensor, operands: Operands, held: Held, wanted: tuple[bool, ...], scale: float
) -> list[Tensor]:
    """The wanted ones of de (the part of the shard's columns, in float32), dc and dbias.

    cotangents: of the statistics over the whole vocabulary. The program overwrites parts of held.saved that no later
    call reads.
    """
    shard, asked = _Shard(kind, operands, scale), Wanted(*wanted)
    overwritten = [] if held.saved is None else [held.saved]
    inputs = [*shard.of_tokens(cotangents, held.numbers), *shard.arrays]
    program = _gradients_program(kind, asked, bool(overwritten), shard.size)
    found = list(bridge.run(program, inputs, shard.of_gradients(operands.e, wanted), scratch=overwritten))
    if asked.e:
        found[0] = shard.cut(found[0])
    if asked.c:
        found[int(asked.e)] = kind.in_order_of_c(found[int(asked.e)])
    return found


@lru_cache(maxsize=programs.PROGRAMS)
def _target_program(kind: Kind, size: int, wanted: Wanted | None) -> Callable:
    def torch_shard_target(_, *arrays):
        return (passes.target_logits(inputs_of(*arrays), kind.static, wanted),)

    return programs.jitted(torch_shard_target, 1)


@lru_cache(maxsize=programs.PROGRAMS)
def _statistics_program(kind: Kind, size: int, wanted: Wanted | None, count: int) -> Callable:
    def torch_shard_statistics(*arrays):
        reference, *others = arrays[count:]  # the first `count` are the results' memory
        found, residuals = passes.forward_pass(inputs_of(*others), kind.static, wanted, finite(reference))
        return programs.stacked(found), *jax.tree.leaves(residuals)

    return programs.jitted(torch_shard_statistics, count)


@lru_cache(maxsize=programs.PROGRAMS)
def _gradients_program(kind: Kind, wanted: Wanted, with_saved: bool, size: int) -> Callable:
    count = with_saved + wanted.e + wanted.c + wanted.bias

    def torch_shard_gradients(*arrays):
        residuals = Residuals(exponentials=arrays[0] if with_saved else None)
        cotangents, numbers, *others = arrays[count:]  # the first `count` are the results' memory
        each = (Statistics, numbers), (Cotangents, cotangents)
        numbers, of = (programs.unstacked(x, y, kind.call) for x, y in each)
        found, residuals = passes.gradients(inputs_of(*others), numbers, residuals, of, kind.static, wanted)
        return tuple(jax.tree.leaves((residuals, list(found))))

    return programs.jitted(torch_shard_gradients, count, programs.options_on(kind))

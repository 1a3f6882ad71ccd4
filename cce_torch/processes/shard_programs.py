"""The three JAX programs of a process that holds a shard of the vocabulary. The processes exchange numbers in between.

`columns`, int32, are the targets as columns of the shard: negative for an ignored token, the number of the shard's
columns where the shard does not hold the token's target. `reference` is the logit of each token's target, which one of
the shards holds. All shards get it, as the kernels' exponentials are relative to it. It is −inf where no shard holds
the target, and None for plain XLA, which needs no reference.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from cce_jax import losses, passes
from cce_kernels.numbers import FLOAT32_MAX, Cotangents, Inputs, Shard, Statistics, Wanted
from cce_torch.on_jax import bridge
from cce_torch.on_jax.programs import (
    ON_GPU,
    PROGRAMS,
    Arrays,
    Call,
    Kind,
    Numbers,
    dense,
    jitted,
    kind_of_tensors,
    named,
    real,
    residuals_of,
    rows_of,
    saved_of,
    saved_shape_of,
)


def _call(impl: Any, with_sum: bool, softcap: float | None, precision: str | None, memory_budget: int | None,
          wide_dc: bool) -> Call:  # fmt: skip
    loss = losses.Loss("none", with_sum, False)  # the loss itself is computed by PyTorch
    return Call(-1, 0, loss, softcap, precision, impl, memory_budget, wide_dc, of_shard=True)


def kind(e: Tensor, c: Tensor, *, scale: float, **options: Any) -> Kind:
    """The Kind of a call on a shard."""
    return kind_of_tensors(e, c, _call(**options))


class _Tensors(Arrays):
    """The tensors of a call on a shard, as its programs take them."""

    def __init__(self, e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, weights: Tensor | None, *, impl: Any,
                 with_sum: bool, scale: float, softcap: float | None, precision: str | None, memory_budget: int | None,
                 wide_dc: bool) -> None:  # fmt: skip
        call = _call(impl, with_sum, softcap, precision, memory_budget, wide_dc)
        super().__init__(e, c, call, Numbers(None, None, None if scale == 1 else float(scale)))
        self.given = [self.padded(e, 0), self.c, dense(bias), self.padded(columns, -1), dense(real(weights)),
                      self.numbers.scale]  # fmt: skip

    def of_tokens(self, x: Tensor | None) -> Tensor | None:
        """(..., N) with as many tokens as the programs take; the new ones hold 0. None stays None."""
        return None if x is None else self.padded(x, 0, axis=x.dim() - 1)

    def first(self, x: Tensor) -> Tensor:
        """The tokens of (..., N) that are no padding."""
        return x if self.size == self.tokens else x[..., : self.tokens].contiguous()


def target(e: Tensor, *others: Any, saving_for: Wanted | None, **options: Any) -> Tensor:
    """The logit of each token's target, (N,) float32: 0 where the shard does not hold it. Options as for statistics."""
    tensors = _Tensors(e, *others, **options)
    output = e.new_empty(tensors.size, dtype=torch.float32)
    return tensors.first(
        bridge.run(_target_program(tensors.kind, tensors.size, saving_for), tensors.given, [output])[0]
    )


def statistics(e: Tensor, *others: Any, reference: Tensor | None, saving_for: Wanted | None, **options: Any
               ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """lse, target and, with_sum, the weighted sum over the shard's columns, (2 or 3, N); saved exponentials or None."""
    tensors = _Tensors(e, *others, **options)
    outputs = [e.new_empty((2 + options["with_sum"], tensors.size), dtype=torch.float32)]
    saved = (0, 0)
    if saving_for:
        saved = saved_shape_of(tensors.kind, tensors.size, others[1] is not None, saving_for)
    if saved[0]:
        outputs.append(e.new_empty(saved))
    program = _statistics_program(tensors.kind, tensors.size, saving_for, saved[0] > 0)
    numbers, *exponentials = bridge.run(program, [tensors.of_tokens(reference), *tensors.given], outputs)
    return tensors.first(numbers), exponentials[0] if exponentials else None


def gradients(
    e: Tensor, c: Tensor, bias: Tensor | None, *others: Any, cotangents: Tensor, own: Tensor, lse: Tensor,
    reference: Tensor | None, saved: Tensor | None, wanted: Wanted, **options: Any,
) -> list[Tensor]:  # fmt: skip
    """The wanted ones of de (the part of the shard's columns, in float32), dc and dbias.

    cotangents: of the numbers of the whole vocabulary; own, saved: the results of `statistics`; lse: (N,), of the whole
    vocabulary. The program overwrites parts of saved that no later call reads.
    """
    tensors = _Tensors(e, c, bias, *others, **options)
    overwritten = [] if saved is None else [saved]
    outputs = []
    if wanted.e:
        outputs.append(e.new_empty((tensors.size, e.shape[1]), dtype=torch.float32))
    if wanted.c:
        outputs.append(tensors.of_parameter(tensors.c))
    if wanted.bias and bias is not None:
        outputs.append(tensors.of_parameter(bias))
    results = list(bridge.run(
        _gradients_program(tensors.kind, wanted, bool(overwritten), tensors.size),
        [*map(tensors.of_tokens, (cotangents, own, lse, reference)), *tensors.given], outputs, scratch=overwritten,
    ))  # fmt: skip
    if wanted.e:
        results[0] = tensors.cut(results[0])
    if wanted.c and tensors.kind.static.head.vocab_axis == 1:
        results[int(wanted.e)] = results[int(wanted.e)].T
    return results


def _inputs(e, c, bias, columns, weights, scale) -> Inputs:
    return Inputs(e, c, bias, columns, weights, None if scale is None else scale.reshape(1))


@lru_cache(maxsize=PROGRAMS)
def _target_program(kind: Kind, size: int, wanted: Wanted | None) -> Callable:
    def torch_shard_target(_, *arrays):
        return (passes.target_logits(_inputs(*arrays), kind.static, wanted),)

    return jitted(torch_shard_target, 1)


@lru_cache(maxsize=PROGRAMS)
def _statistics_program(kind: Kind, size: int, wanted: Wanted | None, saves: bool) -> Callable:
    count = 1 + saves

    def torch_shard_statistics(*arrays):
        reference, *rest = arrays[count:]  # the first `count` are the results' memory
        numbers, residuals = passes.forward_pass(_inputs(*rest), kind.static, wanted, _finite(reference))
        return rows_of(numbers), *saved_of(residuals)

    return jitted(torch_shard_statistics, count)


@lru_cache(maxsize=PROGRAMS)
def _gradients_program(kind: Kind, wanted: Wanted, with_saved: bool, size: int) -> Callable:
    count = with_saved + wanted.e + wanted.c + wanted.bias

    def torch_shard_gradients(*arrays):
        saved = arrays[0] if with_saved else None
        cotangents, own, lse, reference, *rest = arrays[count:]  # the first `count` are the results' memory
        found, residuals = passes.gradients(
            _inputs(*rest), named(Statistics, own), residuals_of(saved), named(Cotangents, cotangents), kind.static,
            wanted, Shard(lse, _finite(reference)),
        )  # fmt: skip
        results = [x for x in found if x is not None]
        return *saved_of(residuals), *results

    return jitted(torch_shard_gradients, count, ON_GPU if kind.device.platform != "cpu" else None)


def _finite(reference: jax.Array | None) -> jax.Array | None:
    """reference as numbers.Shard has it: −FLOAT32_MAX where no shard holds the target."""
    return None if reference is None else jnp.maximum(reference, -FLOAT32_MAX)

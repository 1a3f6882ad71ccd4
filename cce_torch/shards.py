"""The core on one shard of the vocabulary, by each impl: what a process computes between two collectives.

Columns are those of the shard: negative for an ignored token, the number of the shard's columns where it does not hold
the token's target.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cce_torch import compiled, reference

NO_REFERENCE = -torch.finfo(torch.float32).max  # of a token whose target is in no shard


@dataclass(frozen=True)
class Options:
    """The options of a call, the same for all shards."""

    impl: str
    with_sum: bool
    scale: float
    softcap: float | None
    precision: str | None
    memory_budget: int

    @property
    def head(self) -> dict[str, Any]:
        return {"scale": self.scale, "softcap": self.softcap}


def needs_reference(options: Options) -> bool:
    """Whether the exponentials are relative to the target's logit, summed over all shards."""
    return options.impl not in ("torch_compile", "reference")


def statistics(
    e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, weights: Tensor | None, reference_: Tensor | None,
    saving_for: tuple[bool, ...], options: Options,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """lse, target and, with_sum, the weighted sum over the shard's columns, (2 or 3, N); and what is saved."""
    if not c.shape[0]:
        empty = e.new_zeros((2 + options.with_sum, e.shape[0]), dtype=torch.promote_types(e.dtype, torch.float32))
        empty[0] = -torch.inf
        return empty, None
    if options.impl == "reference":
        return reference.statistics(e, c, bias, columns, weights, with_sum=options.with_sum, **options.head), None
    return compiled.run_statistics(e, c, bias, columns, weights, options.scale, options.softcap, options.with_sum,
                                   options.memory_budget), None  # fmt: skip


def gradients(
    cotangents: Tensor, e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, weights: Tensor | None,
    own: Tensor, lse: Tensor, reference_: Tensor | None, saved: Tensor | None, wanted: tuple[bool, ...],
    options: Options,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """de of the shard's columns alone, at least float32, dc and dbias, in their types. None where not wanted.

    cotangents: of the numbers of the whole vocabulary, (2 or 3, N); own: the result of `statistics`; lse: (N,), of the
    whole vocabulary.
    """
    if not c.shape[0]:
        de = torch.zeros_like(e, dtype=torch.promote_types(e.dtype, torch.float32))
        found = de, torch.zeros_like(c), None if bias is None else torch.zeros_like(bias)
    elif options.impl == "reference":
        found = _gradients_of_reference(cotangents, e, c, bias, columns, weights, own, lse, wanted, options)
    else:
        found = compiled.run_gradients(cotangents, e, c, bias, columns, weights, lse[None], options.scale,
                                       options.softcap, options.memory_budget, *wanted, wide_e=True)  # fmt: skip
    return tuple(x if w else None for x, w in zip(found, wanted, strict=True))


def _gradients_of_reference(cotangents, e, c, bias, columns, weights, own, lse, wanted, options):
    """By PyTorch: the cotangent of the shard's own lse is a·exp(own lse − lse), as p = exp(z − lse) in equation (6)."""
    leaves = [None if x is None else x.detach().requires_grad_(w) for x, w in zip((e, c, bias), wanted, strict=True)]
    with torch.enable_grad():
        wide = e.detach().to(lse.dtype).requires_grad_(wanted[0])
        numbers = reference.statistics(wide, *leaves[1:], columns, weights, with_sum=options.with_sum, **options.head)
    asked = [x for x, w in zip((wide, *leaves[1:]), wanted, strict=True) if w]
    share = torch.where(columns >= 0, torch.exp(own[0] - lse), 0)
    found = iter(torch.autograd.grad(numbers, asked, torch.cat([(cotangents[0] * share)[None], cotangents[1:]])))
    return tuple(next(found) if w else None for w in wanted)

"""The core on one shard of the vocabulary, by each impl: what a process computes between two collectives.

`columns` are the targets as columns of the shard: negative for an ignored token, the number of the shard's columns
where the shard does not hold the token's target.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from cce_torch.on_jax import tensors
from cce_torch.torch_alone import blocks, compiled, reference


@dataclass(frozen=True)
class Options:
    """The options of a call, the same for all shards."""

    impl: str
    with_sum: bool
    scale: float
    softcap: float | None
    precision: str | None
    memory_budget: int | None
    wide_dc: bool  # c and bias are float32 beside an e of 16 bits

    @property
    def head(self) -> dict[str, Any]:
        return {"scale": self.scale, "softcap": self.softcap}


def needs_reference(e: Tensor, options: Options) -> bool:
    """Whether the exponentials are relative to the target's logit, summed over all shards."""
    if options.impl in ("torch_compile", "reference"):
        return False
    from cce_kernels.plan import needs_reference  # imports JAX

    return needs_reference(e.itemsize, options.impl)  # type: ignore[arg-type]


def operands(e: Tensor, c: Tensor, bias: Tensor | None, options: Options) -> tuple[Tensor, Tensor | None]:
    """c and bias for the impl: PyTorch's impls round a float32 c themselves; the other impls take it in e's type."""
    if options.impl in ("torch_compile", "reference"):
        return c, bias
    return tensors.rounded(c, e), tensors.rounded(bias, e)


def kind(e: Tensor, c: Tensor, options: Options) -> Any:
    """The call's programs.Kind, which a graph with saved exponentials holds: the Kind knows their padded size."""
    from cce_torch.processes import shard_programs

    return shard_programs.kind(e, c, **_options(*astuple(options)))


def target(
    e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, saving_for: tuple[bool, ...], options: Options
) -> Tensor:
    """The logit of each token's target, (N,): 0 where the shard does not hold it."""
    if not e.shape[0] or not c.shape[0]:
        return e.new_zeros(e.shape[0], dtype=torch.float32)
    return _run(shard_target, e, c, bias, columns, saving_for, *astuple(options))


def statistics(
    e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, weights: Tensor | None, of_target: Tensor | None,
    saving_for: tuple[bool, ...], options: Options,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """lse, target and, with_sum, the weighted sum over the shard's columns, (2 or 3, N); saved exponentials or None.

    of_target: (N,), the reference of the exponentials if needs_reference; saving_for: the gradients that will be asked
    for.
    """
    if not e.shape[0] or not c.shape[0]:
        empty = e.new_zeros((2 + options.with_sum, e.shape[0]), dtype=torch.promote_types(e.dtype, torch.float32))
        empty[0] = -torch.inf
        return empty, None
    if options.impl == "reference":
        return reference.statistics(e, c, bias, columns, weights, with_sum=options.with_sum, **options.head), None
    if options.impl == "torch_compile":
        return compiled.run_statistics(e, c, bias, columns, weights, options.scale, options.softcap, options.with_sum,
                                       options.memory_budget), None  # fmt: skip
    numbers, saved = _run(shard_statistics, e, c, bias, columns, weights, of_target, saving_for, *astuple(options))
    return numbers, saved if saved.numel() else None


def gradients(
    cotangents: Tensor, e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, weights: Tensor | None,
    own: Tensor, lse: Tensor, of_target: Tensor | None, saved: Tensor | None, wanted: tuple[bool, ...],
    options: Options,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """de of the shard's columns alone, at least float32, dc and dbias, in their types. None where not wanted.

    cotangents: of the numbers of the whole vocabulary, (2 or 3, N); own: the result of `statistics`; lse: (N,), of the
    whole vocabulary.
    """
    tensors.check({"e": e, "c": c, "bias": bias})  # FSDP may have freed one after the forward pass
    if not e.shape[0] or not c.shape[0]:
        de = torch.zeros_like(e, dtype=torch.promote_types(e.dtype, torch.float32))
        found = de, torch.zeros_like(c), None if bias is None else torch.zeros_like(bias)
    elif options.impl == "reference":
        with torch.autocast(
            e.device.type, enabled=False
        ):  # which may be on: a backward pass has no autocast of its own
            found = _gradients_of_reference(cotangents, e, c, bias, columns, weights, lse, options)
    elif options.impl == "torch_compile":
        found = compiled.run_gradients(cotangents, e, c, bias, columns, weights, lse[None], options.scale,
                                       options.softcap, options.memory_budget, *wanted, wide_e=True)  # fmt: skip
    else:
        found = _run(shard_gradients, cotangents, e, c, bias, columns, weights, own, lse, of_target, saved, wanted,
                     *astuple(options))  # fmt: skip
    return tuple(x if w else None for x, w in zip(found, wanted, strict=True))


def _gradients_of_reference(cotangents, e, c, bias, columns, weights, lse, options):
    """Equations (6) and (7) of cce_jax/core.py from the full logits, in float32. dc and dbias are rounded once."""
    accumulate, kept, c_of_e, bias_of_e = lse.dtype, columns >= 0, tensors.rounded(c, e), tensors.rounded(bias, e)
    e = torch.where(kept[:, None], e, 0).to(accumulate)
    softcap = None if options.softcap is None else lse.new_full((), options.softcap)
    dz = blocks.cotangents(
        e @ c_of_e.to(accumulate).T, lse.new_zeros(()) if bias_of_e is None else bias_of_e.to(accumulate),
        lse.new_ones(()) if weights is None else weights.to(accumulate), columns, options.scale, softcap,
        torch.where(kept, lse, torch.inf), *(torch.where(kept, cotangents, 0) * options.scale),
        *[None] * (3 - len(cotangents)), dtype=accumulate,
    )  # fmt: skip
    dc = torch.empty_like(c).copy_(dz.T @ e)  # with c's strides
    return dz @ c_of_e.to(accumulate), dc, None if bias is None else dz.sum(0).to(bias.dtype)


# The shard's JAX programs as operators, which torch.compile does not look into.

TAGS = (torch.Tag.needs_fixed_stride_order, torch.Tag.cudagraph_unsafe)


def _run(operator: Any, *arguments: Any) -> Any:
    """Calls the operator if torch.compile traces the call; else only the operator's function, which takes less time."""
    return operator(*arguments) if torch.compiler.is_compiling() else operator._init_fn(*arguments)


def _options(impl, with_sum, scale, softcap, precision, memory_budget, wide_dc) -> dict[str, Any]:
    return dict(impl=impl, with_sum=with_sum, scale=scale, softcap=softcap, precision=precision,
                memory_budget=memory_budget, wide_dc=wide_dc)  # fmt: skip


@torch.library.custom_op("cce_torch::shard_target", mutates_args=(), tags=TAGS)
def shard_target(
    e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, saving_for: Sequence[bool], impl: str, with_sum: bool,
    scale: float, softcap: float | None, precision: str | None, memory_budget: int | None, wide_dc: bool,
) -> Tensor:  # fmt: skip
    from cce_torch.processes import shard_programs

    saving = shard_programs.Wanted(*saving_for) if any(saving_for) else None
    options = _options(impl, with_sum, scale, softcap, precision, memory_budget, wide_dc)
    return shard_programs.target(e, c, bias, columns, None, saving_for=saving, **options)


@torch.library.custom_op("cce_torch::shard_statistics", mutates_args=(), tags=TAGS)
def shard_statistics(
    e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, weights: Tensor | None,
    of_target: Tensor | None, saving_for: Sequence[bool], impl: str, with_sum: bool, scale: float,
    softcap: float | None, precision: str | None, memory_budget: int | None, wide_dc: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The numbers, and the saved exponentials, which have no elements if nothing is saved."""
    from cce_torch.processes import shard_programs

    saving = shard_programs.Wanted(*saving_for) if any(saving_for) else None
    options = _options(impl, with_sum, scale, softcap, precision, memory_budget, wide_dc)
    numbers, saved = shard_programs.statistics(e, c, bias, columns, weights, reference=of_target, saving_for=saving,
                                               **options)  # fmt: skip
    return numbers, e.new_empty(0) if saved is None else saved


@torch.library.custom_op("cce_torch::shard_gradients", mutates_args=(), tags=TAGS)
def shard_gradients(
    cotangents: Tensor, e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, weights: Tensor | None,
    own: Tensor, lse: Tensor, of_target: Tensor | None, saved: Tensor | None, wanted: Sequence[bool], impl: str,
    with_sum: bool, scale: float, softcap: float | None, precision: str | None, memory_budget: int | None,
    wide_dc: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A gradient that is not wanted has no elements."""
    from cce_torch.processes import shard_programs

    found = iter(shard_programs.gradients(
        e, c, bias, columns, weights, cotangents=cotangents, own=own, lse=lse, reference=of_target, saved=saved,
        wanted=shard_programs.Wanted(*wanted),
        **_options(impl, with_sum, scale, softcap, precision, memory_budget, wide_dc),
    ))  # fmt: skip
    de, dc, dbias = (next(found) if w else e.new_empty(0) for w in wanted)
    return de, dc, dbias


@shard_target.register_fake
def _(e, c, bias, columns, saving_for, *options):
    return e.new_empty(e.shape[0], dtype=torch.float32)


@shard_statistics.register_fake
def _(e, c, bias, columns, weights, of_target, saving_for, impl, with_sum, *options):
    return e.new_empty((2 + with_sum, e.shape[0]), dtype=torch.float32), e.new_empty(0)


@shard_gradients.register_fake
def _(cotangents, e, c, bias, columns, weights, own, lse, of_target, saved, wanted, *options):
    def like(x: Tensor, wanted: bool, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format) if wanted else e.new_empty(0)

    (of_e, of_c, of_bias), of_parameters = wanted, torch.float32 if options[-1] else e.dtype
    transposed = of_c and c.T.is_contiguous() and not c.is_contiguous()
    dc = like(c.T, True, of_parameters).T if transposed else like(c, of_c, of_parameters)
    return like(e, of_e, torch.float32), dc, like(bias, of_bias, of_parameters)

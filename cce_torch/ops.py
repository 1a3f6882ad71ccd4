"""Linear cross-entropy as two PyTorch operators, opaque to torch.compile, and the autograd rule that joins them.

`cce_torch::loss` returns the loss, the core's numbers, (2 or 3, N), whose first row is lse, and the exponentials that
it saves. `cce_torch::gradients` takes these and the cotangents of the loss and of the numbers. The losses, their
derivative and the kernels are cce_jax's: one JAX program for each operator (programs.py). The autograd rule is a
Function around the operators: a rule registered with an operator takes four times as long at each call.

A float32 c and bias beside an e of 16 bits are rounded to e's type before the operators: `wide_dc` says that their
gradients are float32.

Numbers that people change from step to step (label_smoothing, z_loss, scale) reach an operator as `scheduled`, a
tensor: as constants, torch.compile would compile a graph for each value. Calls that bypass the dispatcher pass a tuple.
"""

from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cce_torch import tensors

OPTIONS = (
    "SymInt row_length, int ignore_index, int shift, str reduction, bool smooths, bool has_z_loss, "
    "float? softcap, str? precision, str impl, int? memory_budget, bool wide_dc"
)
TENSORS = (
    "Tensor e, Tensor c, Tensor? bias, Tensor targets, Tensor? class_weight, Tensor? token_weight, Tensor? num_items, "
    "Tensor scheduled"
)
NAMES = "e", "c", "bias", "targets", "class_weight", "token_weight", "num_items"

_library = torch.library.Library("cce_torch", "FRAGMENT")
_tags = [torch.Tag.needs_fixed_stride_order, torch.Tag.cudagraph_unsafe]
_library.define(f"loss({TENSORS}, bool[] saving_for, {OPTIONS}) -> (Tensor, Tensor, Tensor)", tags=_tags)
_library.define(
    f"gradients(Tensor? of_loss, Tensor? of_numbers, {TENSORS}, Tensor numbers, Tensor? saved, bool of_e, bool of_c, "
    f"bool of_bias, bool of_token_weight, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=_tags,
)


def loss(e, c, bias, targets, class_weight, token_weight, num_items, *, row_length: int, ignore_index: int, shift: int,
         reduction: str, label_smoothing: float, z_loss: float, scale: float, softcap: float | None,
         precision: str | None, impl: str, memory_budget: int | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss, () or (N,), and the core's numbers, (2 or 3, N), float32; differentiable in e, c, bias, token_weight.

    e: (N, D); c: (V, D), not copied if it is a transposed (D, V); bias: (V,); c and bias of e's type, or float32 beside
    a 16-bit e; targets: (N,) int64, in rows of row_length tokens, which are shifted row by row; class_weight: (V,);
    token_weight: (N,); num_items: one element.
    """
    functions, compiling = torch._C._are_functorch_transforms_active(), torch.compiler.is_compiling()
    wanted = [x is not None and x.requires_grad for x in (e, c, bias)]
    gradients = torch.is_grad_enabled() and (any(wanted) or (token_weight is not None and token_weight.requires_grad))
    # Nothing is saved under torch.compile: with dynamic shapes it would have to know the saved array's size.
    saving_for = wanted if gradients and any(wanted) and not functions and not compiling else []
    kind = label_smoothing > 0, z_loss != 0
    options = ignore_index, shift, reduction, *kind, softcap, precision, impl, memory_budget, c.dtype != e.dtype
    scheduled: Any = label_smoothing, z_loss, scale
    if compiling:  # as factors, all values share one compilation
        scheduled = torch.stack([torch.ones((), dtype=torch.float64) * x for x in scheduled])
    arguments = e, c, bias, targets, class_weight, token_weight, num_items, scheduled, saving_for, row_length, options
    if functions:
        return _LossOfFunctions.apply(*arguments)
    if not compiling and _has_tangent(e, c, bias, token_weight):
        _refuse(None)
    if compiling or gradients:
        return _Loss.apply(*arguments)
    return _loss_operator(*_in_type_of_e(*arguments))[:2]  # a Function would take 8 µs more


def _has_tangent(*given: Tensor | None) -> bool:
    """Whether one of the tensors is a dual number of forward-mode differentiation."""
    if getattr(forward_ad, "_current_level", 0) < 0:  # nearly always
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in given)


def _kind(e: Tensor, c: Tensor, *others: Any) -> Any:
    """The call's programs.Kind, which the graph holds: the Kind knows the size to which the forward pass padded."""
    from cce_torch import programs

    return programs.kind_of_tensors(e, c, _call(*others[-1]))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        if arguments[-1][-1]:  # wide_dc
            arguments = _in_type_of_e(*arguments)
        value, numbers, saved = _loss_operator(*arguments)
        _save(ctx, arguments, numbers, saved)
        if saved is not None and saved.numel():
            ctx.kind = _kind(*arguments)
        return value, numbers

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor | None, of_numbers: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        of_e, of_c, of_bias, _, _, of_token_weight, *_ = ctx.needs_input_grad
        wanted = of_e, of_c, of_bias, of_token_weight
        if of_loss is None and of_numbers is None:
            return (None,) * 11
        # If a graph of the backward pass is asked for, the pass runs in a Function that refuses to be differentiated.
        # Not so under torch.compile: it allows no Function in the backward of another, and no second derivatives.
        guarded = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        run = _Gradients.apply if guarded else _gradients_operator
        e, c, *others, scheduled, numbers, saved = ctx.saved_tensors
        if ctx.kind is not None:
            c = ctx.kind.laid_out(c)
        scheduled = ctx.scheduled if scheduled is None else scheduled
        found = run(
            of_loss, of_numbers, e, c, *others, scheduled, numbers, saved, *wanted, ctx.row_length, *ctx.options
        )
        de, dc, dbias, dweight = (x if w else None for x, w in zip(found, wanted, strict=True))  # type: ignore
        return de, dc, dbias, None, None, dweight, None, None, None, None, None


def _in_type_of_e(e: Tensor, c: Tensor, bias: Tensor | None, *others: Any) -> tuple:
    return e, tensors.rounded(c, e), tensors.rounded(bias, e), *others


def _loss_operator(*arguments: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    *given, scheduled, saving_for, row_length, options = arguments
    if _is_plain(given):
        return _run_loss(*given, scheduled, saving_for, row_length, *options)
    return torch.ops.cce_torch.loss.default(*given, _tensor(scheduled), saving_for, row_length, *options)


def _gradients_operator(*arguments: Any) -> tuple[Tensor | None, ...]:
    given, scheduled, others = arguments[:9], arguments[9], arguments[10:]
    if _is_plain((*given, *others[:2])) and not any(_is_batched(x) for x in given[:2]):
        return _found_gradients(*arguments)
    return torch.ops.cce_torch.gradients.default(*given, _tensor(scheduled), *others)


def _tensor(scheduled: Any) -> Tensor:
    return scheduled if isinstance(scheduled, Tensor) else torch.tensor(scheduled, dtype=torch.float64)


def _is_batched(x: Tensor | None) -> bool:
    """Whether torch.autograd.grad(is_grads_batched=True) maps over x. The type of such an x is still Tensor."""
    return x is not None and torch._C._functorch.is_legacy_batchedtensor(x)  # type: ignore[attr-defined]


PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def _is_plain(given: Iterable[Tensor | None]) -> bool:
    """Whether nothing observes operators. They may then be called without the dispatcher, which takes 50 µs."""
    return (
        not torch.compiler.is_compiling()
        and PLAIN.issuperset(map(type, given))
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._autograd._profiler_enabled()  # type: ignore[attr-defined]
    )


def _save(ctx: Any, inputs: tuple, numbers: Tensor, saved: Tensor | None) -> None:
    *given, scheduled, _, ctx.row_length, ctx.options = inputs
    ctx.scheduled, ctx.kind = None if isinstance(scheduled, Tensor) else scheduled, None
    ctx.save_for_backward(*given, None if ctx.scheduled else scheduled, numbers, saved)
    ctx.set_materialize_grads(False)


def _refuse(ctx: Any, *tangents_or_cotangents: Any) -> Any:
    raise NotImplementedError(
        "linear_cross_entropy has first derivatives in reverse mode only with impl='cce', 'chunked', 'torch_compile' "
        "and 'auto'; impl='reference' has forward-mode and higher-order derivatives, and holds the full logits"
    )


class _LossOfFunctions(_Loss):
    """_Loss in the form that torch.func needs. _Loss takes less time a call; torch.compile refuses a jvp."""

    generate_vmap_rule = True
    jvp = staticmethod(_refuse)

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return _loss_operator(*_in_type_of_e(*arguments))[:2]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        _save(ctx, _in_type_of_e(*inputs), output[1], None)


class _Gradients(torch.autograd.Function):
    """cce_torch::gradients, with an error for its own derivative."""

    generate_vmap_rule = True
    backward = jvp = staticmethod(_refuse)

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor | None, ...]:
        return _gradients_operator(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        pass


@cache
def _programs() -> Any:
    """cce_torch.programs, which imports JAX."""
    from cce_torch import programs

    return programs


def _run_loss(
    e, c, bias, targets, class_weight, token_weight, num_items, scheduled, saving_for, row_length, *options
) -> tuple[Tensor, Tensor, Tensor | None]:
    if not e.shape[0]:
        return tuple(x.zero_() for x in _fake_loss(e, c, bias, targets, class_weight, token_weight, num_items,
                                                   scheduled, [], row_length, *options))  # type: ignore[return-value]  # fmt: skip
    programs = _programs()
    wanted = programs.Wanted(*saving_for) if saving_for else None
    return programs.loss(e, c, bias, targets, class_weight, token_weight, num_items, row_length=row_length,
                         call=_call(*options), numbers=_numbers(*scheduled), wanted=wanted)  # fmt: skip


def _run_loss_of_compiled(*arguments) -> tuple[Tensor, Tensor, Tensor]:
    """_run_loss for tensors that nothing has checked: torch.compile traced the public function, or it was not used."""
    *given, scheduled, saving_for, row_length = arguments[:10]
    tensors.check(dict(zip(NAMES, given, strict=True)))
    value, numbers, saved = _run_loss(*given, scheduled.tolist(), saving_for, row_length, *arguments[10:])
    return value, numbers, _fake_loss(*arguments)[2] if saved is None else saved


def _run_gradients(*arguments) -> tuple[Tensor, ...]:
    """The gradients of e, c, bias and token_weight, in their shapes. A gradient not wanted has no elements."""
    e = arguments[2]
    found = _found_gradients(*arguments[:9], arguments[9].tolist(), *arguments[10:])
    return tuple(e.new_empty(0) if x is None else x for x in found)


def _found_gradients(of_loss, of_numbers, e, c, bias, targets, class_weight, token_weight, num_items, scheduled,
                     numbers, saved, of_e, of_c, of_bias, of_token_weight, row_length, *options
                     ) -> tuple[Tensor | None, ...]:  # fmt: skip
    wanted = of_e, of_c, of_bias, of_token_weight
    given = e, c, bias, targets, class_weight, token_weight, num_items
    if not tensors.are_usual(*given):  # looked at again: FSDP may have freed one after the forward pass
        tensors.check(dict(zip(NAMES, given, strict=True)))
    if not e.shape[0] or not any(wanted):
        return tuple(x.zero_() for x in _like(e, c, bias, token_weight, *wanted, wide_dc=options[-1]))
    programs = _programs()
    found = iter(programs.gradients(
        of_loss, of_numbers, e, c, bias, targets, class_weight, token_weight, num_items, numbers, saved,
        wanted=programs.Wanted(of_e, of_c, of_bias), of_token_weight=of_token_weight, row_length=row_length,
        call=_call(*options), numbers=_numbers(*scheduled),
    ))  # fmt: skip
    return tuple(next(found) if w else None for w in wanted)


@lru_cache(maxsize=1024)
def _call(ignore_index, shift, reduction, smooths, has_z_loss, softcap, precision, impl, memory_budget, wide_dc):
    """The programs.Call of the options."""
    from cce_jax.losses import Loss
    from cce_torch.programs import Call

    return Call(ignore_index, shift, Loss(reduction, smooths, has_z_loss), softcap, precision, impl, memory_budget,
                wide_dc)  # fmt: skip


@lru_cache(maxsize=1024)
def _numbers(label_smoothing: float, z_loss: float, scale: float) -> Any:
    """The programs.Numbers; None stands for a number that changes nothing."""
    from cce_torch.programs import Numbers

    return Numbers(float(label_smoothing) or None, float(z_loss) or None, None if scale == 1 else float(scale))


def _fake_loss(e, c, bias, targets, class_weight, token_weight, num_items, scheduled, saving_for, row_length,
               *options) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shape = (e.shape[0],) if options[2] == "none" else ()
    rows = 3 if options[3] else 2
    saved = 0, 0
    if saving_for and not all(type(n) is int for n in (*e.shape, *c.shape)):  # the size is known only at run time
        saved = torch.library.get_ctx().new_dynamic_size(), torch.library.get_ctx().new_dynamic_size()
    elif saving_for:
        programs = _programs()
        saved = programs.saved_shape(e, c, bias, programs.Wanted(*saving_for), _call(*options))
    return (e.new_empty(shape, dtype=torch.float32), e.new_empty((rows, e.shape[0]), dtype=torch.float32),
            e.new_empty(saved))  # fmt: skip


def _fake_gradients(of_loss, of_numbers, e, c, bias, targets, class_weight, token_weight, num_items, scheduled,
                    numbers, saved, of_e, of_c, of_bias, of_token_weight, *options) -> tuple[Tensor, ...]:  # fmt: skip
    return _like(e, c, bias, token_weight, of_e, of_c, of_bias, of_token_weight, wide_dc=options[-1])


def _like(
    e, c, bias, token_weight, of_e: bool, of_c: bool, of_bias: bool, of_token_weight: bool, *, wide_dc: bool
) -> tuple[Tensor, ...]:
    """Uninitialised results of `gradients`: row-major, except that dc is transposed if c is."""
    of_parameters = torch.float32 if wide_dc else e.dtype

    def row_major(x: Tensor, wanted: bool, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format) if wanted else e.new_empty(0)

    transposed = of_c and c.T.is_contiguous() and not c.is_contiguous()
    dc = row_major(c.T, True, of_parameters).T if transposed else row_major(c, of_c, of_parameters)
    dweight = row_major(token_weight, True, token_weight.dtype) if of_token_weight else e.new_empty(0)
    return row_major(e, of_e, e.dtype), dc, row_major(bias, of_bias, of_parameters), dweight


for _name, _run, _fake in (
    ("loss", _run_loss_of_compiled, _fake_loss),
    ("gradients", _run_gradients, _fake_gradients),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _run, _key)
    torch.library.register_fake(f"cce_torch::{_name}", _fake, lib=_library)

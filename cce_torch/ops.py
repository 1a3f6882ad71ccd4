"""Linear cross-entropy as two PyTorch operators, opaque to torch.compile, and the autograd rule that joins them.

`cce_torch::loss` returns the loss, the core's numbers, (2 or 3, N), whose first row is lse, and what it saves: the
exponentials, or de for any cotangents where de alone is wanted. `cce_torch::gradients` takes these and the cotangents
of the loss and of the numbers. The losses, their derivative and the kernels are cce_jax's: one JAX program for each
operator (programs.py). The autograd rule is a Function around the operators: a rule registered with an operator takes
four times as long at each call.

Where the gradients are formed in the forward pass, `cce_torch::begin` and `cce_torch::finish` take their places
(in_forward.py). `begin` returns a list of tensors as what is saved. It is empty where the plan forms no
gradients, which torch.compile learns when it traces the operator. `apart`: the results of `finish` cannot take the
memory of that list, as under torch.compile, so the list counts against the memory budget.

A float32 c and bias beside an e of 16 bits are rounded to e's type before the operators: `wide_dc` says that their
gradients are float32.

Numbers that people change from step to step (label_smoothing, z_loss, scale) reach an operator as `scheduled`, a
tensor: as constants, torch.compile would compile a graph for each value. Calls that bypass the dispatcher pass a tuple.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cce_torch.on_jax import tensors

OPTIONS = (
    "SymInt row_length, int ignore_index, int shift, str reduction, bool smooths, bool has_z_loss, "
    "float? softcap, str? precision, str impl, int? memory_budget, bool wide_dc"
)
TENSORS = (
    "Tensor e, Tensor c, Tensor? bias, Tensor targets, Tensor? class_weight, Tensor? token_weight, Tensor? num_items, "
    "Tensor scheduled"
)
BEGUN = 8  # the most tensors that `begin` leaves
NAMES = "e", "c", "bias", "targets", "class_weight", "token_weight", "num_items"

_library = torch.library.Library("cce_torch", "FRAGMENT")
_tags = [torch.Tag.needs_fixed_stride_order, torch.Tag.cudagraph_unsafe]
_library.define(f"loss({TENSORS}, bool[] saving_for, {OPTIONS}) -> (Tensor, Tensor, Tensor)", tags=_tags)
_library.define(
    f"gradients(Tensor? of_loss, Tensor? of_numbers, {TENSORS}, Tensor numbers, Tensor? saved, bool of_e, bool of_c, "
    f"bool of_bias, bool of_token_weight, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=_tags,
)
_library.define(f"begin({TENSORS}, bool[] saving_for, bool apart, {OPTIONS}) -> (Tensor, Tensor, Tensor[])", tags=_tags)
_library.define(  # no list of tensors, which torch.autograd.grad(is_grads_batched=True) does not take
    f"finish(Tensor of_loss, {TENSORS}, Tensor numbers, {', '.join(f'Tensor? begun_{k}' for k in range(BEGUN))}, "
    f"bool[] begun_for, bool apart, bool of_e, bool of_c, bool of_bias, bool of_token_weight, {OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    tags=_tags,
)


def loss(e, c, bias, targets, class_weight, token_weight, num_items, *, row_length: int, ignore_index: int, shift: int,
         reduction: str, label_smoothing: float, z_loss: float, scale: float, softcap: float | None,
         precision: str | None, impl: str, memory_budget: int | None,
         lse_is_returned: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss, () or (N,), and the core's numbers, (2 or 3, N), float32; differentiable in e, c, bias, token_weight.

    e: (N, D); c: (V, D), not copied if it is a transposed (D, V); bias: (V,); c and bias of e's type, or float32 beside
    a 16-bit e; targets: (N,) int64, in rows of row_length tokens, which are shifted row by row; class_weight: (V,);
    token_weight: (N,); num_items: one element. lse_is_returned: whether the numbers may get a cotangent.
    """
    functions, compiling = torch._C._are_functorch_transforms_active(), torch.compiler.is_compiling()
    wanted = [x is not None and x.requires_grad for x in (e, c, bias)]
    gradients = torch.is_grad_enabled() and (any(wanted) or (token_weight is not None and token_weight.requires_grad))
    saving_for = wanted if gradients and any(wanted) and not functions else []
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
    if saving_for and reduction != "none" and _may_form_gradients(e, c, bias, wanted, options, lse_is_returned):
        return _LossWithGradients.apply(*arguments)
    if compiling:  # with dynamic shapes torch.compile would have to know the size of what is saved
        return _Loss.apply(*arguments[:-3], [], row_length, options)
    if gradients:
        return _Loss.apply(*arguments)
    return _loss_operator(*_in_type_of_e(*arguments))[:2]  # a Function would take 8 µs more


def _may_form_gradients(e: Tensor, c: Tensor, bias: Tensor | None, wanted: list[bool], options: tuple,
                        lse_is_returned: bool) -> bool:  # fmt: skip
    """Whether the forward pass of a "mean" or "sum" forms the gradients; under torch.compile `begin` asks the plan."""
    sizes = *e.shape, *c.shape
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import has_static_value  # slow to import

        # A cotangent of lse that nobody gave is an array of zeros there: its part would be computed each time.
        return not lse_is_returned and all(has_static_value(n) for n in sizes)
    known = e.shape[0] > 0 and all(type(n) is int for n in sizes)
    return known and _in_forward().begun_of_tensors(e, c, bias, wanted, call_of(*options)) is not None


def _has_tangent(*given: Tensor | None) -> bool:
    """Whether one of the tensors is a dual number of forward-mode differentiation."""
    if getattr(forward_ad, "_current_level", 0) < 0:  # nearly always
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in given)


def _kind(e: Tensor, c: Tensor, *others: Any) -> Any:
    """The call's programs.Kind, which the graph holds: the Kind knows the size to which the forward pass padded."""
    from cce_torch.on_jax import programs

    return programs.kind_of_tensors(e, c, call_of(*others[-1]))


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
        wanted = _wanted(ctx)
        if of_loss is None and of_numbers is None:
            return (None,) * 11
        return _of_inputs(_recomputed(ctx, of_loss, of_numbers, ctx.saved_tensors, wanted), wanted)


class _LossWithGradients(_Loss):
    """_Loss whose gradients the forward pass forms, up to one factor, where the plan says so.

    A cotangent of the numbers, as lse has, is no such factor: its part is computed from logits that are computed again.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        given = _in_type_of_e(*arguments) if arguments[-1][-1] else arguments  # wide_dc
        compiling = torch.compiler.is_compiling()
        if not compiling and drops_what_is_saved():  # the gradients are formed when the forward pass runs again
            value, numbers, _ = _loss_operator(*given[:-3], [], *given[-2:])
            begun = _in_forward().placeholders(*given[:3], given[-3], call_of(*given[-1]))
        else:
            value, numbers, begun = _begin_operator(*given)
        _save(ctx, arguments, numbers, *(begun or [None]))
        ctx.begun_for = arguments[-3]
        if not compiling:
            ctx.kind, ctx.in_place = _kind(*given), may_be_overwritten()
        return value, numbers

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor | None, of_numbers: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        wanted = _wanted(ctx)
        if torch.compiler.is_compiling():  # zeros, as lse is not returned
            of_numbers = None
        if of_loss is None and of_numbers is None:
            return (None,) * 11
        saved = ctx.saved_tensors
        given, begun = saved[:9], saved[9:]
        if begun[0] is None:
            return _of_inputs(_recomputed(ctx, of_loss, of_numbers, saved, wanted), wanted)
        if of_loss is None:
            return _of_inputs(_recomputed(ctx, None, of_numbers, (*given, None), wanted), wanted)
        # The memory of what the forward pass left is free for the results if no other backward pass can come.
        in_place = ctx.in_place and not torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
        found = _applied(
            _finish_operator, ctx.kind, in_place, of_loss, *_scheduled(ctx, given), *begun,
            *[None] * (BEGUN - len(begun)), ctx.begun_for, torch.compiler.is_compiling(), *wanted, ctx.row_length,
            *ctx.options,
        )  # fmt: skip
        if of_numbers is not None and any(wanted[:3]):
            others = _recomputed(ctx, None, of_numbers, (*given, None), (*wanted[:3], False))
            found = *map(_sum, found[:3], others[:3]), found[3]
        return _of_inputs(found, wanted)


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return None if x is None or y is None else x + y


def _wanted(ctx: Any) -> tuple[bool, bool, bool, bool]:
    """Of which of e, c, bias and token_weight the gradient is wanted."""
    of_e, of_c, of_bias, _, _, of_token_weight, *_ = ctx.needs_input_grad
    return of_e, of_c, of_bias, of_token_weight


def _of_inputs(found: Iterable[Tensor | None], wanted: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of all arguments of a Function."""
    de, dc, dbias, dweight = (x if w else None for x, w in zip(found, wanted, strict=True))
    return de, dc, dbias, None, None, dweight, None, None, None, None, None


def _recomputed(ctx: Any, of_loss, of_numbers, tensors: Sequence[Tensor | None], wanted: tuple[bool, ...]
                ) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients from logits that are computed again. tensors: as `_save` has saved them."""
    e, c, *others, scheduled, numbers, saved = _scheduled(ctx, tensors)
    if ctx.options[-1]:  # wide_dc
        e, c, *others = _in_type_of_e(e, c, *others)
    if ctx.kind is not None:
        c = ctx.kind.laid_out(c)
    return _applied(_gradients_operator, of_loss, of_numbers, e, c, *others, scheduled, numbers, saved, *wanted,
                ctx.row_length, *ctx.options)  # fmt: skip


def _scheduled(ctx: Any, tensors: Sequence[Tensor | None]) -> list:
    """The tensors that `_save` has saved, with what stood in place of `scheduled`."""
    found: list[Any] = list(tensors)
    found[7] = ctx.scheduled if found[7] is None else found[7]
    return found


def _applied(operator: Callable, *arguments: Any) -> tuple[Tensor | None, ...]:
    """operator(*arguments) in a backward pass.

    If a graph of the backward pass is asked for, it runs in a Function that refuses to be differentiated. Not so under
    torch.compile: it allows no Function in the backward of another, and no second derivatives.
    """
    guarded = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return _Gradients.apply(operator, *arguments) if guarded else operator(*arguments)


def drops_what_is_saved() -> bool:
    """Whether torch.utils.checkpoint(use_reentrant=False) runs for the first time what it will run again.

    Not if a mode may keep the results of operators, as selective checkpointing does.
    """
    hooks = _hooks()
    return _is_hook(hooks, "torch.utils.checkpoint", "_checkpoint_hook") and not torch._C._len_torch_dispatch_stack()


def may_be_overwritten() -> bool:
    """Whether nobody but the backward pass reads what is saved now. A user's hook may keep it."""
    hooks = _hooks()
    return (
        hooks is None
        or _is_hook(hooks, "torch.utils.checkpoint", "")
        or _is_hook(hooks, "torch.autograd.graph", "save_on_cpu")
    )


def _hooks() -> Any:
    """The hooks on saved tensors that are in force, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]


def _is_hook(hooks: Any, module: str, name: str) -> bool:
    pack = None if hooks is None else hooks[0]
    return getattr(pack, "__module__", "") == module and getattr(pack, "__qualname__", "").startswith(name)


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


def _begin_operator(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    *given, scheduled, saving_for, row_length, options = arguments
    if _is_plain(given):
        return _run_begin(*given, scheduled, saving_for, False, row_length, *options)
    apart = torch.compiler.is_compiling()
    return torch.ops.cce_torch.begin.default(*given, _tensor(scheduled), saving_for, apart, row_length, *options)


def _finish_operator(kind: Any, in_place: bool, *arguments: Any) -> tuple[Tensor | None, ...]:
    """cce_torch::finish. The operator itself never works in place, and finds the Kind of its tensors."""
    given, scheduled, others = arguments[:8], arguments[8], arguments[9:]
    if _is_plain((*given, *others[: 1 + BEGUN])) and not _is_batched(given[0]):
        return _finished(kind, in_place, *arguments)
    return torch.ops.cce_torch.finish.default(*given, _tensor(scheduled), *others)


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


def _save(ctx: Any, inputs: tuple, numbers: Tensor, *saved: Tensor | None) -> None:
    *given, scheduled, _, ctx.row_length, ctx.options = inputs
    ctx.scheduled, ctx.kind, ctx.in_place = None if isinstance(scheduled, Tensor) else scheduled, None, False
    ctx.save_for_backward(*given, None if ctx.scheduled else scheduled, numbers, *saved)
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
    """An operator of the backward pass, with an error for its own derivative."""

    generate_vmap_rule = True
    backward = jvp = staticmethod(_refuse)

    @staticmethod
    def forward(operator: Callable, *arguments: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return operator(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        pass


@cache
def _programs() -> Any:
    """cce_torch.programs, which imports JAX."""
    from cce_torch.on_jax import programs

    return programs


@cache
def _in_forward() -> Any:
    """cce_torch.in_forward, which imports JAX."""
    from cce_torch.on_jax import in_forward

    return in_forward


def _run_loss(
    e, c, bias, targets, class_weight, token_weight, num_items, scheduled, saving_for, row_length, *options
) -> tuple[Tensor, Tensor, Tensor | None]:
    if not e.shape[0]:
        return tuple(x.zero_() for x in _fake_loss(e, c, bias, targets, class_weight, token_weight, num_items,
                                                   scheduled, [], row_length, *options))  # type: ignore[return-value]  # fmt: skip
    programs = _programs()
    wanted = programs.Wanted(*saving_for) if saving_for else None
    return programs.loss(e, c, bias, targets, class_weight, token_weight, num_items, row_length=row_length,
                         call=call_of(*options), numbers=_numbers(*scheduled), wanted=wanted)  # fmt: skip


def _run_loss_of_compiled(*arguments) -> tuple[Tensor, Tensor, Tensor]:
    """_run_loss for tensors that nothing has checked: torch.compile traced the public function, or it was not used."""
    *given, scheduled, saving_for, row_length = arguments[:10]
    tensors.check(dict(zip(NAMES, given, strict=True)))
    value, numbers, saved = _run_loss(*given, scheduled.tolist(), saving_for, row_length, *arguments[10:])
    return value, numbers, _fake_loss(*arguments)[2] if saved is None else saved


def _run_begin(
    e, c, bias, targets, class_weight, token_weight, num_items, scheduled, saving_for, apart, row_length, *options
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """in_forward.begin, where its plan forms gradients."""
    return _in_forward().begin(
        e, c, bias, targets, class_weight, token_weight, num_items, row_length=row_length, numbers=_numbers(*scheduled),
        wanted=_programs().Wanted(*saving_for), call=_call_of_begun(e, c, saving_for, apart, options),
    )  # fmt: skip


def _run_begin_of_compiled(e, c, bias, targets, class_weight, token_weight, num_items, scheduled, saving_for, apart,
                           row_length, *options) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """_run_begin for tensors that nothing has checked."""
    given = e, c, bias, targets, class_weight, token_weight, num_items
    tensors.check(dict(zip(NAMES, given, strict=True)))
    call = _call_of_begun(e, c, saving_for, apart, options)
    if _in_forward().begun_of_tensors(e, c, bias, saving_for, call) is None:
        return *_run_loss(*given, scheduled.tolist(), [], row_length, *options)[:2], []
    return _run_begin(*given, scheduled.tolist(), saving_for, apart, row_length, *options)


def _fake_begin(e, c, bias, targets, class_weight, token_weight, num_items, scheduled, saving_for, apart, row_length,
                *options) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    begun = _in_forward().traced(e, c, bias, saving_for, _call_of_begun(e, c, saving_for, apart, options))
    value, numbers, _ = _fake_loss(e, c, bias, targets, class_weight, token_weight, num_items, scheduled, [],
                                   row_length, *options)  # fmt: skip
    return value, numbers, [torch.empty_like(x, memory_format=torch.contiguous_format) for x in begun]


def _call_of_begun(e: Tensor, c: Tensor, wanted: Sequence[bool], apart: bool, options: tuple) -> Any:
    """The programs.Call of `begin` and `finish`."""
    call = call_of(*options)
    return _in_forward().less_results(call, e, c, wanted) if apart else call


def _finished(kind, in_place, of_loss, e, c, bias, targets, class_weight, token_weight, num_items, scheduled,
              numbers, *others) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients from what `begin` left."""
    begun, (begun_for, apart, *wanted, row_length) = others[:BEGUN], others[BEGUN : BEGUN + 7]
    options = others[BEGUN + 7 :]
    given = e, c, bias, targets, class_weight, token_weight, num_items
    if not tensors.are_usual(*given):  # looked at again: FSDP may have freed one after the forward pass
        tensors.check(dict(zip(NAMES, given, strict=True)))
    if not any(wanted):
        return (None,) * 4
    programs, in_forward = _programs(), _in_forward()
    if kind is None:
        kind = programs.kind_of_tensors(e, c, _call_of_begun(e, c, begun_for, apart, options))
    begun = [x for x in begun if x is not None]
    found = iter(in_forward.finish(
        kind, of_loss, bias, targets, class_weight, token_weight, num_items, numbers, begun,
        begun_for=programs.Wanted(*begun_for), wanted=programs.Wanted(*wanted[:3]), of_token_weight=wanted[3],
        row_length=row_length, numbers=_numbers(*scheduled), in_place=in_place,
    ))  # fmt: skip
    return tuple(next(found) if w else None for w in wanted)


def _run_finish(*arguments) -> tuple[Tensor, ...]:
    """The gradients of e, c, bias and token_weight, in their shapes. A gradient not wanted has no elements."""
    found = _finished(None, False, *arguments[:8], arguments[8].tolist(), *arguments[9:])
    return tuple(arguments[1].new_empty(0) if x is None else x for x in found)


def _fake_finish(of_loss, e, c, bias, targets, class_weight, token_weight, num_items, scheduled, numbers, *others
                 ) -> tuple[Tensor, ...]:  # fmt: skip
    return _like(e, c, bias, token_weight, *others[BEGUN + 2 : BEGUN + 6], wide_dc=others[-1])


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
        call=call_of(*options), numbers=_numbers(*scheduled),
    ))  # fmt: skip
    return tuple(next(found) if w else None for w in wanted)


@lru_cache(maxsize=1024)
def call_of(ignore_index, shift, reduction, smooths, has_z_loss, softcap, precision, impl, memory_budget, wide_dc):
    """The programs.Call of the options."""
    from cce_jax.losses import Loss
    from cce_torch.on_jax.programs import Call

    return Call(ignore_index, shift, Loss(reduction, smooths, has_z_loss), softcap, precision, impl, memory_budget,
                wide_dc)  # fmt: skip


@lru_cache(maxsize=1024)
def _numbers(label_smoothing: float, z_loss: float, scale: float) -> Any:
    """The programs.Numbers; None stands for a number that changes nothing."""
    from cce_torch.on_jax.programs import Numbers

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
        saved = programs.saved_shape(e, c, bias, programs.Wanted(*saving_for), call_of(*options))
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
    ("begin", _run_begin_of_compiled, _fake_begin),
    ("finish", _run_finish, _fake_finish),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _run, _key)
    torch.library.register_fake(f"cce_torch::{_name}", _fake, lib=_library)

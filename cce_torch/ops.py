"""Linear cross-entropy as two PyTorch operators, opaque to torch.compile, and the autograd rule that joins them.

`cce_torch::loss` returns the loss, the statistics (call.py), and a list of tensors for the backward pass: the leaves of
cce_kernels.residuals.Residuals. `cce_torch::gradients` takes these and the cotangents of the loss and the statistics.
If selections are asked for (call.py), the list holds the selections, and nothing is left for the backward pass.
The losses, their derivative and the kernels are cce_jax's: one JAX program for each operator (on_jax/programs.py). The
autograd rule is a Function around the operators: a rule registered with an operator takes four times as long at each
call.

saving_for: the gradients of e, c and bias for which the forward pass leaves tensors; [] for none. compiled: whether
torch.compile traced the call (programs.compiled_kind says what that changes).

A float32 c and bias beside an e of 16 bits are rounded to e's type before the operators: Call.wide_dc says that their
gradients are float32.

Numbers that people change from step to step (label_smoothing, z_loss, scale) reach an operator as `scheduled`, a
tensor: as constants, torch.compile would compile a graph for each value. Calls that bypass the dispatcher pass a tuple.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cce_torch.call import FIELDS, TENSORS, Call, Given, decoded, encoded, selects
from cce_torch.on_jax import tensors
from cce_torch.operators import define, one_by_one
from cce_torch.reverse_mode import first_order, refuse

GIVEN = (
    "Tensor e, Tensor c, Tensor? bias, Tensor targets, Tensor? class_weight, Tensor? token_weight, Tensor? num_items, "
    "Tensor? inverse_temperature, Tensor? ids, Tensor scheduled, SymInt row_length"
)
LEFT = 9  # the most tensors that `loss` leaves: in float16, with units of de and of Left, and without blocks


def loss(given: Given, call: Call, lse_is_returned: bool, called: str) -> tuple[Tensor, ...]:
    """The loss, () or (N,), and the statistics, float32, differentiable in e, c, bias and token_weight; the selections.

    c and bias of e's type, or float32 beside a 16-bit e. lse_is_returned: whether the statistics may get a cotangent.
    called: the public function.
    """
    functions, compiling = torch._C._are_functorch_transforms_active(), torch.compiler.is_compiling()
    wanted = [x is not None and x.requires_grad for x in given[:3]]
    token_weight = given.token_weight
    gradients = torch.is_grad_enabled() and (any(wanted) or (token_weight is not None and token_weight.requires_grad))
    saving_for = wanted if gradients and any(wanted) and not functions else []
    if compiling:  # as factors, all values share one compilation
        factors = [torch.ones((), dtype=torch.float64, device="cpu") * x for x in given.scheduled]
        given = Given(*given[:TENSORS], torch.stack(factors), given.row_length)
    if functions:
        return _LossOfFunctions.apply(*given, saving_for, call, called)
    if not compiling and _has_tangent(given.e, given.c, given.bias, token_weight):
        refuse(SimpleNamespace(called=called))
    if saving_for and not _may_save(given, call, lse_is_returned):
        saving_for = []
    if gradients or compiling:
        return _Loss.apply(*given, saving_for, call, called)  # type: ignore[no-any-return]
    value, statistics, selected = _loss_operator(_in_type_of_e(given), saving_for, call)
    return value, statistics, *selected  # a Function would take 8 µs more


def _may_save(given: Given, call: Call, lse_is_returned: bool) -> bool:
    """Whether the forward pass may leave tensors: not if their sizes are known only at run time, nor if it selects."""
    if selects(call):
        return False
    sizes = *given.e.shape, *given.c.shape
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import has_static_value  # slow to import

        # A cotangent of lse that nobody gave is an array of zeros there: its part would be computed each time.
        return call.reduction != "none" and not lse_is_returned and all(has_static_value(n) for n in sizes)
    return all(type(n) is int for n in sizes)


def _has_tangent(*given: Tensor | None) -> bool:
    """Whether one of the tensors is a dual number of forward-mode differentiation."""
    if getattr(forward_ad, "_current_level", 0) < 0:  # nearly always
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in given)


class _Loss(torch.autograd.Function):
    """Where the forward pass forms the gradients, they wait for one factor.

    A cotangent of the statistics, as lse has, is no such factor. Where it arrives, one backward pass for both computes
    the logits again: the sum of two gradients that are rounded to 16 bits would be less exact.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        given, (saving_for, call, ctx.called) = Given(*arguments[:-3]), arguments[-3:]
        compiling, kind = torch.compiler.is_compiling(), None
        handover = None
        rounded = _in_type_of_e(given)
        if saving_for and not compiling and given.e.shape[0]:  # the graph holds the Kind, which chose the padded size
            kind = _programs().kind_of_tensors(rounded.e, rounded.c, call)
            if call.reduction != "none":
                handover = _programs().handover(kind, rounded, saving_for)
        formed = handover is not None and handover.formed
        if formed and drops_what_is_saved():  # the gradients are formed when the forward pass runs again
            value, statistics, _ = _loss_operator(rounded, [], call, kind)
            left = handover.placeholders(given.e)  # type: ignore[union-attr]
        else:
            value, statistics, left = _loss_operator(rounded, saving_for, call, kind)
        left, selected = ([], left) if selects(call) else (left, [])
        ctx.mark_non_differentiable(*selected)
        ctx.formed, ctx.kind = len(left) > 0 if compiling else formed, kind if left else None
        ctx.in_place = formed and may_be_overwritten()
        _save(ctx, given, given if ctx.formed else rounded, (saving_for, call), statistics, left)
        return value, statistics, *selected

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        of_loss, of_statistics, *_ = cotangents  # the selections get none
        of_e, of_c, of_bias, _, _, of_token_weight, *_ = ctx.needs_input_grad
        wanted = [of_e, of_c, of_bias, of_token_weight]
        if torch.compiler.is_compiling() and ctx.saving_for:  # zeros, as lse is not returned
            of_statistics = None
        if of_loss is None and of_statistics is None:
            return (None,) * (FIELDS + 3)
        saved: Any = ctx.saved_tensors
        arrays, statistics, left = saved[: TENSORS + 1], saved[TENSORS + 1], saved[TENSORS + 2 :]
        left, inputs = left[: len(left) - ctx.inputs], left[len(left) - ctx.inputs :]
        rows = ctx.call.of_backward.rows  # without a mean that gets no cotangent
        statistics, of_statistics = statistics[:rows], None if of_statistics is None else of_statistics[:rows]
        scheduled = ctx.scheduled if arrays[-1] is None else arrays[-1]
        given = Given(*arrays[:-1], scheduled, ctx.row_length)  # type: ignore[call-arg]
        if ctx.formed and of_statistics is not None:
            left = ()
        found = _gradients(ctx, (of_loss, of_statistics), given, statistics, left, wanted, inputs)
        de, dc, dbias, dweight = (x if w else None for x, w in zip(found, wanted, strict=True))
        return de, dc, dbias, None, None, dweight, *[None] * (FIELDS - 3)


def _save(ctx: Any, inputs: Given, given: Given, options: Sequence, statistics: Tensor, left: Sequence[Tensor]) -> None:
    """given: inputs, or c and bias rounded to e's type. Then c and bias are saved too: first_order needs them."""
    inputs_saved = () if given.c is inputs.c else (inputs.c, inputs.bias)
    ctx.inputs = len(inputs_saved)
    ctx.saving_for, call = options
    ctx.call = call._replace(top_k=0, mean_logit=False) if selects(call) else call
    ctx.row_length, ctx.scheduled = given.row_length, None if isinstance(given.scheduled, Tensor) else given.scheduled
    ctx.save_for_backward(
        *given[:TENSORS], None if ctx.scheduled else given.scheduled, statistics, *left, *inputs_saved
    )
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, of: tuple, given: Given, statistics: Tensor, left: Sequence[Tensor], wanted: list[bool], inputs: tuple
) -> tuple[Tensor | None, ...]:
    """The gradients of e, c, bias and token_weight. of: the cotangents of the loss and the statistics.

    inputs: those of the call that are not in given, as their rounded copies are.
    """
    kind, saving_for, call = ctx.kind, ctx.saving_for if left else [], ctx.call
    formed = ctx.formed and len(left) > 0
    if not formed:
        given = _in_type_of_e(given)
    # The memory of what the forward pass left is free for the results if no other backward pass can come.
    in_place = formed and ctx.in_place and not torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
    scheduled, row_length, compiling = given.scheduled, given.row_length, torch.compiler.is_compiling()

    def run(of_loss: Any, of_statistics: Any, statistics: Tensor, *arrays: Any) -> tuple:
        left, given = arrays[TENSORS:], Given(*arrays[:TENSORS], scheduled, row_length)  # type: ignore[call-arg]
        observed = of_loss, of_statistics, statistics, *arrays
        if not compiling and _is_plain(observed) and not is_batched(of_loss) and not is_batched(of_statistics):
            backward = _Backward(given, (of_loss, of_statistics), statistics, left, saving_for, wanted, call)
            return _run_gradients(backward, kind, in_place)
        return torch.ops.cce_torch.gradients.default(
            of_loss,
            of_statistics,
            *_for_operator(given),
            statistics,
            *left,
            *[None] * (LEFT - len(left)),
            saving_for,
            wanted,
            compiling,
            *encoded(call),
        )

    arguments: Any = *of, statistics, *given[:TENSORS], *left
    return first_order(ctx.called, run, arguments, inputs)


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


def _in_type_of_e(given: Given) -> Given:
    if given.c.dtype == given.e.dtype:
        return given
    return given._replace(c=tensors.rounded(given.c, given.e), bias=tensors.rounded(given.bias, given.e))


def _loss_operator(given: Given, saving_for: list[bool], call: Call, kind: Any = None) -> tuple[Tensor, Tensor, list]:
    """cce_torch::loss. kind: the Kind of given, if it is known."""
    if _is_plain(given[:TENSORS]):
        return _run_loss(given, saving_for, call, kind)
    compiling = torch.compiler.is_compiling()
    return torch.ops.cce_torch.loss.default(*_for_operator(given), saving_for, compiling, *encoded(call))


def _for_operator(given: Given) -> Given:
    if isinstance(given.scheduled, Tensor):
        return given
    return given._replace(scheduled=torch.tensor(given.scheduled, dtype=torch.float64, device="cpu"))


def is_batched(x: Tensor | None) -> bool:
    """Whether torch.autograd.grad(is_grads_batched=True) maps over x. The type of such an x is still Tensor."""
    return x is not None and torch._C._functorch.is_legacy_batchedtensor(x)  # type: ignore[attr-defined]


def _is_plain(given: Iterable[Tensor | None]) -> bool:
    """Whether nothing observes operators. They may then be called without the dispatcher, which takes 50 µs."""
    return (
        not torch.compiler.is_compiling()
        and tensors.ORDINARY.issuperset(map(type, given))
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._autograd._profiler_enabled()  # type: ignore[attr-defined]
    )


def is_usual(given: Iterable[Tensor | None]) -> bool:
    """Whether the tensors are plain, of known sizes, and no transform or mode of PyTorch observes them."""
    given = tuple(given)
    return (
        tensors.ORDINARY.issuperset(map(type, given))
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not _has_tangent(*given)
        and all(type(n) is int for x in given if x is not None for n in x.shape)
    )


class _LossOfFunctions(_Loss):
    """_Loss in the form that torch.func needs. _Loss takes less time a call; torch.compile refuses a jvp."""

    generate_vmap_rule = True
    jvp = staticmethod(refuse)

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        value, statistics, selected = _loss_operator(_in_type_of_e(Given(*arguments[:-3])), *arguments[-3:-1])
        return value, statistics, *selected

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[2:])
        ctx.formed, ctx.kind, ctx.in_place = False, None, False
        given, (*options, ctx.called) = Given(*inputs[:-3]), inputs[-3:]
        _save(ctx, given, _in_type_of_e(given), options, output[1], [])


@cache
def _programs() -> Any:
    """cce_torch.on_jax.programs, which imports JAX."""
    from cce_torch.on_jax import programs

    return programs


def _run_loss(given: Given, saving_for: Sequence[bool], call: Call, kind: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    if not given.e.shape[0]:
        value, statistics, selected = _new_results(given, call)
        return value.zero_(), statistics, selected
    programs = _programs()
    if kind is None:
        kind = programs.kind_of_tensors(given.e, given.c, call)
    return programs.loss(kind, given, saving_for)


def _new_results(given: Given, call: Call) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Uninitialised: the loss, the statistics and the selections."""
    tokens, new = given.e.shape[0], given.e.new_empty
    value = new((tokens,) if call.reduction == "none" else (), dtype=torch.float32)
    selected = [new(shape, dtype=dtype) for shape, dtype in call.selected(tokens)]
    return value, new((call.rows, tokens), dtype=torch.float32), selected


def _loss_arguments(arguments: tuple) -> tuple[Given, Any, Sequence[bool], Call]:
    """given, its Kind, the gradients for which something is left, and the Call. Kind: None if nothing is left."""
    given, (saving_for, compiled) = Given(*arguments[:FIELDS]), arguments[FIELDS : FIELDS + 2]
    call = decoded(*arguments[FIELDS + 2 :])
    kind = None
    if saving_for and given.e.shape[0]:
        kind, saving_for = _kind(given, call, saving_for, compiled)
    return given, kind, saving_for if kind is not None else [], call


def _kind(given: Given, call: Call, saving_for: Sequence[bool], compiled: bool) -> tuple[Any, Sequence[bool]]:
    programs = _programs()
    if compiled:
        return programs.compiled_kind(given, call, saving_for)
    return programs.kind_of_tensors(given.e, given.c, call), saving_for


def _called_loss(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """_run_loss for tensors that nothing has checked: torch.compile traced the public function, or it was not used."""
    tensors.check(Given(*arguments[:FIELDS]).named())
    given, kind, saving_for, call = _loss_arguments(arguments)
    return _run_loss(given._replace(scheduled=given.scheduled.tolist()), saving_for, call, kind)


_traced: set[Any] = set()  # the Kinds of graphs of torch.compile, which need the sizes that a Kind has chosen


def _fake_loss(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    given, kind, saving_for, call = _loss_arguments(arguments)
    left: list[Tensor] = []
    if kind is not None and saving_for:
        left = _programs().handover(kind, given, saving_for).placeholders(given.e)
        _traced.add(kind)
    value, statistics, selected = _new_results(given, call)
    return value, statistics, selected + [torch.empty_like(x, memory_format=torch.contiguous_format) for x in left]


class _Backward(NamedTuple):
    """The arguments of cce_torch::gradients."""

    given: Given
    of: tuple[Tensor | None, Tensor | None]  # the cotangents of the loss and of the statistics
    statistics: Tensor
    left: Sequence[Tensor]  # by the forward pass
    saving_for: Sequence[bool]
    wanted: Sequence[bool]  # the gradients of e, c, bias and token_weight
    call: Call


def _gradients_arguments(arguments: tuple) -> tuple[_Backward, bool]:
    """The arguments by name, and whether torch.compile traced the call."""
    of, given, others = arguments[:2], Given(*arguments[2 : 2 + FIELDS]), arguments[2 + FIELDS :]
    (statistics, *left), others = others[: 1 + LEFT], others[1 + LEFT :]
    (saving_for, wanted, compiled), call = others[:3], decoded(*others[3:])
    left = [x for x in left if x is not None]
    return _Backward(given, of, statistics, left, saving_for, wanted, call), compiled


def _called_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    """The gradients of e, c, bias and token_weight, in their shapes. A gradient not wanted has no elements."""
    backward, compiled = _gradients_arguments(arguments)
    given, kind = backward.given._replace(scheduled=backward.given.scheduled.tolist()), None
    if backward.left:
        kind, _ = _kind(given, backward.call, backward.saving_for, compiled)
    found = _run_gradients(backward._replace(given=given), kind, False)
    return tuple(given.e.new_empty(0) if x is None else x for x in found)


def _run_gradients(backward: _Backward, kind: Any, in_place: bool) -> tuple[Tensor | None, ...]:
    """kind: of the forward pass, if it left something. The operator itself never works in place."""
    given, of, statistics, left, saving_for, wanted, call = backward
    if not tensors.are_usual(*given[:TENSORS]):  # checked a second time: FSDP may have freed one after the forward pass
        tensors.check(given.named())
    if not given.e.shape[0] or not any(wanted):
        return tuple(x.zero_() for x in _new_gradients(given, wanted, call))
    programs = _programs()
    if kind is None:
        kind = programs.kind_of_tensors(given.e, given.c, call)
    return programs.gradients(kind, given, programs.Saved(statistics, left, saving_for), of, wanted, in_place)


def _fake_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    backward, _ = _gradients_arguments(arguments)
    return _new_gradients(backward.given, backward.wanted, backward.call)


def _new_gradients(given: Given, wanted: Sequence[bool], call: Call) -> tuple[Tensor, ...]:
    """Uninitialised results of `gradients`. One that is not wanted has no elements."""
    weight = given.token_weight
    dweight = given.e.new_empty(0) if not wanted[3] or weight is None else _row_major(weight, weight.dtype)
    return *new_gradients(given[:3], wanted, given.e.dtype, call), dweight


def new_gradients(of: Sequence[Any], wanted: Sequence[bool], type_of_de: torch.dtype, call: Call) -> list[Tensor]:
    """Uninitialised de, dc and dbias of e, c and bias: row-major, except that dc is transposed if c is."""
    (e, c, bias), type_of_dc = of, torch.float32 if call.wide_dc else of[0].dtype
    transposed = c.T.is_contiguous() and not c.is_contiguous()
    new = (
        lambda: _row_major(e, type_of_de),
        lambda: _row_major(c.T, type_of_dc).T if transposed else _row_major(c, type_of_dc),
        lambda: _row_major(bias, type_of_dc),
    )
    return [make() if w else e.new_empty(0) for make, w in zip(new, wanted, strict=False)]


def _row_major(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


define("loss", f"{GIVEN}, bool[] saving_for, bool compiled", "(Tensor, Tensor, Tensor[])", _called_loss, _fake_loss)
define(  # no list of tensors, which torch.autograd.grad(is_grads_batched=True) does not take
    "gradients",
    f"Tensor? of_loss, Tensor? of_statistics, {GIVEN}, Tensor statistics, "
    f"{', '.join(f'Tensor? left_{k}' for k in range(LEFT))}, bool[] saving_for, bool[] wanted, bool compiled",
    "(Tensor, Tensor, Tensor, Tensor)",
    _called_gradients,
    _fake_gradients,
)
# PyTorch's own rule takes no operator that returns a list.
torch.library.register_vmap("cce_torch::loss", one_by_one(torch.ops.cce_torch.loss.default))

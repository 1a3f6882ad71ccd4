"""Linear cross-entropy as PyTorch operators, opaque to torch.compile, and the loss as a task of autograd.py's rules.

`cce_torch::loss` returns the loss, the statistics (call.py), the selections that are asked for, and what is left for
the backward pass. `cce_torch::gradients` takes the latter and the cotangents of the loss and the statistics.
The losses, their derivative and the kernels are cce_jax's: one JAX program for each operator (on_jax/programs.py). A
rule registered with an operator takes four times as long at each call as a Function around it.

saving_for: the gradients of e, c and bias for which the forward pass leaves tensors; [] for none. left: the Handover of
a call, where it is known.

A float32 c and bias beside an e of 16 bits are rounded to e's type before the operators: Call.wide_dc says that their
gradients are float32.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_torch import autograd
from cce_torch.autograd import Formed, Recomputed, Tensors
from cce_torch.call import (
    Call,
    Given,
    OfGiven,
    OfResults,
    Residuals,
    Results,
    Saved,
    Scheduled,
    Selections,
    are_left,
    selects,
    without_selections,
)
from cce_torch.on_jax import tensors
from cce_torch.operators import as_factors, is_plain, of_jax


def loss(
    given: Given, scheduled: Scheduled, call: Call, lse_is_returned: bool, called: str
) -> tuple[Tensor, Any, Selections]:
    """The loss, () or (N,), and the statistics, float32, differentiable in e, c, bias and token_weight; the selections.

    c and bias of e's type, or float32 beside a 16-bit e. lse_is_returned: whether the statistics may get a cotangent;
    where they may not, they may be None. called: the public function.
    """
    functions, compiling = torch._C._are_functorch_transforms_active(), torch.compiler.is_compiling()
    wanted = [x is not None and x.requires_grad for x in given[:3]]
    saving_for = wanted if any(wanted) and torch.is_grad_enabled() and not functions else []
    if saving_for and not _may_save(given, call, lse_is_returned):
        saving_for = []
    rounded, left, forms = _rounded(given), None, compiling and bool(saving_for)
    if forms:
        call = call._replace(compiled=True)
    elif saving_for and given.e.shape[0]:
        left = programs().handover(given if rounded is None else given._replace(c=rounded[0]), call, saving_for)
        forms = left.formed
    results = 5 if compiling or lse_is_returned or selects(call) else 1
    task = _Loss(call, called, saving_for, None if compiling else scheduled, left, forms, results)
    of_call: Any = *given, as_factors(scheduled) if compiling else None, *(rounded or (None, None))
    value, *others = autograd.applied(Formed if forms else Recomputed, task, *of_call)
    return value, others[0] if others else None, Selections(*others[1:])


def _may_save(given: Given, call: Call, lse_is_returned: bool) -> bool:
    """Whether the forward pass may leave tensors: not if their sizes are known only at run time, nor if it selects."""
    if selects(call):
        return False
    sizes = *given.e.shape, *given.c.shape
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import has_static_value  # slow to import

        # A cotangent of lse that nobody gave is an array of zeros there: its part would be computed each time.
        return call.reduction != "none" and not lse_is_returned and all(has_static_value(n) for n in sizes)
    return {int}.issuperset(map(type, sizes))


def _rounded(given: Given) -> tuple[Tensor, Tensor | None] | None:
    """c and bias in e's type, without a derivative; None: they have it."""
    if given.c.dtype == given.e.dtype:
        return None
    bias = None if given.bias is None else given.bias.detach()
    return tensors.rounded(given.c.detach(), given.e), tensors.rounded(bias, given.e)


class _Loss(NamedTuple):
    """The task. Its tensors are those of Given, the scheduled numbers, and c and bias as `_rounded` gives them.

    A cotangent of the statistics, as lse has, is no factor of what the forward pass formed. Where it arrives, one
    backward pass for both computes the logits again: the sum of two gradients that are rounded to 16 bits would be less
    exact.
    """

    call: Call
    called: str
    saving_for: Sequence[bool]
    scheduled: Any  # None: they are among the tensors
    left: Any  # what the forward pass leaves, as programs.Handover; None: it is not known yet
    forms: bool  # whether the forward pass leaves gradients
    results: int

    differentiable = 2

    def of_backward(self) -> "_Loss":
        return self._replace(call=without_selections(self.call)) if selects(self.call) else self

    def given(self, arrays: Tensors) -> tuple[Given, Any]:
        """The tensors and the scheduled numbers."""
        *own, scheduled, c, bias = arrays
        given: Given = Given(*own)
        return given if c is None else given._replace(c=c, bias=bias), self.scheduled or scheduled

    def forward(self, *arrays: Any) -> tuple[Tensor | None, ...]:
        (given, scheduled), saving_for = self.given(arrays), self.saving_for
        # a checkpoint forms the gradients when it runs the second time
        drops = self.forms and not torch.compiler.is_compiling() and autograd.drops_what_is_saved()
        found = loss_of(
            given, scheduled, None, [] if drops else saving_for, self.call, left=None if drops else self.left
        )
        left = self.left.placeholders(given.e) if drops else found.residuals
        return found.loss, found.statistics, *found.selections, *left

    def saves(self, given: Tensors, found: Tensors) -> Tensors:
        """`finish` does not read the rounded copies."""
        left = found[5:] if self.saving_for else ()
        if given[-2] is not None and self.forms and are_left(left):
            given = *given[:-2], None, None
        return *given, found[1], *left

    def finish(self, factor: Tensor, saved: Tensors, wanted: Sequence[bool], in_place: bool) -> Tensors:
        if self.left is not None and self.left.at_once and not wanted[5] and is_plain([factor]):
            count = len(wanted)
            return self.left.times(Residuals(*saved[count + 1 :]), factor, wanted, saved[3].numel())
        return self._gradients(OfResults(factor, None), saved, wanted, in_place)

    def backward(self, cotangents: Tensors, saved: Tensors, wanted: Sequence[bool]) -> Tensors:
        return self._gradients(OfResults(*cotangents), saved[: len(wanted) + 1] if self.forms else saved, wanted, False)

    def _gradients(self, of: OfResults, saved: Tensors, wanted: Sequence[bool], in_place: bool) -> Tensors:
        arrays, (statistics, *left) = saved[: len(wanted)], saved[len(wanted) :]
        (given, scheduled), residuals = self.given(arrays), Residuals(*left)
        any_left = are_left(residuals)
        if not any_left and given.c.dtype != given.e.dtype:
            given = given._replace(c=tensors.rounded(given.c, given.e), bias=tensors.rounded(given.bias, given.e))
        if self.call.mean_is_detached:
            rows = self.call.of_backward.rows  # without the mean
            of_statistics = None if of.of_statistics is None else of.of_statistics[:rows]
            statistics, of = statistics[:rows], of._replace(of_statistics=of_statistics)
        held = Saved(statistics, residuals, self.saving_for if any_left else [])
        as_in_forward = self.left is not None and self.left.is_nothing != any_left
        left, asked = self.left if as_in_forward else None, [wanted[0], wanted[1], wanted[2], wanted[5]]
        found = gradients_of(of, given, scheduled, held, asked, self.call, left=left, in_place=in_place)
        return found.e, found.c, found.bias, None, None, found.token_weight


@cache
def programs() -> Any:
    """cce_torch.on_jax.programs, which imports JAX."""
    from cce_torch.on_jax import programs

    return programs


def _handover(given: Given, call: Call, saving_for: Sequence[bool]) -> Any:
    """What the forward program of a call leaves."""
    if call.compiled and saving_for:
        return programs().compiled(given, call, saving_for)
    return programs().handover(given, call._replace(compiled=False) if call.compiled else call, saving_for)


_traced: set[Any] = set()  # the Kinds of graphs of torch.compile, which need the sizes that a Kind has chosen


def _fake_loss(
    given: Given, scheduled: Scheduled, reference: Tensor | None, saving_for: Sequence[bool], call: Call
) -> Results:
    found = _new_results(given, call)
    if not saving_for or not given.e.shape[0]:
        return found
    handover = _handover(given, call, saving_for)
    _traced.add(handover.kind)
    left = handover.placeholders(given.e)
    left = (None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in left)
    return found._replace(residuals=Residuals(*left))


@of_jax("loss", _fake_loss)
def loss_of(
    given: Given,
    scheduled: Scheduled,
    reference: Tensor | None,
    saving_for: Sequence[bool],
    call: Call,
    *,
    left: Any = None,
) -> Results:
    """The results of a call. reference: as for programs.loss."""
    if not given.e.shape[0]:
        found = _new_results(given, call)
        return found._replace(loss=found.loss.zero_())
    return programs().loss(left or _handover(given, call, saving_for), given, scheduled, reference)


def _new_results(given: Given, call: Call) -> Results:
    """Uninitialised. Nothing is left."""
    tokens, new = given.e.shape[0], given.e.new_empty
    selected = Selections(*(None if x is None else new(x[0], dtype=x[1]) for x in call.selected(tokens)))
    statistics = new((call.rows, tokens), dtype=torch.float32)
    return Results(new(call.losses(tokens), dtype=torch.float32), statistics, selected)


def _fake_gradients(
    of: OfResults, given: Given, scheduled: Scheduled, saved: Saved, wanted: Sequence[bool], call: Call
) -> OfGiven:
    return _new_gradients(given, wanted, call)


@of_jax("gradients", _fake_gradients)
def gradients_of(
    of: OfResults,
    given: Given,
    scheduled: Scheduled,
    saved: Saved,
    wanted: Sequence[bool],
    call: Call,
    *,
    left: Any = None,
    in_place: bool = False,
) -> OfGiven:
    """The gradients of e, c, bias and token_weight. left: of the forward pass, if it left something.

    in_place: as for programs.gradients.
    """
    if not tensors.are_usual(*given):  # checked a second time: FSDP may have freed one after the forward pass
        tensors.check(given._asdict())
    if not given.e.shape[0] or not any(wanted):
        return OfGiven(*(None if x is None else x.zero_() for x in _new_gradients(given, wanted, call)))
    left = left or _handover(given, call, saved.left_for)
    return programs().gradients(left, given, scheduled, saved, of, wanted, in_place)


def _new_gradients(given: Given, wanted: Sequence[bool], call: Call) -> OfGiven:
    """Uninitialised. Row-major, except that dc is transposed if c is."""
    (e, c, bias, *_), weight = given, given.token_weight
    of_e, of_c = (torch.float32 if wide else e.dtype for wide in (call.of_shard, call.wide_dc))
    transposed = c.T.is_contiguous() and not c.is_contiguous()

    def new(x: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)

    make = (
        lambda: new(e, of_e),
        lambda: new(c.T, of_c).T if transposed else new(c, of_c),
        lambda: new(bias, of_c),
        lambda: None if weight is None else new(weight, weight.dtype),
    )
    return OfGiven(*(each() if w else None for each, w in zip(make, wanted, strict=True)))


def _fake_target(given: Given, scheduled: Scheduled, saving_for: Sequence[bool], call: Call) -> Tensor:
    return given.e.new_empty(given.e.shape[0], dtype=torch.float32)


@of_jax("target", _fake_target)
def target_of(given: Given, scheduled: Scheduled, saving_for: Sequence[bool], call: Call) -> Tensor:
    """The logit of each token's target, (N,) float32: 0 where c is a shard of the vocabulary that does not hold it."""
    return programs().target(given, scheduled, saving_for, call)

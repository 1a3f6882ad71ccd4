"""Linear cross-entropy as PyTorch operators, opaque to torch.compile, and the loss as a task of autograd.py's rules.

`cce_torch::loss` returns the loss, the statistics (call.py), and a list of tensors for the backward pass: the leaves of
cce_kernels.plan.residuals.Residuals. `cce_torch::gradients` takes these and the cotangents of the loss and the
statistics. If selections are asked for (call.py), the list holds the selections, and nothing is left for the backward
pass.
The losses, their derivative and the kernels are cce_jax's: one JAX program for each operator (on_jax/programs.py). A
rule registered with an operator takes four times as long at each call as a Function around it. What nothing observes
runs the programs without the dispatcher.

saving_for: the gradients of e, c and bias for which the forward pass leaves tensors; [] for none. compiled: whether
torch.compile traced the call (programs.compiled_kind says what that changes).

A float32 c and bias beside an e of 16 bits are rounded to e's type before the operators: Call.wide_dc says that their
gradients are float32.

Numbers that people change from step to step (label_smoothing, z_loss, scale) reach an operator as `scheduled`, a
tensor: as constants, torch.compile would compile a graph for each value. Calls that bypass the dispatcher pass a tuple.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_torch import autograd
from cce_torch.autograd import Formed, Gradients, Recomputed, Tensors
from cce_torch.call import TENSORS, Call, Given, Left, Saved, selects
from cce_torch.on_jax import tensors
from cce_torch.operators import of_jax


def loss(given: Given, call: Call, lse_is_returned: bool, called: str) -> tuple[Tensor, ...]:
    """The loss, () or (N,), and the statistics, float32, differentiable in e, c, bias and token_weight; the selections.

    c and bias of e's type, or float32 beside a 16-bit e. lse_is_returned: whether the statistics may get a cotangent.
    called: the public function.
    """
    functions, compiling = torch._C._are_functorch_transforms_active(), torch.compiler.is_compiling()
    wanted = [x is not None and x.requires_grad for x in given[:3]]
    saving_for = wanted if any(wanted) and torch.is_grad_enabled() and not functions else []
    if compiling:  # as factors, all values share one compilation
        factors = [torch.ones((), dtype=torch.float64, device="cpu") * x for x in given.scheduled]
        given = Given(*given[:TENSORS], torch.stack(factors), given.row_length)
    if saving_for and not _may_save(given, call, lse_is_returned):
        saving_for = []
    rounded, kind, forms = _rounded(given), None, compiling and bool(saving_for)
    if saving_for and not compiling and given.e.shape[0]:  # the graph holds the Kind, which chose the padded size
        kind = programs().kind_of_tensors(given.e, given.c if rounded is None else rounded[0], call)
        forms = call.reduction != "none" and programs().handover(kind, given, saving_for).formed
    scheduled = None if compiling else given.scheduled
    task = _Loss(call, called, saving_for, scheduled, given.row_length, kind, forms)
    of_call: Any = *given[:TENSORS], given.scheduled if compiling else None, *(rounded or (None, None))
    found = autograd.applied(Formed if forms else Recomputed, task, *of_call)
    return found if selects(call) else found[:2]


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


def _rounded(given: Given) -> tuple[Tensor, Tensor | None] | None:
    """c and bias in e's type, without a derivative; None: they have it."""
    if given.c.dtype == given.e.dtype:
        return None
    bias = None if given.bias is None else given.bias.detach()
    return tensors.rounded(given.c.detach(), given.e), tensors.rounded(bias, given.e)


class _Loss(NamedTuple):
    """The task. Its tensors are those of Given, `scheduled` the last one, and c and bias as `_rounded` gives them.

    A cotangent of the statistics, as lse has, is no factor of what the forward pass formed. Where it arrives, one
    backward pass for both computes the logits again: the sum of two gradients that are rounded to 16 bits would be less
    exact.
    """

    call: Call
    called: str
    saving_for: Sequence[bool]
    scheduled: Any  # None: it is among the tensors
    row_length: int
    kind: Any  # of what the forward pass leaves; None: it is not known yet
    forms: bool  # whether the forward pass leaves gradients

    differentiable, batches = 2, True

    def of_backward(self) -> "_Loss":
        return self._replace(call=self.call._replace(top_k=0, mean_logit=False)) if selects(self.call) else self

    def given(self, arrays: Tensors) -> Given:
        """arrays: the tensors."""
        *own, scheduled, c, bias = arrays
        numbers = scheduled if self.scheduled is None else self.scheduled
        given = Given(*own, numbers, self.row_length)  # type: ignore[call-arg]
        return given if c is None else given._replace(c=c, bias=bias)

    def forward(self, *arrays: Any) -> tuple[Tensor, ...]:
        given, call = self.given(arrays), self.call
        if self.forms and not torch.compiler.is_compiling() and autograd.drops_what_is_saved():
            value, statistics, _ = loss_of(given, None, [], call, self.kind)  # the second forward pass forms gradients
            return value, statistics, *programs().handover(self.kind, given, self.saving_for).placeholders(given.e)
        value, statistics, left = loss_of(given, None, self.saving_for, call, self.kind)
        return value, statistics, *left

    def saves(self, given: Tensors, found: Tensors) -> Tensors:
        """`finish` does not read the rounded copies."""
        rounded = (None, None) if len(found) > 2 and self.forms else given[-2:]
        return *given[:-2], *rounded, found[1], *(() if selects(self.call) else found[2:])

    def finish(self, factor: Tensor, saved: Tensors, wanted: Sequence[bool], in_place: bool) -> Gradients:
        return self._gradients((factor, None), saved, wanted, in_place)

    def backward(self, cotangents: Tensors, saved: Tensors, wanted: Sequence[bool]) -> Gradients:
        return self._gradients(cotangents, saved[: len(wanted) + 1] if self.forms else saved, wanted, False)

    def _gradients(self, of: Tensors, saved: Tensors, wanted: Sequence[bool], in_place: bool) -> Gradients:
        """of: the cotangents of the loss and the statistics."""
        arrays, (statistics, *left) = saved[: len(wanted)], saved[len(wanted) :]
        given, rows = self.given(arrays), self.call.of_backward.rows  # without a mean that gets no cotangent
        if not left and given.c.dtype != given.e.dtype:
            given = given._replace(c=tensors.rounded(given.c, given.e), bias=tensors.rounded(given.bias, given.e))
        of_loss, of_statistics = of
        cotangents = of_loss, None if of_statistics is None else of_statistics[:rows]
        kept = Saved(statistics[:rows], Left(*left), self.saving_for if left else [])
        kind, asked = self.kind if left else None, [wanted[0], wanted[1], wanted[2], wanted[5]]
        de, dc, dbias, of_weight = gradients_of(given, cotangents, kept, asked, self.call, kind, in_place)
        return de, dc, dbias, None, None, of_weight


def loss_of(
    given: Given, reference: Tensor | None, saving_for: Sequence[bool], call: Call, kind: Any = None
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """`cce_torch::loss`. kind: the Kind of given, if it is known."""
    if autograd.is_plain((*given[:TENSORS], reference)):
        return _run_loss(given, reference, saving_for, call, kind)
    return loss_operator(_for_operator(given), reference, list(saving_for), torch.compiler.is_compiling(), call)


def gradients_of(
    given: Given,
    of: Tensors,
    saved: Saved,
    wanted: Sequence[bool],
    call: Call,
    kind: Any = None,
    in_place: bool = False,
) -> tuple[Tensor | None, ...]:
    """`cce_torch::gradients`, which never works in place. of: the cotangents of the loss and the statistics.

    kind: of the forward pass, if it left something.
    """
    plain = autograd.is_plain((*of, saved.statistics, *given[:TENSORS], *saved.left))
    if plain and not any(map(autograd.is_batched, of)):
        return _run_gradients(given, of, saved, wanted, call, kind, in_place)
    return gradients_operator(*of, _for_operator(given), saved, list(wanted), torch.compiler.is_compiling(), call)


def _for_operator(given: Given) -> Given:
    if isinstance(given.scheduled, Tensor):
        return given
    return given._replace(scheduled=torch.tensor(given.scheduled, dtype=torch.float64, device="cpu"))


@cache
def programs() -> Any:
    """cce_torch.on_jax.programs, which imports JAX."""
    from cce_torch.on_jax import programs

    return programs


def _run_loss(
    given: Given, reference: Tensor | None, saving_for: Sequence[bool], call: Call, kind: Any
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    if not given.e.shape[0]:
        value, statistics, selected = _new_results(given, call)
        return value.zero_(), statistics, selected
    if kind is None:
        kind = programs().kind_of_tensors(given.e, given.c, call)
    return programs().loss(kind, given, reference, saving_for)


def _new_results(given: Given, call: Call) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Uninitialised: the loss, the statistics and the selections."""
    tokens, new = given.e.shape[0], given.e.new_empty
    value = new(call.losses(tokens), dtype=torch.float32)
    selected = [new(shape, dtype=dtype) for shape, dtype in call.selected(tokens)]
    return value, new((call.rows, tokens), dtype=torch.float32), selected


def _kind(given: Given, call: Call, saving_for: Sequence[bool], compiled: bool) -> tuple[Any, Sequence[bool]]:
    """The Kind of a call, and the gradients for which something is left. None: nothing is left."""
    if not saving_for or not given.e.shape[0]:
        return None, []
    if compiled:
        return programs().compiled_kind(given, call, saving_for)
    return programs().kind_of_tensors(given.e, given.c, call), saving_for


_traced: set[Any] = set()  # the Kinds of graphs of torch.compile, which need the sizes that a Kind has chosen


def _fake_loss(
    given: Given, reference: Tensor | None, saving_for: Sequence[bool], compiled: bool, call: Call
) -> tuple[Tensor, Tensor, list[Tensor]]:
    kind, saving_for = _kind(given, call, saving_for, compiled)
    left: list[Tensor] = []
    if saving_for:
        left = programs().handover(kind, given, saving_for).placeholders(given.e)
        _traced.add(kind)
    value, statistics, selected = _new_results(given, call)
    return value, statistics, selected + [torch.empty_like(x, memory_format=torch.contiguous_format) for x in left]


@of_jax("loss", "(Tensor, Tensor, Tensor[])", _fake_loss)
def loss_operator(
    given: Given, reference: Tensor | None, saving_for: Sequence[bool], compiled: bool, call: Call
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """_run_loss for tensors that nothing has checked: torch.compile traced the public function, or it was not used."""
    tensors.check(given.named())
    kind, saving_for = _kind(given, call, saving_for, compiled)
    return _run_loss(_for_program(given), reference, saving_for, call, kind)


def _for_program(given: Given) -> Given:
    return given._replace(scheduled=given.scheduled.tolist())  # type: ignore[union-attr]


def _run_gradients(
    given: Given, of: Tensors, saved: Saved, wanted: Sequence[bool], call: Call, kind: Any, in_place: bool
) -> tuple[Tensor | None, ...]:
    if not tensors.are_usual(*given[:TENSORS]):  # checked a second time: FSDP may have freed one after the forward pass
        tensors.check(given.named())
    if not given.e.shape[0] or not any(wanted):
        return tuple(x.zero_() for x in _new_gradients(given, wanted, call))
    if kind is None:
        kind = programs().kind_of_tensors(given.e, given.c, call)
    return programs().gradients(kind, given, saved, of, wanted, in_place)


def _new_gradients(given: Given, wanted: Sequence[bool], call: Call) -> tuple[Tensor, ...]:
    """Uninitialised de, dc, dbias, and that of token_weight. A gradient that is not wanted has no elements.

    Row-major, except that dc is transposed if c is.
    """
    e, c, bias, weight = given.e, given.c, given.bias, given.token_weight
    of_e, of_c = (torch.float32 if wide else e.dtype for wide in (call.of_shard, call.wide_dc))
    transposed = c.T.is_contiguous() and not c.is_contiguous()

    def new(x: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)

    make = (
        lambda: new(e, of_e),
        lambda: new(c.T, of_c).T if transposed else new(c, of_c),
        lambda: new(bias, of_c),
        lambda: e.new_empty(0) if weight is None else new(weight, weight.dtype),
    )
    return tuple(each() if w else e.new_empty(0) for each, w in zip(make, wanted, strict=True))


def _fake_gradients(
    of_loss: Tensor | None,
    of_statistics: Tensor | None,
    given: Given,
    saved: Saved,
    wanted: Sequence[bool],
    compiled: bool,
    call: Call,
) -> tuple[Tensor, ...]:
    return _new_gradients(given, wanted, call)


@of_jax("gradients", "(Tensor, Tensor, Tensor, Tensor)", _fake_gradients)
def gradients_operator(
    of_loss: Tensor | None,
    of_statistics: Tensor | None,
    given: Given,
    saved: Saved,
    wanted: Sequence[bool],
    compiled: bool,
    call: Call,
) -> tuple[Tensor, ...]:
    """The gradients of e, c, bias and token_weight, in their shapes. A gradient not wanted has no elements."""
    kind, _ = _kind(given, call, saved.left_for, compiled) if any(x is not None for x in saved.left) else (None, [])
    found = _run_gradients(_for_program(given), (of_loss, of_statistics), saved, wanted, call, kind, False)
    return tuple(given.e.new_empty(0) if x is None else x for x in found)


def target_of(given: Given, saving_for: Sequence[bool], call: Call) -> Tensor:
    """The logit of each token's target, (N,) float32: 0 where c is a shard of the vocabulary that does not hold it."""
    if autograd.is_plain(given[:TENSORS]):
        return programs().target(given, saving_for, call)
    return target_operator(_for_operator(given), list(saving_for), call)


def _fake_target(given: Given, saving_for: Sequence[bool], call: Call) -> Tensor:
    return given.e.new_empty(given.e.shape[0], dtype=torch.float32)


@of_jax("target", "Tensor", _fake_target)
def target_operator(given: Given, saving_for: Sequence[bool], call: Call) -> Tensor:
    return programs().target(_for_program(given), saving_for, call)

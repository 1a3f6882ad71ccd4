"""The two derivative rules of all functions that never hold the logits, and the error that other derivatives get.

    Formed        the forward pass left the gradients up to one factor, the cotangent of the first result. The backward
                  pass multiplies by it. If a cotangent of another result arrives, it does what Recomputed does.
    Recomputed    the cotangents of the results arrive. The backward pass computes the logits again, or reads
                  exponentials that the forward pass left.

What distinguishes a loss, a loss of the user's own, numbers of tokens and a divergence, in one process or in several,
is a `Task`. A graph holds what a rule saves and `Task.of_backward`, which has no tensor.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from cce_torch.on_jax import tensors

_add_batch_dim, _remove_batch_dim = torch._add_batch_dim, torch._remove_batch_dim  # type: ignore[attr-defined]
unwrap_if_dead = torch._C._functorch.unwrap_if_dead  # type: ignore[attr-defined]  # of tensors that torch.func has left

MOST_LEVELS = 64  # of maps inside maps, in PyTorch
Tensors = Sequence[Any]  # tensors, and None where a call has none
Gradients = Sequence[
    Tensor | None
]  # of the first tensors of a task, in their order; those not wanted are not looked at


class Task(Protocol):
    """What a rule runs, a NamedTuple. `found` is what `forward` returned, `saved` what `saves` returned."""

    called: str  # the public function's name
    results: int  # how many the caller gets of what `forward` returns; None among them counts
    differentiable: int  # how many of what `forward` returns have a derivative, from the first on

    def of_backward(self) -> Self:
        """The task that the graph holds."""
        ...

    def forward(self, *given: Any) -> tuple[Any, ...]:
        """The results, those with a derivative first. Then what is left for the backward pass, in new tensors.

        All of them are in memory of their own.
        """
        ...

    def saves(self, given: Tensors, found: Tensors) -> Tensors:
        """What the backward pass reads, and all of `given` that gets a gradient: a second derivative is an error."""
        ...

    def finish(self, factor: Tensor, saved: Tensors, wanted: Sequence[bool], in_place: bool) -> Gradients:
        """The gradients by `Formed`. in_place: they may take the memory of what was left."""
        ...

    def backward(self, cotangents: Tensors, saved: Tensors, wanted: Sequence[bool]) -> Gradients:
        """The gradients by `Recomputed`. wanted: one for each of `given`. A cotangent of None is 0."""
        ...


def applied(rule: "type[_Rule]", task: Any, *given: Tensor | None) -> tuple[Any, ...]:
    """The results of task.forward(*given), differentiable by the rule. Forward mode is an error. task: a Task."""
    compiling = torch.compiler.is_compiling()
    if not compiling and torch._C._are_functorch_transforms_active():
        return _with_jvp(rule, "torch._dynamo" in sys.modules).apply(task, *given)[: task.results]
    if not compiling and has_tangent(*given):
        refuse(task)
    if not torch.is_grad_enabled() or not any([x is not None and x.requires_grad for x in given]):
        return task.forward(*given)[: task.results]  # torch.compile would give `rule.forward` a ctx
    if compiling:
        return rule.apply(task, *given)
    # Function.apply looks up the signature of `forward` first, which takes 40 µs.
    given = tuple([None if x is None else unwrap_if_dead(x) for x in given])
    return super(Function, rule).apply(task, *given)  # type: ignore[misc]


class _Rule(Function):
    """`_with_jvp` makes of it what torch.func takes, which torch.compile does not take."""

    @staticmethod
    def forward(ctx: Any, task: Task, *given: Any) -> tuple[Any, ...]:
        found = task.forward(*given)
        _keep(ctx, (task, *given), found)
        return found[: task.results]  # autograd takes 3 µs for each tensor more


def _keep(ctx: Any, inputs: tuple[Any, ...], found: tuple[Any, ...]) -> None:
    """Has ctx keep what the backward pass reads. found: what task.forward returned."""
    task, *given = inputs
    ctx.task, ctx.called = task.of_backward(), task.called
    ctx.in_place = not torch.compiler.is_compiling() and may_be_overwritten()
    ctx.mark_non_differentiable(*[x for x in found[task.differentiable : task.results] if x is not None])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*task.saves(given, found))


class Recomputed(_Rule):
    """The cotangents of the results arrive."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        wanted, task, count = ctx.needs_input_grad[1:], ctx.task, ctx.task.differentiable
        cotangents = (*cotangents, *[None] * count)[:count]
        if all([x is None for x in cotangents]):
            return (None,) * (1 + len(wanted))

        def run(*arrays: Any) -> tuple[Tensor | None, ...]:
            return _of_all(task.backward(arrays[:count], arrays[count:], wanted), wanted)

        return None, *first_order(task.called, run, *cotangents, *ctx.saved_tensors)


class Formed(_Rule):
    """The cotangent of the first result is the factor."""

    @staticmethod
    def backward(ctx: Any, factor: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        wanted, task, compiling = ctx.needs_input_grad[1:], ctx.task, torch.compiler.is_compiling()
        # torch.compile makes zeros of cotangents that nobody gave. There no other result is returned.
        if factor is None or (not compiling and any(x is not None for x in others)):
            return Recomputed.backward(ctx, factor, *others)
        batched = not compiling and is_batched(factor)
        in_place = ctx.in_place and not batched and not keeps_graph()

        def run(factor: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
            return _of_all(task.finish(factor, saved, wanted, in_place), wanted)

        return None, *first_order(task.called, _for_each(run) if batched else run, factor, *ctx.saved_tensors)


def _for_each(run: Callable) -> Callable:
    """run(factor, *saved), one after another for each factor that torch.autograd.grad(is_grads_batched=True) gives."""

    def of_each(factor: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
        # With its examples along a first axis. It stays batched where another level is asked for.
        every = ((level, _remove_batch_dim(factor, level, 1, 0)) for level in range(1, MOST_LEVELS + 1))
        level, factors = next(x for x in every if not is_batched(x[1]))
        found = zip(*[run(x, *saved) for x in factors], strict=True)
        return tuple(None if x[0] is None else _add_batch_dim(torch.stack(x), 0, level) for x in found)

    return of_each


def _of_all(found: Gradients, wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The wanted gradients, one for each tensor of a task."""
    return (*[x if w else None for x, w in zip(found, wanted, strict=False)], *[None] * (len(wanted) - len(found)))


@cache
def _with_jvp(rule: "type[_Rule]", may_be_traced: bool) -> Any:
    """The rule for torch.func: what is left for the backward pass is a result too, without a derivative.

    may_be_traced: whether torch.compile might trace the backward pass, which it cannot inside a transform.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], found: tuple[Any, ...]) -> None:
        _keep(ctx, inputs, found)
        ctx.mark_non_differentiable(*[x for x in found[inputs[0].differentiable :] if x is not None])

    of = {"forward": lambda task, *given: task.forward(*given), "setup_context": keep, "jvp": refuse}
    of |= {"backward": torch.compiler.disable(rule.backward)} if may_be_traced else {}
    return type(rule.__name__, (rule,), {"generate_vmap_rule": True, **{k: staticmethod(f) for k, f in of.items()}})


def refuse(ctx: Any, *_: Any) -> Any:
    """The rule for a derivative that there is not. ctx.called: the public function's name."""
    raise NotImplementedError(
        f"{ctx.called} has first derivatives in reverse mode only with impl='cce', 'chunked', 'torch_compile' and "
        "'auto', and with vocab_parallel; in one process impl='reference' has forward-mode and higher-order "
        "derivatives, and holds the full logits"
    )


def first_order(called: str, function: Callable, *arguments: Any) -> Any:
    """function(*arguments), for the backward pass of a rule.

    If a graph of the backward pass is asked for, a derivative of the result is an error, by whichever argument it is
    taken. called: the public function, which the error names. Under torch.compile, which allows no Function in the
    backward pass of another, there are no second derivatives.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function(*arguments)
    return _Guarded.apply(called, function, *arguments)


class _Guarded(Function):
    """function(*arguments), with an error for its own derivative."""

    generate_vmap_rule = True
    backward = jvp = staticmethod(refuse)

    @staticmethod
    def forward(called: str, function: Callable, *arguments: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return function(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.called = inputs[0]


def keeps_graph() -> bool:
    """Whether another backward pass may read what is saved."""
    return torch.is_grad_enabled() or torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]


def drops_what_is_saved() -> bool:
    """Whether torch.utils.checkpoint(use_reentrant=False) runs for the first time what it will run again.

    Not if a mode may keep the results of operators, as selective checkpointing does.
    """
    return _is_hook(hooks(), "torch.utils.checkpoint", "_checkpoint_hook") and not torch._C._len_torch_dispatch_stack()


def may_be_overwritten() -> bool:
    """Whether nobody but the backward pass reads what is saved now. A user's hook may keep it."""
    found = hooks()
    return (
        found is None
        or _is_hook(found, "torch.utils.checkpoint", "")
        or _is_hook(found, "torch.autograd.graph", "save_on_cpu")
    )


def hooks() -> Any:
    """The hooks on saved tensors that are in force, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]


def _is_hook(found: Any, module: str, name: str) -> bool:
    pack = None if found is None else found[0]
    return getattr(pack, "__module__", "") == module and getattr(pack, "__qualname__", "").startswith(name)


def untraced(function: Callable, *given: Any, **options: Any) -> Any:
    """function(*given, **options), of which torch.compile traces nothing: a break in the graph of the caller.

    Where nothing has imported torch._dynamo, which takes seconds, nothing is traced.
    """
    if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
        from cce_torch.outside_of_graphs import run

        return run(function, *given, **options)
    return function(*given, **options)


def is_forward_mode() -> bool:
    """Whether some tensors may be dual numbers of forward-mode differentiation: nearly never."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def has_tangent(*given: Tensor | None) -> bool:
    """Whether one of the tensors is a dual number of forward-mode differentiation."""
    if not is_forward_mode():
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in given)


def is_batched(x: Tensor | None) -> bool:
    """Whether torch.autograd.grad(is_grads_batched=True) maps over x. The type of such an x is still Tensor."""
    return x is not None and torch._C._functorch.is_legacy_batchedtensor(x)  # type: ignore[attr-defined]


def is_usual(given: Iterable[Tensor | None]) -> bool:
    """Whether the tensors are plain, of known sizes, and no transform or mode of PyTorch observes them."""
    given = tuple(given)
    return (
        tensors.ORDINARY.issuperset(map(type, given))
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not has_tangent(*given)
        and all(type(n) is int for x in given if x is not None for n in x.shape)
    )

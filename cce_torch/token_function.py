"""The user's function of linear_token_loss: what it gets, and the checks of what it gets, returns and closes over."""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_kernels import contract
from cce_torch import arguments
from cce_torch.arguments import Prepared
from cce_torch.call import entropy_of, log_p, lse_of

NAME = "linear_token_loss"
INSTEAD = f"which {NAME} does not form: pass its detach(), or compute the loss from linear_log_probs"


class TokenNumbers(NamedTuple):
    """The numbers of each token, 0 where it is ignored; None: not asked for."""

    log_probs: Tensor  # log p of the target; NaN where the target is out of range
    lse: Tensor  # the log-sum-exp of the logits
    entropy: Tensor | None = None  # -sum(p * log p), in nats


def token_numbers(statistics: Tensor, columns: Tensor, vocabulary: int) -> TokenNumbers:
    """statistics (call.py): (3, n), or (4, n) with the mean of the logits. columns: (n,), as in losses.py."""
    return kept(_numbers(statistics, _poison(columns, vocabulary, statistics.dtype)), columns)


def kept(numbers: TokenNumbers, columns: Tensor) -> TokenNumbers:
    """The numbers, 0 without a gradient where a token is ignored."""
    live = columns >= 0
    return TokenNumbers(*(None if x is None else torch.where(live, x, 0) for x in numbers))  # type: ignore


def _numbers(statistics: Tensor, poison: Tensor) -> TokenNumbers:
    rows = statistics.unbind()  # once: each operation costs as much as a kernel for few tokens
    log_mass, _, target, *mean = rows
    entropy = entropy_of(log_mass, mean[0]) if mean else None
    return TokenNumbers(poison * log_p(target, rows), lse_of(rows), entropy)


def _poison(columns: Tensor, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """NaN where a target is out of range, else 1: a factor, so that gradients become NaN too."""
    return columns.new_ones((), dtype=dtype).where(columns != vocabulary, torch.nan)


@dataclass(eq=False)
class TokenFunction:
    """fn(numbers, *arguments) for some of the tokens."""

    fn: Callable[..., Tensor]
    arguments: Sequence[Tensor]  # (N,)
    columns: Tensor  # (N,), as in losses.py
    vocabulary: int
    weight: Tensor | None = None  # of the tokens
    called: str = NAME

    @classmethod
    def of(cls, fn: Callable[..., Tensor], given: Sequence[Any], x: Prepared, columns: Tensor) -> "TokenFunction":
        contract.function(fn)
        return cls(fn, [_of_tokens(f"argument {k} of fn", y, x) for k, y in enumerate(given)], columns, x.vocabulary)

    def in_order(self, order: Tensor) -> "TokenFunction":
        """That of the tokens in this order."""
        arguments = [x[order] for x in self.arguments]
        return TokenFunction(self.fn, arguments, self.columns[order], self.vocabulary, None, self.called)

    @cached_property
    def poison(self) -> Tensor:
        return _poison(self.columns, self.vocabulary, torch.float32)

    def totals(self, statistics: Tensor, span: slice) -> Tensor:
        """The losses of these tokens, (n,), arbitrary for ignored ones, whose statistics are 0."""
        return self(_numbers(statistics, self.poison[span]), span)

    def __call__(self, numbers: TokenNumbers, span: slice = slice(None)) -> Tensor:
        """As `totals`, for numbers of these tokens, (n,)."""
        if not len(numbers.lse):
            return numbers.lse
        nodes = set() if torch.compiler.is_compiling() else {x.grad_fn for x in numbers if x is not None}
        given = [x[span] for x in self.arguments]
        self._try(numbers, given)
        versions = _versions(given)
        found = self._losses(numbers, given)
        for k, (before, after) in enumerate(zip(versions, _versions(given), strict=True)):
            if before != after:
                raise ValueError(
                    f"fn must be pure, and it changed argument {k} in place: for example, write x.clamp(...) in place "
                    "of x.clamp_(...)"
                )
        if found.requires_grad and not torch.compiler.is_compiling():
            _refuse_other_leaves(found, nodes)
        return found.to(numbers.lse.dtype)

    def _try(self, numbers: TokenNumbers, given: Sequence[Tensor]) -> None:
        """Call fn, once in its life, for 2 and for 3 tokens that equal the first: no array of (N,) fits both."""
        compiling = torch.compiler.is_compiling()  # nothing of a trial is left in a compiled program
        if not compiling and _is_known(self.fn):
            return
        with torch.no_grad(), contextlib.nullcontext() if compiling else torch.compiler.set_stance("force_eager"):
            for tokens in contract.TRIED:
                repeated = [None if x is None else x[:1].repeat(tokens) for x in (*numbers, *given)]
                self._losses(TokenNumbers(*repeated[:3]), repeated[3:])  # type: ignore[arg-type]
        if not compiling:
            with contextlib.suppress(TypeError):
                KNOWN.add(self.fn)

    def _losses(self, numbers: TokenNumbers, given: Sequence[Tensor]) -> Tensor:
        """What fn returns, or an error unless it is a loss for each of these tokens."""
        with contract.trial(len(numbers.lse), numbers.entropy is not None):
            found = self.fn(numbers, *given)
        if not isinstance(found, Tensor):
            raise contract.no_losses("a torch.Tensor", found, numbers.entropy is not None)
        contract.losses_of_tokens(arguments.type_name(found), tuple(found.shape), len(numbers.lse))
        return found


KNOWN = weakref.WeakSet()  # functions that were tried; one that has no hash or no weak references is tried each time


def _is_known(fn: Any) -> bool:
    try:
        return fn in KNOWN
    except TypeError:
        return False


def _versions(given: Sequence[Tensor]) -> list[int]:
    """How often each tensor was changed in place. None is counted in inference mode and under torch.compile."""
    return [] if torch.compiler.is_compiling() else [0 if x.is_inference() else x._version for x in given]


def _refuse_other_leaves(found: Tensor, nodes: set[Any]) -> None:
    """Raise if the graph of found reaches a tensor that requires a gradient by a way around these nodes."""
    waiting, seen = [found.grad_fn], {None, *nodes}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            raise TypeError(f"fn closes over a tensor of shape {tuple(leaf.shape)} that requires a gradient, {INSTEAD}")
        waiting.extend(x for x, _ in node.next_functions)  # type: ignore[union-attr]


def _of_tokens(name: str, given: Any, x: Prepared) -> Tensor:
    """A number or tensor for each token of e, (N,), of which the last `shift` of a row have no target."""
    shape = (*x.targets.shape[:-1], x.targets.shape[-1] - x.shift) if x.shift else tuple(x.targets.shape)
    if isinstance(given, (bool, int, float)):
        dtype = torch.promote_types(x.e.dtype, torch.float32) if isinstance(given, float) else None
        given = torch.full((), given, dtype=dtype, device=x.e.device)
    arguments.check_tensor(name, given, NAME)
    if given.requires_grad:
        raise TypeError(f"{name} requires a gradient, {INSTEAD}")
    if given.numel() != 1:
        arguments.check_device(name, given, x.e)
    sizes = tuple(given.shape)
    if len(sizes) > len(shape) or any(n not in (1, m) for n, m in zip(sizes[::-1], shape[::-1], strict=False)):
        raise ValueError(f"{name} {sizes} must broadcast to the shape of targets after the shift, {tuple(shape)}")
    given = given.to(x.e.device).expand(shape)
    if x.shift:
        given = torch.cat([given, given.new_zeros((*shape[:-1], x.shift))], -1)
    return given.reshape(-1)

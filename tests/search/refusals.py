"""Which drawn calls are refused, with which errors, and words that the error has: the one table of them.

A call that is refused and is not in the table is a fault, and so is one that the table has and that runs.
"""

from collections.abc import Callable
from typing import NamedTuple

from tests.search.calls import (
    CROSS_ENTROPY,
    DIVERGENCE,
    FUNCTIONS,
    LOG_PROBS,
    REFUSED_BY_MOST,
    TOKEN_LOSS,
    Call,
    Program,
)


class Refusal(NamedTuple):
    errors: tuple[type[Exception], ...]
    words: tuple[str, ...]  # all of them are in the message
    may_run: bool = False  # it depends on the plan, and a call that runs is right


def refusal(call: Call) -> Refusal | None:
    """What a call raises; None for one that runs."""
    p = call.program
    table = IN_JAX if p.package == "jax" else IN_TORCH
    return next((refused for holds, refused in table if holds(p)), None)


def _one_derivative(p: Program) -> bool:
    return p.transformation in REFUSED_BY_MOST and p.impl != "reference" and bool(p.wanted)


def _splits(p: Program) -> tuple[bool, bool, bool]:
    """Whether a mesh splits sequences inside jax.shard_map, and the vocabulary of c alone, and c at all."""
    from tests.devices.meshes import LAYOUTS, axes_of

    if p.layout == "one":
        return False, False, False
    layout = next(x for x in LAYOUTS if x.name == p.split)
    of_e, of_c = axes_of(layout.e), axes_of(layout.c)
    sequences = layout.e[1] if len(layout.e) > 1 else None
    manual = layout.manual(p.layout)
    alone = [a for a in of_c if a not in of_e]
    return sequences is not None and sequences in manual, bool(alone), bool(of_c)


def _needs_whole_sequences(p: Program) -> bool:
    if not p.shift or not _splits(p)[0]:
        return False
    none = p.reduction == "none"
    return {
        CROSS_ENTROPY: none or p.return_lse,
        LOG_PROBS: True,
        TOKEN_LOSS: none or p.return_numbers or p.fn in ("clipped", "bonus", "squares"),
        DIVERGENCE: False,
    }[p.function]


Row = tuple[Callable[[Program], bool], Refusal]


def _in_reverse_once(function: str) -> list[Row]:
    """Of weights of the tokens JAX may find the second derivative itself: the loss is linear in them."""
    refused = Refusal((NotImplementedError, TypeError), (function, "derivative", "impl='reference'"))

    def in_weights(p: Program) -> bool:
        return bool(p.wanted) and p.wanted[p.vocabulary % len(p.wanted)] == "token_weight"  # run_jax.second_derivative

    def holds(p: Program) -> bool:
        return p.function == function and _one_derivative(p)

    return [(lambda p: holds(p) and in_weights(p), refused._replace(may_run=True)), (holds, refused)]


IN_JAX: list[Row] = [
    (
        lambda p: p.impl == "cce" and p.dtype == "float64",
        Refusal((TypeError,), ("impl='cce'", "float64", "'chunked' and 'reference'")),
    ),
    (
        lambda p: p.function == DIVERGENCE and _splits(p)[1],
        Refusal((NotImplementedError,), ("linear_divergence", "split the vocabulary of c", "Replicate c")),
    ),
    (
        lambda p: (
            p.function == DIVERGENCE
            and p.impl == "reference"
            and (p.layout in ("auto", "explicit", "partial") or _splits(p)[2])
        ),
        Refusal((NotImplementedError,), ("linear_divergence", "impl='reference'", "impl='chunked'")),
    ),
    (_needs_whole_sequences, Refusal((ValueError,), ("needs whole sequences", "before jax.shard_map"))),
    *(row for function in FUNCTIONS for row in _in_reverse_once(function)),
]


def _of_jax_alone(p: Program) -> bool:
    return p.dtype == "float64" and p.impl in ("cce", "chunked")


SPLIT_VOCABULARY = "vocabulary", "sequence"  # of processes


def _derives_more(p: Program) -> bool:
    """Whether a derivative is asked for that only impl="reference" has, and not where the vocabulary is split."""
    return p.transformation in REFUSED_BY_MOST and (p.impl != "reference" or p.split in SPLIT_VOCABULARY)


def _first_derivatives(function: str) -> list[Row]:
    """In weights of tokens alone PyTorch finds every derivative where it computes the loss, which is linear in them."""
    refused = Refusal((NotImplementedError,), (function, "first derivatives"))

    def holds(p: Program) -> bool:
        return p.function == function and _derives_more(p)

    return [(lambda p: holds(p) and p.wanted == ("token_weight",), refused._replace(may_run=True)), (holds, refused)]


def _batched(p: Program, *splits: str) -> bool:
    return p.processes > 1 and p.transformation == "batched cotangents" and p.split in splits


BATCHED = Refusal((NotImplementedError,), ("is_grads_batched=True", "once for each cotangent"))

IN_TORCH: list[Row] = [
    (
        lambda p: p.split == "tokens" and p.function == CROSS_ENTROPY and p.shift > 0 and len(p.leading) == 1,
        Refusal((ValueError,), ("shift=1", "shift the targets before you distribute them")),
    ),
    (lambda p: _batched(p, "tokens") and p.function == CROSS_ENTROPY and bool(p.wanted), BATCHED),
    (
        lambda p: p.processes > 1 and p.split == "sequence" and p.function == LOG_PROBS and not p.targets,
        Refusal((ValueError,), ("targets=None", "sequence_axis=0", "give targets")),
    ),
    (
        lambda p: _batched(p, *SPLIT_VOCABULARY) and bool({"e", "c", "bias"} & {*p.wanted}),
        BATCHED._replace(may_run=True),
    ),
    (  # torch.compile with fullgraph=True raises an error of its own, with the words of ours
        lambda p: _of_jax_alone(p) and "compile" in p.transformation,
        Refusal((RuntimeError,), ("float64",)),
    ),
    (_of_jax_alone, Refusal((TypeError,), ("float64, which 'reference' and 'torch_compile' take",))),
    *(row for function in FUNCTIONS for row in _first_derivatives(function)),
]

"""cce_torch.linear_token_loss against full logits in float64, the built-in loss, and cce_jax's."""

import contextlib
import re
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import cce_jax
from cce_torch import VocabParallel, linear_cross_entropy, linear_log_probs, linear_token_loss
from cce_torch.on_jax import bridge
from tests.call_torch import array, small_blocks
from tests.test_torch_distributed import assert_same_everywhere, in_processes
from tests.test_torch_vocab_in_forward import in_chunks
from tests.tolerance import assert_close

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
IGNORED = -100
FORMED = ["torch_chunk_statistics", "torch_chunk_gradients"]


def smooth(numbers, old, advantage, beta):
    """No kink, at which a rounding would change the gradient."""
    gain = torch.exp(0.3 * (numbers.log_probs - old)) * advantage
    bonus = 0 if numbers.entropy is None else 0.1 * numbers.entropy
    return -gain - bonus + beta * numbers.lse**2


def nll(numbers):
    return -numbers.log_probs


def made(
    tokens=(3, 9), width=16, vocabulary=61, dtype="float32", *, seed=0, ignored=0.3, wide=False, **options
) -> tuple:
    """What is differentiated, and the rest of a call of `smooth`."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return torch.tensor(rng.standard_normal(shape), dtype=torch.float32)

    of_c = torch.float32 if wide else TYPES[dtype]
    c = (normal(vocabulary, width) * 3 / width**0.5).to(of_c)
    leaves = {"e": normal(*tokens, width).to(TYPES[dtype]), "c": c.T.contiguous() if options.get("vocab_axis") else c}
    if options.pop("bias", False):
        leaves["bias"] = normal(vocabulary).to(of_c)
    targets = torch.tensor(rng.integers(0, vocabulary, tokens))
    targets[torch.tensor(rng.uniform(size=tokens)) < ignored] = IGNORED
    if options.get("temperature") == "each":
        options["temperature"] = torch.tensor(rng.uniform(0.3, 2.5, tokens), dtype=torch.float32)
    after = *tokens[:-1], tokens[-1] - options.get("shift", 0)
    arguments = normal(*after) - 3, normal(*after[:-1], 1), 0.01
    return leaves, {"targets": targets, "arguments": arguments, **options}


def truth(leaves: dict, call: dict, fn: Any = smooth) -> tuple:
    """The loss and the numbers from full logits."""
    call = {"shift": 0, "temperature": 1.0, "softcap": None, "logit_scale": 1.0, "reduction": "mean", **call}
    targets, shift, softcap = call["targets"], call["shift"], call["softcap"]
    temperature = torch.as_tensor(call["temperature"]).double().expand(targets.shape)
    e, c = leaves["e"], leaves["c"].T if call.get("vocab_axis") else leaves["c"]
    if shift:
        e, targets, temperature = e[..., :-shift, :], targets[..., shift:], temperature[..., :-shift]
    kept = targets != IGNORED
    z = call["logit_scale"] * (torch.where(kept[..., None], e, 0) @ c.T + leaves.get("bias", 0))
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature[..., None]
    lse = torch.logsumexp(z, -1)
    log_probs = z.gather(-1, targets.clamp(0)[..., None])[..., 0] - lse
    entropy = lse - (torch.softmax(z, -1) * z).sum(-1) if call.get("entropy") else None
    found = [None if x is None else torch.where(kept, x, 0) for x in (log_probs, lse, entropy)]
    numbers = mock.Mock(log_probs=found[0], lse=found[1], entropy=found[2])
    value = torch.where(kept, fn(numbers, *call["arguments"]), 0)
    if call["reduction"] != "none":
        items = call.get("num_items") or max(int(kept.sum()), 1)
        value = value.sum() / (items if call["reduction"] == "mean" else 1)
    return value, found


def ours(leaves: dict, call: dict, fn: Any = smooth, **more: Any) -> tuple:
    options = {"precision": "highest", **call, **more}
    targets, arguments = options.pop("targets"), options.pop("arguments")
    return linear_token_loss(
        leaves["e"], leaves["c"], targets, fn, *arguments, bias=leaves.get("bias"), return_numbers=True, **options
    )


def results(function: Any, leaves: dict, call: dict, **more: Any) -> dict[str, Any]:
    """The loss, the numbers, and the gradients of weights · loss; with `frozen`, of the others alone."""
    frozen = more.pop("frozen", ())
    own = {k: x.detach().requires_grad_(k not in frozen) for k, x in leaves.items()}
    value, (log_probs, lse, entropy) = function(own, call, **more)
    weights = torch.linspace(-2, 3, max(value.numel(), 1), dtype=value.dtype)[: value.numel()].reshape(value.shape)
    wanted = [k for k in own if k not in frozen]
    gradients = torch.autograd.grad((weights * value).sum(), [own[k] for k in wanted])
    found = {"loss": value, "log_probs": log_probs, "lse": lse, "entropy": entropy}
    found = {k: x.detach() for k, x in found.items() if x is not None}
    for k, x in zip(wanted, gradients, strict=True):
        assert x.dtype == leaves[k].dtype, k
        found[k] = x.to(leaves["e"].dtype)  # of few tokens dz is rounded to it even where c is float32
    return {k: array(x) for k, x in found.items()}


def check(leaves: dict, call: dict, impl: str, **more: Any) -> None:
    with small_blocks():
        found, rounded = results(ours, leaves, call, impl=impl, **more), results(ours, leaves, call, impl="reference")
    dtype = leaves["e"].dtype  # in which a wide c is multiplied
    exact = results(truth, {k: x.to(dtype).double() for k, x in leaves.items()}, call)
    for name, x in found.items():
        if name in ("loss", "log_probs", "entropy"):  # sums and differences of numbers of this size
            size = max(1.0, np.abs(exact["lse"]).max(initial=0), np.abs(exact["loss"]).max(initial=0))
            assert np.abs(x - exact[name]).max(initial=0) <= 2.0**-18 * size * 4, name
        else:
            assert_close(x, exact[name], rounded[name], name)


@st.composite
def calls(draw) -> dict[str, Any]:
    """The arguments of `made`."""
    dtype = draw(st.sampled_from(list(TYPES)))
    options: dict[str, Any] = {
        "tokens": draw(st.sampled_from([(5,), (3, 9), (2, 3, 4)])),
        "dtype": dtype,
        "seed": draw(st.integers(0, 99)),
        "ignored": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "entropy": draw(st.booleans()),
        "softcap": draw(st.sampled_from([None, 4.0])),
        "logit_scale": draw(st.sampled_from([1.0, 1.3])),
        "vocab_axis": draw(st.integers(0, 1)),
        "shift": draw(st.integers(0, 2)),
        "temperature": draw(st.sampled_from([1.0, 0.7, "each"])),
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
        "bias": draw(st.booleans()),
        "wide": dtype != "float32" and draw(st.booleans()),
    }
    if options["reduction"] == "mean" and draw(st.booleans()):
        options["num_items"] = 7.5
    return options


@settings(max_examples=10)
@given(
    calls(),
    st.sampled_from(["chunked", "torch_compile"]),
    st.sampled_from([None, 4, 8]),
    st.sampled_from(["", "e", "c"]),
)
@example(dict(entropy=True, temperature="each", bias=True, softcap=4.0, shift=1, vocab_axis=1), "chunked", 8, "")
@example(dict(entropy=True, dtype="bfloat16", wide=True, temperature=0.7), "chunked", 8, "")
@example(dict(entropy=True, dtype="float16", bias=True), "chunked", 8, "e")
@example(dict(entropy=True, dtype="bfloat16", temperature="each", tokens=(40,)), "cce", 16, "")
def test_loss_numbers_and_gradients(x, impl, size, frozen):
    with in_chunks(size) if size else contextlib.nullcontext([]) as ran:
        check(*made(**x), impl, frozen=(frozen,) if frozen else ())
    if size and impl != "torch_compile":
        assert (FORMED[1] in ran) == (x.get("reduction") != "none"), ran

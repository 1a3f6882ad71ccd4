"""What all public functions of both packages have in common, and drawn calls (tests/search) do not ask.

A new public function joins CALLS, and these tests cover it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cce_jax
import cce_torch
from cce_torch import divergence_ops
from cce_torch.in_torch import largest, rule
from tests import both
from tests.call_torch import small_blocks

OF = {"jax": cce_jax, "torch": cce_torch}
WIDTH, VOCABULARY = 8, 70
EVERY_NUMBER = {"entropy": True, "predicted": True, "top_k": 3, "mean_logit": True}


def minus(numbers: Any) -> Any:
    return -numbers.log_probs - 0.1 * numbers.entropy


def cross_entropy(of: Any, e: Any, c: Any, targets: Any, **options: Any) -> Any:
    return of.linear_cross_entropy(e, c, targets, return_lse=True, **options)


def log_probs(of: Any, e: Any, c: Any, targets: Any, **options: Any) -> Any:
    return of.linear_log_probs(e, c, targets, ids=targets[..., None], **EVERY_NUMBER, **options)


def token_loss(of: Any, e: Any, c: Any, targets: Any, fn: Any = minus, **options: Any) -> Any:
    return of.linear_token_loss(e, c, targets, fn, entropy=True, **options)


def divergence(of: Any, e: Any, c: Any, targets: Any, **options: Any) -> Any:
    """From a teacher whose hidden states are a part of the student's."""
    return of.linear_divergence(e, c, e[..., :3], c[:, :3], divergence="jsd", return_entropy=True, **options)


CALLS: dict[str, Callable[..., Any]] = {x.__name__: x for x in (cross_entropy, log_probs, token_loss, divergence)}
EVERY_CALL = pytest.mark.parametrize("name", CALLS)
# Of the results, the axes besides those of the tokens; None for one number.
AXES = {
    "cross_entropy": (None, ()),
    "log_probs": ((), (), (), (1,), (), (3,), (3,), ()),
    "token_loss": (None,),
    "divergence": (None, ()),
}


def with_gradients(name: str, package: str, e: Any, c: Any, targets: Any, **options: Any) -> tuple[list, tuple]:
    """All results, and the gradients of e and c of the sum of those that have any."""
    call = CALLS[name]
    if package == "jax":

        def total(e: Any, c: Any) -> Any:
            found = jax.tree.leaves(call(cce_jax, e, c, targets, **options))
            return sum(jnp.sum(x) for x in found if jnp.issubdtype(x.dtype, jnp.floating)), found

        gradients, found = jax.grad(total, (0, 1), has_aux=True)(jnp.asarray(e), jnp.asarray(c))
        return found, gradients
    leaves = [torch.tensor(x, requires_grad=True) for x in (e, c)]
    found = jax.tree.leaves(call(cce_torch, *leaves, torch.tensor(targets), **options))
    return found, torch.autograd.grad(sum(x.sum() for x in found if x.requires_grad), leaves)


EMPTY = [((0,), 0, "mean"), ((3, 0), 0, "sum"), ((4, 1), 1, "none")]


@pytest.mark.parametrize(("leading", "shift", "reduction"), EMPTY)
@both.every
@EVERY_CALL
def test_without_tokens_or_with_sequences_too_short_for_a_shift(name, package, impl, leading, shift, reduction):
    if shift and name == "divergence":
        pytest.skip("linear_divergence has no shift")
    e, c = np.ones((*leading, WIDTH), np.float32), np.ones((VOCABULARY, WIDTH), np.float32)
    options = {"impl": impl} | ({"shift": shift} if shift else {})
    options |= {} if name == "log_probs" else {"reduction": reduction}
    with small_blocks(narrow=True):
        found, gradients = with_gradients(name, package, e, c, np.full(leading, 3, np.int32), **options)
    tokens = (*leading[:-1], leading[-1] - shift)
    for x, axes in zip(found, AXES[name], strict=True):
        assert tuple(x.shape) == (() if axes is None and reduction != "none" else (*tokens, *(axes or ())))
        assert not x.any()
    assert [tuple(x.shape) for x in gradients] == [e.shape, c.shape]
    assert not any(x.any() for x in gradients)


@contextmanager
def compiled_programs() -> Iterator[list[str]]:
    """How JAX's events call the programs that it compiles."""
    found: list[str] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        found.extend([event] * event.endswith("backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("package", OF)
@EVERY_CALL
def test_new_numbers_compile_nothing(name, package):
    """The scale of the logits and a temperature, one number or one for each token; and a share of a divergence."""
    rng = np.random.default_rng(0)
    e, c = (rng.standard_normal(shape, np.float32) for shape in ((3, 7, WIDTH), (VOCABULARY, WIDTH)))
    targets = rng.integers(0, VOCABULARY, (3, 7)).astype(np.int32)

    def run(number: float, each: bool) -> None:
        options: dict[str, Any] = {"impl": "chunked", "logit_scale": number, "softcap": 9.0}
        if name != "cross_entropy":
            options["temperature"] = number
        if each and name != "cross_entropy":
            each_token = np.full((3, 7), number, np.float32)
            options["temperature"] = each_token if package == "jax" else torch.tensor(each_token)
        options |= {"beta": number / 2} if name == "divergence" else {}
        with_gradients(name, package, e, c, targets, **options)

    for each in (False, True):
        run(0.5, each)
        with compiled_programs() as found:
            run(0.7, each)
        assert not found


def test_a_first_call_compiles():
    """The test above sees what is compiled."""
    with compiled_programs() as found:
        jax.jit(lambda x: x + 0.7354)(jnp.ones(7)).block_until_ready()
    assert found


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("impl", ["cce", "chunked", "torch_compile", "reference"])
@EVERY_CALL
def test_results_in_torch_are_free_to_change(name, impl, reduction):
    """They are tensors of their own memory, also where a user's function returns what it gets."""
    e, c = (torch.randn(*n, WIDTH).requires_grad_() for n in ((2, 3), (VOCABULARY,)))
    options: dict[str, Any] = {"impl": impl} | ({} if name == "log_probs" else {"reduction": reduction})
    options |= {"cross_entropy": {"z_loss": 0.1}, "token_loss": {"return_numbers": True}}.get(name, {})
    for fn in (minus, lambda numbers: numbers.lse) if name == "token_loss" else (None,):
        given = (e, c, torch.randint(VOCABULARY, (2, 3)))
        with small_blocks():
            of_fn = {} if fn is None else {"fn": fn}
            found = [x for x in jax.tree.leaves(CALLS[name](cce_torch, *given, **options, **of_fn)) if x is not None]
        memory = [x.untyped_storage().data_ptr() for x in (*given, *found)]
        assert len(set(memory)) == len(memory), "two tensors share memory"
        for x, y in zip(found, [x.clone() for x in found], strict=True):
            x.add_(1)
            assert torch.equal(x, y + 1)


class Largest(TorchDispatchMode):
    """The most elements of a result of an operation."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        new = [x.numel() for x in tree_leaves(found) if isinstance(x, torch.Tensor)]
        self.elements = max(self.elements, *new, 0)
        return found


@pytest.mark.parametrize("reduction", ["mean", "none"])
@EVERY_CALL
def test_in_torch_no_tensor_has_an_element_for_each_logit(name, reduction, monkeypatch):
    """Operators are the functions that they are: a dispatch mode does not look into an operator."""
    for module, operator in ((rule, "run_numbers"), (rule, "run_gradients"), (divergence_ops, "of_torch_alone")):
        monkeypatch.setattr(module, operator, getattr(module, operator).function)
    monkeypatch.setattr(largest, "LEAST_ROOM", 2**16)
    tokens, vocabulary = 300, 700
    e, c = np.ones((tokens, WIDTH), np.float32), np.ones((vocabulary, WIDTH), np.float32)
    options: dict[str, Any] = {"memory_budget": 0} | ({} if name == "log_probs" else {"reduction": reduction})
    for impl, holds in (("torch_compile", False), ("reference", True)):
        with small_blocks(), Largest() as seen:
            with_gradients(name, "torch", e, c, np.arange(tokens), impl=impl, **options)
        assert (seen.elements >= tokens * vocabulary) == holds

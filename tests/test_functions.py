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

import cce_jax
import cce_torch
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


def token_loss(of: Any, e: Any, c: Any, targets: Any, **options: Any) -> Any:
    return of.linear_token_loss(e, c, targets, minus, entropy=True, **options)


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

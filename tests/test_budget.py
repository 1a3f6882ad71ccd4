"""Saved exponentials and skipped tokens, where the random search (tests/search) does not reach or hits too rarely."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cce_jax import linear_cross_entropy
from tests.cases import DTYPES, Case, Inputs, inputs

V, D = 232, 20  # no multiple of any tile; V is one of 8, as XLA's matmuls with what is saved want
ALL = 2**40  # bytes: all exponentials are saved, if that serves the call
FEW_TOKENS, TOKENS = 24, 40  # below and above the number from which on kept tokens are moved together
EACH = {"reduction": "none", "return_lse": True}


def given() -> Inputs:
    return inputs(Case("", (TOKENS,), D, V, ("bias",), 0.0), "bfloat16")


def ignored(tokens: int) -> dict[str, np.ndarray]:
    """Which tokens are ignored: none, few and most of them, those also in runs, all; and up to the edge of a tile."""
    draw, place = np.random.default_rng(1).uniform(size=tokens), np.arange(tokens)
    return {
        "none": place < 0,
        "few": draw < 0.1,
        "most": draw < 0.75,
        "in runs": place % 16 < 12,
        "but 16": place < tokens - 16,
        "but 5": place < tokens - 5,
        "all": place >= 0,
    }


SMOOTHED = EACH | {"label_smoothing": 0.2}


@pytest.mark.parametrize("options", [EACH, SMOOTHED, SMOOTHED | {"softcap": 9.0}], ids=["each", "smoothed", "capped"])
def test_evaluation_has_the_bits_of_training(options):
    """Of ignored tokens too."""
    made = given()
    call = partial(linear_cross_entropy, bias=made.optional["bias"], impl="cce", memory_budget=0, **options)
    evaluate = jax.jit(call)
    train = jax.jit(lambda *arrays: jax.vjp(lambda e: call(e, *arrays[1:]), arrays[0])[0])
    for what, hidden in ignored(TOKENS).items():
        e = np.where(hidden[:, None], np.nan, made.e).astype(made.e.dtype)
        arrays = e, made.c, np.where(hidden, -100, made.targets)
        jax.tree.map(partial(np.testing.assert_array_equal, err_msg=what), evaluate(*arrays), train(*arrays))


def test_dbias_of_saved_tokens_has_their_factor_to_16_bits():
    """With logits of 0 saved exponentials are 1, and dbias is the sum of r, 1 + 2⁻⁸ of each of three tokens.

    bfloat16 would round that to 1, and the sum to 3.
    """
    e, c, targets = (np.zeros(s, DTYPES["bfloat16"]) for s in ((FEW_TOKENS, D), (V, D), (FEW_TOKENS,)))
    of_lse = np.where(np.arange(FEW_TOKENS) < 3, V * (1 + 2.0**-8), 0).astype(np.float32)

    def objective(bias):
        options = {"reduction": "none", "return_lse": True, "impl": "cce", "memory_budget": ALL}
        return jnp.sum(of_lse * linear_cross_entropy(e, c, targets.astype(np.int32), bias=bias, **options)[1])

    found = jax.grad(objective)(jnp.zeros(V, jnp.bfloat16))
    np.testing.assert_array_equal(found, np.full(V, 3 * (1 + 2.0**-8)).astype(found.dtype))

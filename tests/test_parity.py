"""Agreement with the cross-entropies that people use, Optax' and PyTorch's, and of our two packages."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F

from tests import call, call_torch
from tests.call_torch import array, tensor
from tests.cases import CASES, inputs
from tests.tolerance import bound
from tests.truth import truth

# One list of cases through five writings of the same loss, every pair compared. Each is within its own rounding of the
# truth, tolerance.py's bound, so two of them are within the sum of their bounds of each other.

# The options that other packages have; tests/search draws shapes, reductions and numbers.
SIXTEEN_BIT = ("bias, scale and softcap", "smoothing and class weights")
OVERLAP = [c for c in CASES if c.name in ("plain", "three axes", "shift", "label smoothing", *SIXTEEN_BIT)]
ON_A_GPU = ("plain", "shift", *SIXTEEN_BIT)


def logits(library, given, options, e, c, optional):
    """The logits as users write them, in float32, after the shift."""
    shift = int(options.get("shift", 0))
    e = e[..., :-shift, :] if shift else e
    z = e @ c.T
    z = z + optional["bias"] if "bias" in optional else z
    z = z * options.get("logit_scale", 1.0)
    softcap = options.get("softcap")
    return (softcap * library.tanh(z / softcap) if softcap else z), given.targets[
        ..., shift:
    ] if shift else given.targets


def by_torch(given, options, device):
    leaves = {k: tensor(v, device).float().requires_grad_() for k, v in given.differentiable().items()}
    z, targets = logits(torch, given, options, leaves["e"], leaves["c"], leaves)
    weight = given.optional.get("class_weight")
    loss = F.cross_entropy(
        z.reshape(-1, z.shape[-1]),
        torch.tensor(targets, device=device).long().reshape(-1),
        None if weight is None else tensor(weight, device),
        reduction=options.get("reduction", "mean"),
        label_smoothing=options.get("label_smoothing", 0.0),
    )
    loss = loss.reshape(given.of_loss.shape)
    gradients = torch.autograd.grad((loss * tensor(given.of_loss, device)).sum(), list(leaves.values()))
    return array(loss), {k: array(g) for k, g in zip(leaves, gradients, strict=True)}


def by_optax(given, options, device):
    if "class_weight" in given.optional:
        return None  # optax has none
    leaves = {k: jnp.asarray(v, jnp.float32) for k, v in given.differentiable().items()}

    def objective(leaves):
        z, targets = logits(jnp, given, options, leaves["e"], leaves["c"], leaves)
        kept = targets != -100
        labels = jax.nn.one_hot(np.where(kept, targets, 0), z.shape[-1])
        smooth = optax.smooth_labels(labels, options.get("label_smoothing", 0.0))
        total = jnp.where(kept, optax.softmax_cross_entropy(z, smooth), 0)
        loss = {"none": lambda: total, "sum": total.sum, "mean": lambda: total.sum() / kept.sum()}[
            options.get("reduction", "mean")
        ]()
        return jnp.sum(loss * given.of_loss), loss

    with jax.default_matmul_precision("highest"):
        gradients, loss = jax.jit(jax.grad(objective, has_aux=True))(leaves)
    return np.asarray(loss), {k: np.asarray(v) for k, v in gradients.items()}


@pytest.mark.parametrize(
    ("case", "dtype", "device"),
    [(c, "float32", "cpu") for c in OVERLAP]
    + [(c, "bfloat16", "cpu") for c in OVERLAP if c.name in SIXTEEN_BIT]
    + [pytest.param(c, "bfloat16", "cuda", marks=pytest.mark.gpu) for c in OVERLAP if c.name in ON_A_GPU]
    + [pytest.param(c, "float32", "cuda", marks=pytest.mark.gpu) for c in OVERLAP if c.name == "plain"],
    ids=str,
)
def test_every_pair_of_frameworks_agrees(case, dtype, device):
    given = inputs(case, dtype)
    options = {k: v for k, v in case.options.items() if k != "return_lse"}
    true_loss, _, true_gradients = truth(given, options)
    ours = {"cce_jax": call.run(given, options, "auto"), "cce_torch": call_torch.run(given, options, "auto", device)}
    results = {name: (loss, gradients) for name, (loss, _, gradients) in ours.items()}
    results |= {"torch": by_torch(given, options, device), "optax": by_optax(given, options, device)}
    results["float64"] = true_loss, true_gradients
    reference = call.run(given, options, "reference")
    compared = 0
    for (one, first), (other, second) in itertools.combinations(results.items(), 2):
        if first is None or second is None:
            continue
        for what, x, y, true, theirs in [
            ("loss", first[0], second[0], true_loss, reference[0]),
            *((f"d{k}", first[1][k], second[1][k], true_gradients[k], reference[2][k]) for k in true_gradients),
        ]:
            x, y, true = (np.asarray(a, np.float64) for a in (x, y, true))
            allowed = 2 * bound(theirs, true) * (np.linalg.norm(true.ravel()) or 1.0)  # as tolerance.error
            assert np.linalg.norm((x - y).ravel()) <= allowed, f"{one} and {other} differ in {what}"
            compared += 1
    assert compared >= 18

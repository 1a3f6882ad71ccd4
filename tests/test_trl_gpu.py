"""cce_torch.trl on a GPU: what TRL calls in place of its own function, against float64."""

import numpy as np
import pytest
import torch

import cce_torch.trl
from tests.call_torch import array
from tests.test_torch_log_probs import Drawn, made
from tests.tolerance import RELIABLE, error, roundoff

SIZES = (1500,), 256, 12_000
BOUND = 1.75  # times the error of rounding the true gradient


def held(x: Drawn, function) -> None:
    """All outputs that cce_torch.trl knows, and the gradients of a weighted sum of the first two."""
    leaves = {name: x.tensors[name].clone().requires_grad_() for name in ("e", "c", "bias")}
    options = (x.options[name] for name in ("softcap", "logit_scale"))
    asked = x.options["temperature"], 4096, *options, cce_torch.trl.OUTPUTS
    found = function.apply(*leaves.values(), x.tensors["targets"], *asked)
    wide = {name: y.detach().double().requires_grad_() for name, y in leaves.items()}
    z = x.options["logit_scale"] * (wide["e"] @ wide["c"].T + wide["bias"])
    z = x.options["softcap"] * torch.tanh(z / x.options["softcap"]) / x.options["temperature"]
    log_p = torch.log_softmax(z, 1)
    exact = log_p.gather(1, x.tensors["targets"][:, None])[:, 0], -(log_p.exp() * log_p).sum(1), z.mean(1)
    numbers = found.log_probs, found.entropy, found.mean_logits
    for name, y, right in zip(("log_probs", "entropy", "mean_logits"), numbers, exact, strict=True):
        assert error(array(y), array(right)) < RELIABLE * roundoff(np.float32), name
    assert torch.equal(found.is_top1, z.argmax(1) == x.tensors["targets"])
    assert 0 < found.is_top1.sum() < len(z)
    of = x.of[0], x.of[2]
    gradients, want = (
        torch.autograd.grad(sum((w * y).sum() for w, y in zip(of, z, strict=True)), list(own.values()))
        for z, own in ((found[:2], leaves), (exact[:2], wide))
    )
    for name, y, right in zip(leaves, gradients, want, strict=True):
        rounded = array(right.to(y.dtype))
        assert error(array(y), array(right)) < BOUND * error(rounded, array(right)), name


@pytest.mark.gpu
def test_the_function_of_trl(monkeypatch):
    """Any TRL that has the module: its version is held to the known ones in test_trl.py."""
    pytest.importorskip("transformers")
    utils = pytest.importorskip("trl.trainer.utils")
    monkeypatch.setattr(cce_torch.trl, "version", lambda _: cce_torch.trl.KNOWN[-1])
    monkeypatch.setattr(utils, cce_torch.trl.NAME, None, raising=False)
    cce_torch.trl.patch()
    options = {"softcap": 20.0, "logit_scale": 1.3, "entropy": True, "temperature": "number", "ignored": 0.0}
    x = made(*SIZES, "bfloat16", bias=True, **options)
    x = Drawn({name: y.cuda() for name, y in x.tensors.items()}, x.options, x.of.cuda())
    z = x.tensors["e"].double() @ x.tensors["c"].double().T + x.tensors["bias"].double()
    x.tensors["targets"][::3] = z.argmax(1)[::3]
    held(x, getattr(utils, cce_torch.trl.NAME))

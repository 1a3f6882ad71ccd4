"""What the functions of cce_torch return: tensors of their own memory, which the user may change in place."""

import pytest
import torch

from cce_torch import linear_cross_entropy, linear_divergence, linear_log_probs, linear_token_loss

FUNCTIONS = {
    "linear_cross_entropy": lambda e, c, t, **more: linear_cross_entropy(e, c, t, return_lse=True, z_loss=0.1, **more),
    "linear_log_probs": lambda e, c, t, reduction, **more: linear_log_probs(
        e, c, t, ids=t[..., None], entropy=True, predicted=True, top_k=2, mean_logit=True, **more
    ),
    "linear_token_loss": lambda e, c, t, **more: flat(
        linear_token_loss(e, c, t, lambda x: -x.log_probs - x.entropy, entropy=True, return_numbers=True, **more)
    ),
    "identity of linear_token_loss": lambda e, c, t, **more: flat(
        linear_token_loss(e, c, t, lambda x: x.lse, return_numbers=True, **more)
    ),
    "linear_divergence": lambda e, c, t, **more: linear_divergence(
        e, c, e.detach() + 1, c.detach(), return_entropy=True, **more
    ),
}


def flat(found) -> tuple:
    value, numbers = found
    return value, *numbers


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("impl", ["cce", "chunked", "torch_compile", "reference"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_free_to_change(name, impl, reduction):
    for leading in ((6,), (2, 3)):
        e, c = (torch.randn(*n, 8).requires_grad_() for n in (leading, (11,)))
        t = torch.randint(11, leading)
        found = [x for x in FUNCTIONS[name](e, c, t, impl=impl, reduction=reduction) if x is not None]
        memory = [x.untyped_storage().data_ptr() for x in (e, c, t, *found)]
        assert len(set(memory)) == len(memory), "two tensors share memory"
        before = [x.clone() for x in found]
        for x, y in zip(found, before, strict=True):
            x.add_(1)
            assert torch.equal(x, y + 1)

"""What a patched model may do with its logits, and what cce_patch refuses, with its reason."""

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel

from cce_torch.transformers import cce_patch
from cce_torch.transformers.lazy_logits import LazyLogits
from tests.causal_models import T, V, batch, small_config, small_model


class OwnHead(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.lm_head = torch.nn.Bilinear(32, 32, V)


class OtherForward(torch.nn.Linear):
    def forward(self, input):
        return super().forward(input).relu()


def test_what_cannot_be_patched_says_why():
    config = small_config(LlamaConfig)
    with pytest.raises(ValueError, match=r"it is a Bilinear, not a torch\.nn\.Linear"):
        cce_patch(OwnHead(config))
    other = LlamaForCausalLM(config)
    other.lm_head = OtherForward(32, V)
    with pytest.raises(ValueError, match=r"OtherForward, whose forward is not that of torch\.nn\.Linear"):
        cce_patch(other)
    with pytest.raises(ValueError, match=r"LlamaModel\.forward takes no labels"):
        cce_patch(LlamaModel)
    with pytest.raises(ValueError, match=r"LlamaForSequenceClassification.get_output_embeddings\(\) is None"):
        cce_patch(LlamaForSequenceClassification(config))
    with pytest.raises(TypeError, match="got a Linear"):
        cce_patch(torch.nn.Linear(3, 4))
    with pytest.raises(TypeError, match="got the class Linear"):
        cce_patch(torch.nn.Linear)
    with pytest.raises(ValueError, match="'lama' is no model_type"):
        cce_patch("lama")


@pytest.mark.parametrize("labels", [(2, T - 1), (1, T), (T,)])
def test_labels_of_a_wrong_length(labels):
    found = cce_patch(small_model(small_config(LlamaConfig)))
    with pytest.raises(ValueError, match=rf"labels must have the shape of input_ids: .*24 tokens, \(2, {T}\)"):
        found(batch()["input_ids"], labels=torch.zeros(labels, dtype=torch.long))


OPERATIONS = {
    "__add__": lambda z: z + 1,
    "__radd__": lambda z: 1 + z,
    "add": lambda z: torch.add(z, 1),
    "softmax": lambda z: torch.softmax(z, -1),
    "log_softmax": lambda z: z.log_softmax(-1),
    "logsumexp": lambda z: z.logsumexp(-1),
    "transpose": lambda z: z.transpose(1, 2),
    "__setitem__": lambda z: z.__setitem__(0, 0.0),
    "__iter__": lambda z: list(z),
    "multiplication by a Parameter": lambda z: z * torch.nn.Parameter(torch.ones(())),
    "the index": lambda z: z[:, 0],
    "a slice of the vocabulary from 3": lambda z: z[..., 3:],
    "a second tanh": lambda z: torch.tanh(torch.tanh(z)),
    "the shape": lambda z: z.view(-1, V // 2),
    "flatten of the vocabulary": lambda z: z.flatten(),
    "to": lambda z: z.to(torch.int32),
    r"cross_entropy of \(2, 12, 97\)": lambda z: F.cross_entropy(z, batch()["labels"]),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_that_is_not_understood_is_named(operation):
    found = cce_patch(small_model(small_config(LlamaConfig)))
    found.loss_function = lambda logits, *_, **__: OPERATIONS[operation](logits)
    with pytest.raises(TypeError, match=f"does not understand this operation on them: {operation}"):
        found(**batch())
    found.loss_function = lambda *_, **__: torch.zeros(())
    with pytest.raises(ValueError, match="computed no cross-entropy"):
        found(**batch())


RECORDED = {
    "scale": lambda z: 3 * z / 2,
    "softcap": lambda z: torch.tanh(z / 2) * 2,
    "negative softcap": lambda z: (z * 0.5).tanh() * -3 / 2,
    "slice": lambda z: z[:, 1:-1].contiguous(),
    "vocabulary": lambda z: z[..., : V - 5].float(),
    "shape": lambda z: z.reshape(-1, z.shape[-1]).view(2, T, -1).flatten(0, 1),
    "type": lambda z: z.to(torch.float32).to(z.device).to(z.dtype),
}


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_recorded_is_what_real_logits_do(name):
    h, weight, bias = torch.randn(2, T, 8), torch.randn(V, 8), torch.randn(V)
    logits = F.linear(h, weight, bias)
    seen = []

    def loss(lazy, targets, **options):
        seen.append(lazy)
        z = F.linear(lazy.h, weight, bias)[:, : lazy.vocabulary]
        scale, softcap = lazy.scale_and_softcap
        z = z if scale is None else z * scale
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        return F.cross_entropy(z, targets, **{k: x for k, x in options.items() if k != "class_weight"})

    found = RECORDED[name](LazyLogits(h, V, h.dtype, loss))
    expected = RECORDED[name](logits)
    assert found.shape == expected.shape
    assert (found.dtype, found.device, found.dim(), found.size(-1)) == (
        expected.dtype,
        expected.device,
        expected.dim(),
        expected.size(-1),
    )
    targets = torch.randint(V - 5, expected.shape[:-1]).flatten()
    reference = F.cross_entropy(expected.flatten(0, -2), targets, label_smoothing=0.1)
    width = found.shape[-1]
    torch.testing.assert_close(F.cross_entropy(found.view(-1, width), targets, label_smoothing=0.1), reference)
    assert len(seen) == 1

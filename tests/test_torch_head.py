"""The modules in one process: the layers that it is made from, and what its checkpoints hold."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn
from torch.nn.utils import parametrizations, prune

from cce_torch import LinearCrossEntropy, LinearCrossEntropyHead, linear_cross_entropy

D, V = 4, 9
H, T, WEIGHT = torch.randn(6, D), torch.tensor([0, 1, 2, 3, -100, 8]), torch.arange(1.0, V + 1)
C = torch.randn(V, D)


class Twice(nn.Linear):
    def forward(self, x):  # type: ignore[override]
        return 2 * super().forward(x)


class HeadTwice(LinearCrossEntropyHead):
    def forward(self, h, *targets):  # type: ignore[override]
        return super().forward(2 * h, *targets)


def changed(change) -> nn.Linear:
    linear = nn.Linear(D, V)
    change(linear)
    return linear


REFUSED = [
    (
        lambda: LoraLinear(nn.Linear(D, V), "a", LoraConfig(r=2), r=2),
        r"peft\.tuners\.lora\.layer\.Linear: .*not a torch",
    ),
    (lambda: Twice(D, V), r"Twice: .*whose forward is not that of torch\.nn\.Linear"),
    (lambda: HeadTwice(D, V), r"HeadTwice: .*whose forward is not that"),
    (lambda: nn.Bilinear(D, D, V), r"Bilinear, not a torch\.nn\.Linear"),
    (lambda: parametrizations.weight_norm(nn.Linear(D, V)), r"ParametrizedLinear: its weight is no parameter"),
    (lambda: prune.l1_unstructured(nn.Linear(D, V), "bias", 3), r"its bias is no parameter"),
    (lambda: changed(lambda x: setattr(x, "forward", lambda h: h)), r"its forward was replaced"),
    (lambda: changed(lambda x: x.register_forward_hook(lambda module, h, z: z / 2)), r"it has forward hooks"),
    (lambda: changed(lambda x: x.register_forward_pre_hook(lambda module, h: h)), r"it has forward hooks"),
]


@pytest.mark.parametrize(("make", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_a_layer_that_is_no_plain_linear_is_refused(make, reason):
    with pytest.raises(TypeError, match=rf"^LinearCrossEntropyHead\.from_linear .*{reason}"):
        LinearCrossEntropyHead.from_linear(make())


def test_from_linear_of_a_weight_says_what_to_call():
    with pytest.raises(TypeError, match=r"got a Parameter: pass the layer .* linear_cross_entropy\(h, weight"):
        LinearCrossEntropyHead.from_linear(nn.Linear(D, V).weight)  # type: ignore[arg-type]


class Named(nn.Linear):
    """A Linear of another name."""


@pytest.mark.parametrize("make", [nn.Linear, Named, LinearCrossEntropyHead])
@pytest.mark.parametrize("bias", [True, False])
def test_a_plain_linear_keeps_its_parameters(make, bias):
    linear = make(D, V, bias)
    head = LinearCrossEntropyHead.from_linear(linear)
    assert head.weight is linear.weight
    assert head.bias is linear.bias
    assert torch.equal(head(H), linear(H))


def loss_of(head: nn.Linear, weight: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(H, head.weight, T, head.bias, class_weight=weight)


def test_a_checkpoint_of_a_linear_loads_strictly_beside_class_weight():
    linear, head = nn.Linear(D, V), LinearCrossEntropyHead(D, V, class_weight=WEIGHT)
    assert head.state_dict().keys() == linear.state_dict().keys()
    head.load_state_dict(linear.state_dict())
    assert torch.equal(head(H, T), loss_of(linear, WEIGHT))
    linear.load_state_dict(head.state_dict())


def test_a_checkpoint_with_class_weight_still_loads_strictly():
    model = nn.Sequential(nn.Linear(D, D), LinearCrossEntropyHead(D, V, class_weight=WEIGHT))
    saved = {**model.state_dict(), "1.loss.class_weight": WEIGHT.sqrt()}
    model.load_state_dict(saved)
    assert "1.loss.class_weight" in saved
    assert torch.equal(model[1](H, T), loss_of(model[1], WEIGHT.sqrt()))
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "loss\.class_weight"'):
        LinearCrossEntropyHead(D, V).load_state_dict({**nn.Linear(D, V).state_dict(), "loss.class_weight": WEIGHT})


def test_class_weight_outlives_meta_and_to_empty():
    with torch.device("meta"):
        head, lost = (LinearCrossEntropyHead(D, V, class_weight=w) for w in (WEIGHT, torch.ones(V)))
    saved = nn.Linear(D, V).state_dict()
    for made in (head, lost):
        made.to_empty(device="cpu")
        made.load_state_dict(saved)
    assert torch.equal(head(H, T), loss_of(head, WEIGHT))
    with pytest.raises(ValueError, match=r"class_weight of shape \(9,\) was made on the device meta"):
        lost(H, T)
    lost.load_state_dict({**saved, "loss.class_weight": WEIGHT})
    assert torch.equal(lost(H, T), loss_of(lost, WEIGHT))


def test_class_weight_follows_copies_pickles_and_types():
    head = LinearCrossEntropyHead(D, V, class_weight=WEIGHT)
    for again in (head, copy.deepcopy(head), pickle.loads(pickle.dumps(head)), head.bfloat16().float()):
        assert torch.equal(again(H, T), loss_of(again, WEIGHT))


@pytest.mark.gpu
def test_class_weight_moves_to_the_device_of_h():
    head = LinearCrossEntropyHead(D, V, class_weight=WEIGHT)
    want, moved = head(H, T), head.to("cuda")
    for _ in range(2):
        torch.testing.assert_close(moved(H.cuda(), T.cuda()).cpu(), want)
        assert moved.loss.class_weight.is_cuda
    assert torch.equal(moved.cpu()(H, T), want)


# LinearCrossEntropy, and the order of the function's arguments.


def test_the_module_is_the_function_and_copies_and_pickles():
    expected = linear_cross_entropy(H, C, T, class_weight=WEIGHT, softcap=3.0, shift=2, label_smoothing=0.1)
    module = LinearCrossEntropy(softcap=3.0, shift=2, class_weight=WEIGHT, label_smoothing=0.1)
    for again in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(again(H, C, T), expected)
    assert "softcap=3.0" in repr(module)
    assert list(module.state_dict()) == ["class_weight"]
    with pytest.raises(TypeError, match="sofcap"):
        LinearCrossEntropy(sofcap=3.0)


def test_positional_arguments_are_those_of_cut_cross_entropy():
    targets = T.clamp(min=7)
    loss, lse = linear_cross_entropy(H, C, targets, WEIGHT, 7, 2.0, "sum", 3, True)
    assert lse.shape == (3,)
    named = linear_cross_entropy(H, C, targets, bias=WEIGHT, ignore_index=7, softcap=2.0, reduction="sum", shift=3)
    assert torch.equal(loss, named)

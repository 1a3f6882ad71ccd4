"""The bad-input table, in both packages: each row raises, names its argument and prints what it got."""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cce_jax
import cce_torch
from cce_jax import linear_cross_entropy
from cce_kernels import contract
from cce_torch.in_torch import compiled
from tests.call_torch import small_blocks, tensor

N, D, V = 6, 4, 9
E, C, T = np.ones((2, 3, D), np.float32), np.ones((V, D), np.float32), np.zeros((2, 3), np.int32)

ROWS = [
    ({"targets": np.zeros((2, 4), np.int32)}, ValueError, r"targets.*\(2, 3\).*\(2, 4\)"),
    ({"targets": np.zeros((2, 2), np.int32)}, ValueError, r"targets.*\(2, 2\)"),
    ({"targets": np.zeros(6, np.int32)}, ValueError, r"targets.*\(6,\)"),
    ({"c": np.ones((V, D + 1), np.float32)}, ValueError, r"e .*\(2, 3, 4\).*c \(9, 5\)"),
    ({"c": np.ones((D, V), np.float32)}, ValueError, r"e .*\(2, 3, 4\).*c \(4, 9\): did you mean vocab_axis=1\?"),
    ({"vocab_axis": 1}, ValueError, r"e .*\(2, 3, 4\).*c \(9, 4\): did you mean vocab_axis=0\?"),
    ({"e": np.ones((2, 3, V), np.float32)}, ValueError, r"e \(2, 3, 9\) .*If e holds logits, give the hidden states"),
    ({"impl": "cce_exact"}, ValueError, "impl='cce_exact' must be one of 'auto', 'cce', .*'cce' has exact gradients"),
    ({"c": np.ones((D + 1, V), np.float32)}, ValueError, r"e .*c \(5, 9\)$"),
    ({"filter_eps": None}, TypeError, r"unknown options \['filter_eps'\]; for filter_eps write gradient_tolerance"),
    (
        {"lse_square_scale": 1e-4},
        TypeError,
        r"linear_cross_entropy: .*; for lse_square_scale write z_loss; allowed: .*shift",
    ),
    ({"sofcap": 3.0}, TypeError, r"unknown options \['sofcap'\]; allowed: .*softcap"),
    ({"c": np.ones((1, V, D), np.float32)}, ValueError, r"c must have shape \(V, D\).*\(1, 9, 4\)"),
    ({"c": np.ones((0, D), np.float32)}, ValueError, r"V, D >= 1.*\(0, 4\)"),
    ({"bias": np.ones(D, np.float32)}, ValueError, r"bias.*\(9,\).*\(4,\)"),
    ({"class_weight": np.ones((V, 1), np.float32)}, ValueError, r"class_weight.*\(9,\).*\(9, 1\)"),
    ({"token_weight": np.ones(6, np.float32)}, ValueError, r"token_weight.*\(6,\).*\(2, 3\)"),
    ({"shift": 3}, ValueError, r"shift=3.*\[0, T\).*T = 3"),
    ({"shift": -1}, ValueError, r"shift=-1.*\[0, T\)"),
    ({"shift": 1.0}, TypeError, r"shift must be an integer.*float"),
    ({"e": E[0, 0], "targets": np.array(0), "shift": 1}, ValueError, r"shift=1.*\[0, T\).*targets \(\)"),
    ({"e": E[:, :1], "targets": T[:, :1], "shift": 2}, ValueError, r"shift=2.*\[0, T\).*T = 1"),
    ({"num_items": np.ones(2)}, ValueError, r"num_items.*\(2,\)"),
    ({"num_items": -1}, ValueError, r"num_items=-1.*at least 0"),
    ({"num_items": np.float32(-2)}, ValueError, r"num_items=.*-2\.0.*at least 0"),
    ({"num_items": float("nan")}, ValueError, r"num_items=nan.*at least 0"),
    ({"num_items": "3"}, TypeError, r"num_items must be a number.*str"),
    ({"num_items": 3, "reduction": "sum"}, ValueError, r"num_items.*reduction='mean' only.*reduction='sum'"),
    ({"num_items": np.ones(()), "reduction": "none"}, ValueError, r"num_items.*reduction='mean' only.*'none'"),
    ({"targets": T.astype(np.float32)}, TypeError, r"targets.*integer.*float32"),
    ({"targets": T.astype(bool)}, TypeError, r"targets.*integer.*bool"),
    ({"targets": T.tolist()}, TypeError, r"targets must be a.*list"),
    ({"e": E.tolist()}, TypeError, r"e must be a.*list"),
    ({"e": E.astype(np.int32)}, TypeError, r"e must be one of.*int32"),
    ({"c": C.astype(np.int8)}, TypeError, r"c must be one of.*int8"),
    (
        {"c": jnp.ones((V, D), jnp.bfloat16)},
        TypeError,
        r"c must be of e's type, or float32 beside a 16-bit e, got c bfloat16 and e float32: "
        r"write c\.(astype|to)\(e\.dtype\) or e\.(astype|to)\(c\.dtype\)$",
    ),
    (
        {"bias": jnp.ones(V, jnp.float16)},
        TypeError,
        r"bias must be of c's type.*float16.*float32: write bias\.(astype|to)\(c\.dtype\)$",
    ),
    ({"bias": np.ones(V, np.int32)}, TypeError, r"bias must be one of.*int32"),
    ({"e": None}, TypeError, r"e must be a.*NoneType"),
    ({"reduction": "avg"}, ValueError, r"reduction='avg'.*'mean', 'sum', 'none'"),
    ({"impl": "triton"}, ValueError, r"impl='triton'.*'auto', 'cce', 'chunked', 'reference'"),
    ({"vocab_axis": 2}, ValueError, r"vocab_axis=2.*0, 1"),
    ({"vocab_axis": True}, ValueError, r"vocab_axis=True.*0, 1"),
    ({"softcap": -30.0}, ValueError, r"softcap=-30\.0.*positive"),
    ({"softcap": 0.0}, ValueError, r"softcap=0\.0.*positive"),
    ({"softcap": float("nan")}, ValueError, r"softcap=nan.*positive"),
    ({"softcap": "30"}, TypeError, r"softcap.*number.*str"),
    ({"logit_scale": float("inf")}, ValueError, r"logit_scale=inf"),
    ({"logit_scale": jnp.ones(())}, TypeError, r"logit_scale.*number"),
    ({"z_loss": float("nan")}, ValueError, r"z_loss=nan"),
    ({"label_smoothing": 1.1}, ValueError, r"label_smoothing=1\.1.*\[0, 1\]"),
    ({"label_smoothing": -0.1}, ValueError, r"label_smoothing=-0\.1.*\[0, 1\]"),
    ({"label_smoothing": float("nan")}, ValueError, r"label_smoothing=nan.*\[0, 1\]"),
    ({"ignore_index": None}, TypeError, r"ignore_index must be an integer.*NoneType"),
    ({"memory_budget": -1}, ValueError, r"memory_budget=-1 .*bytes, at least 0.*'all'"),
    ({"memory_budget": -2e9}, ValueError, r"memory_budget=-2000000000\.0 .*at least 0"),
    ({"memory_budget": 1.5}, ValueError, r"memory_budget=1\.5 must be a whole number of bytes"),
    ({"memory_budget": float("nan")}, ValueError, r"memory_budget=nan must be a whole number"),
    ({"memory_budget": float("inf")}, ValueError, r"memory_budget=inf .*'all'"),
    ({"memory_budget": "300 MiB"}, TypeError, r"memory_budget='300 MiB' must be a whole number.*2e9, or 'all'"),
    ({"memory_budget": True}, TypeError, r"memory_budget=True .*'all' .*; leave it out for 640 MiB or more"),
    ({"gradient_tolerance": 1.0}, ValueError, r"gradient_tolerance=1\.0 must be in \[0, 1\)"),
    ({"gradient_tolerance": 2}, ValueError, r"gradient_tolerance=2 must be in \[0, 1\)"),
    ({"gradient_tolerance": -0.1}, ValueError, r"gradient_tolerance=-0\.1 must be in \[0, 1\)"),
    ({"gradient_tolerance": float("nan")}, ValueError, r"gradient_tolerance=nan must be finite"),
    ({"gradient_tolerance": "2**-7"}, TypeError, r"gradient_tolerance must be a Python number, got str"),
    ({"gradient_tolerance": None}, TypeError, r"gradient_tolerance must be a Python number, got NoneType"),
    ({"gradient_tolerance": np.zeros(1)}, TypeError, r"gradient_tolerance must be .*: write float\(gradient_tolerance"),
    (
        {"gradient_tolerance": jnp.zeros(())},
        TypeError,
        r"gradient_tolerance must be a Python number, got .*: write float",
    ),
    ({"class_weight": np.ones(V, np.complex64)}, TypeError, r"class_weight must be real.*complex64"),
]


OF_TEMPERATURE = [
    (0.0, ValueError, r"temperature=0\.0 must be finite and positive"),
    (-1, ValueError, r"temperature=-1 must be finite and positive"),
    (float("inf"), ValueError, r"temperature=inf must be finite and positive"),
    (float("nan"), ValueError, r"temperature=nan must be finite and positive"),
    (1e39, ValueError, r"temperature=1e\+39 must be finite in float32, in .* float32 embeddings .*"),
    ("1", TypeError, r"temperature must be a number or an array, got str"),
    (None, TypeError, r"temperature must be a number or an array, got NoneType"),
    (True, TypeError, r"temperature must be a number or an array, got bool"),
    ([1.0], TypeError, r"temperature must be a number or an array, got list.*"),
    (np.ones(2, np.float32), ValueError, r"temperature must .*, \(2, 3\), got temperature \(2,\)"),
    (np.ones((1, 2, 3), np.float32), ValueError, r"temperature must .*, \(2, 3\), got temperature \(1, 2, 3\)"),
    (np.ones(3, np.complex64), TypeError, r"temperature must be real, got temperature complex64"),
    (np.ones(3, bool), TypeError, r"temperature must be real, got temperature bool"),
]


TORCH_ROWS = [
    ({"c": torch.nn.Linear(D, V)}, TypeError, r"c must be a torch\.Tensor, got Linear: pass its weight, and its bias"),
    ({"c": torch.nn.Embedding(V, D)}, TypeError, r"c must be a torch\.Tensor, got Embedding: pass its weight$"),
    ({"targets": T.tolist()}, TypeError, r"targets must be a torch\.Tensor, got list: write torch\.tensor\(targets\)"),
    ({"e": list(torch.ones(2, 3, D))}, TypeError, r"e must be a torch\.Tensor, got list: write torch\.stack\(e\)"),
    ({"targets": T.astype(np.float32)}, TypeError, r"got targets float32 of shape \(2, 3\): write targets\.long\(\)"),
    ({"targets": np.ones((2, 3, V), np.float32)}, TypeError, r"targets .*: probabilities as targets are not supported"),
    ({"num_items": torch.ones((), dtype=torch.complex64)}, TypeError, r"num_items must be real, got complex64"),
    ({"num_items": np.complex64(3)}, TypeError, r"num_items must be real, got complex64"),
    ({"num_items": 1e39}, ValueError, r"num_items=1e\+39 must be finite in float32"),
    ({"logit_scale": -1e39}, ValueError, r"logit_scale=-1e\+39 must be finite in float32"),
    ({"z_loss": 1e39}, ValueError, r"z_loss=1e\+39 must be finite in float32"),
    ({"accumulate_into": np.ones((D, V))}, ValueError, r"accumulate_into must have c's shape, \(9, 4\), got \(4, 9\)"),
    ({"accumulate_into": np.ones((V, D), int)}, TypeError, r"accumulate_into must be one of bfloat16, .*, got int64"),
    ({"accumulate_into": [1.0]}, TypeError, r"accumulate_into must be a torch\.Tensor, got list: write torch\.tensor"),
    ({"accumulate_into": torch.ones(V, D, requires_grad=True)}, ValueError, r": pass accumulate_into\.detach\(\)"),
    ({"accumulate_into": np.ones((V, D))}, ValueError, r"accumulate_into gets the gradient of c, but c requires none"),
    ({"accumulate_into": torch.ones(V, D, device="meta")}, TypeError, r"accumulate_into .*meta"),
]


@dataclass
class Layer:
    """A layer of another library, such as Equinox' Linear (weight) and Flax NNX's Linear (kernel) and Embed."""

    weight: np.ndarray | None = None


OF_JAX = [
    ({"sharding": "data"}, TypeError, r"sharding must be a pair of jax\.sharding\.PartitionSpec.*data"),
    ({"c": Layer()}, TypeError, r"c must be an array, got Layer: pass its weight, with vocab_axis=0 if .* \(V, D\)"),
    ({"c": {"kernel": C.T}}, TypeError, r"c must .* got dict: pass its kernel, with vocab_axis=1 if .* \(D, V\)"),
    ({"c": {"embedding": C}}, TypeError, r"c must .* got dict: pass its embedding, with vocab_axis=0"),
    ({"e": E.tolist()}, TypeError, r"e must be an array, got list: write jnp\.asarray\(e\)"),
    ({"targets": T.tolist()}, TypeError, r"targets must .* got list: write jnp\.asarray\(targets\)"),
    ({"targets": T.astype(np.float32)}, TypeError, r"float32 of shape .*: write targets\.astype\(jnp\.int32\)"),
    ({"precision": "bf16"}, ValueError, r"precision='bf16' must be None, 'default', 'high', 'highest', or another"),
    ({"precision": ["highest", "highest"]}, ValueError, r"precision=\['highest', 'highest'\] must be None, 'default'"),
    ({"precision": 3}, ValueError, r"precision=3 must be None, 'default'"),
    ({"logit_scale": 1e39}, ValueError, r"logit_scale=1e\+39 must be finite in float32.* float32 embeddings"),
    ({"z_loss": -1e39}, ValueError, r"z_loss=-1e\+39 must be finite in float32"),
    ({"num_items": 10**39}, ValueError, r"num_items=1e\+39 must be finite in float32"),
    ({"num_items": 10**400}, ValueError, r"num_items=10*0 must be finite"),
    ({"logit_scale": 10**400}, ValueError, r"logit_scale=10*0 must be finite"),
    ({"num_items": 3j}, TypeError, r"num_items must be .* complex"),
    ({"num_items": np.complex64(3)}, TypeError, r"num_items must be real, got complex64"),
    ({"num_items": jnp.ones((), jnp.complex64)}, TypeError, r"num_items must be real, got complex64"),
    ({"logit_scale": jnp.ones(())}, TypeError, r"logit_scale must be a Python number.*: write float\(logit_scale\)"),
]


@pytest.mark.parametrize(("changed", "error", "message"), OF_JAX, ids=lambda x: str(x)[:40])
def test_raises_in_jax(changed, error, message):
    with pytest.raises(error, match=message) as raised:
        linear_cross_entropy(**{"e": E, "c": C, "targets": T, **changed})
    assert len(str(raised.value)) < 700


@pytest.mark.parametrize(
    ("name", "allowed"),
    [(x, 1) for x in ("shift", "ignore_index", "softcap", "logit_scale", "label_smoothing", "z_loss", "memory_budget")]
    + [("gradient_tolerance", 0.25)],
)
def test_an_option_that_jax_traces_is_to_be_static(name, allowed):
    def call(value):
        return linear_cross_entropy(E, C, T, **{name: value})

    with pytest.raises(TypeError, match=rf"^{name} must be .*JitTracer.*static_argnames='{name}'"):
        jax.jit(call)(allowed)
    assert np.isfinite(jax.jit(call, static_argnums=0)(allowed))
    if name == "logit_scale":
        with pytest.raises(TypeError, match="or multiply e by a scale that is learned"):
            jax.grad(call)(1.0)


PRECISIONS = [None, "highest", "tensorfloat32", "BF16_BF16_F32", jax.lax.Precision.HIGH, ("highest", "highest")]


@pytest.mark.parametrize("precision", [*PRECISIONS, jax.lax.DotAlgorithmPreset.BF16_BF16_F32])
def test_every_precision_of_jax_is_taken(precision):
    assert np.isfinite(linear_cross_entropy(E, C, T, precision=precision, impl="chunked"))


def log_prob(numbers):
    return numbers.log_probs


LOSSES = {
    "closes over a number for each token": (lambda x, six, two: x.log_probs * six, ValueError, "6.*as an argument"),
    "closes over two numbers": (lambda x, six, two: x.log_probs * two, ValueError, "2.*as an argument"),
    "sums": (lambda x, six, two: x.log_probs.sum(), ValueError, r"of the shape of log_probs, \(2,\).* of shape \(\)"),
    "complex": (lambda x, six, two: x.log_probs * 1j, TypeError, "fn must return real numbers of .*, got complex64"),
    "a comparison": (lambda x, six, two: x.log_probs > 0, TypeError, "fn must return .* got bool"),
    "nothing": (lambda x, six, two: None, TypeError, "returned NoneType: numbers.entropy is None without entropy=True"),
    "a tuple": (lambda x, six, two: (x.log_probs, 1), TypeError, "fn must return .* returned tuple"),
    "the entropy": (lambda x, six, two: x.log_probs - 0.1 * x.entropy, TypeError, "which is None: give entropy=True"),
}


@pytest.mark.parametrize(("package", "impl"), [(p, i) for p in (cce_jax, cce_torch) for i in contract.IMPLS])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_none_of_each_token_is_refused(name, package, impl):
    """By one rule, whatever the number of chunks: for all six tokens at once some of these would run, and be wrong."""
    fn, error, message = LOSSES[name]
    make = tensor if package is cce_torch else jnp.asarray
    fn = partial(fn, six=make(np.ones(6, np.float32)), two=make(np.ones(2, np.float32)))
    e, c, targets = map(make, (E, C, T))
    e = e.requires_grad_() if package is cce_torch else e  # the forward pass forms its gradient
    for _ in range(2):  # what was refused once is refused again
        with pytest.raises(error, match=message):
            package.linear_token_loss(e, c, targets, fn, impl=impl)


def test_a_function_that_jax_cannot_look_up_is_named():
    @dataclass
    class Unhashable:
        weight: float

        def __call__(self, numbers):
            return self.weight * numbers.log_probs

    with pytest.raises(TypeError, match=r"fn must be hashable, .* Unhashable is not: define a function, and give"):
        cce_jax.linear_token_loss(E, C, T, Unhashable(1.0))


def test_a_function_that_jax_cannot_trace_gets_jaxs_own_error():
    with pytest.raises(jax.errors.TracerBoolConversionError):
        cce_jax.linear_token_loss(E, C, T, lambda numbers: numbers.lse if numbers.lse.sum() > 0 else -numbers.lse)


def ones(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def times(numbers, x):
    return numbers.log_probs * x


LATE = {"targets": T + V, "check_targets": True}
OF_TOKENS = [  # linear_log_probs and linear_token_loss
    ({"targets": T[:, :2]}, ValueError, r"targets.*\(2, 3\).*\(2, 2\)"),
    ({"targets": T.astype(np.float32)}, TypeError, r"targets must be of an integer type.*float32"),
    ({"c": C.T}, ValueError, r"did you mean vocab_axis=1\?"),
    ({"bias": ones(4)}, ValueError, r"bias.*\(9,\).*\(4,\)"),
    ({"softcap": -1.0}, ValueError, r"softcap=-1\.0.*positive"),
    ({"logit_scale": 1e39}, ValueError, r"logit_scale=1e\+39 must be finite in float32"),
    ({"shift": 3}, ValueError, r"shift=3.*\[0, T\).*T = 3"),
    ({"impl": "triton"}, ValueError, r"impl='triton'.*'auto'"),
    ({"memory_budget": -1}, ValueError, r"memory_budget=-1 .*at least 0"),
    (LATE, ValueError, r"targets\[0, 0\] = 9 is outside \[0, 9\)"),
]
OF_LOG_PROBS = [
    ({"entropy": "yes"}, ValueError, r"entropy='yes' must be one of False, True, 'detached'"),
    ({"entropy": 1}, ValueError, r"entropy=1 must be one of False, True, 'detached'"),
    ({"ids": T}, ValueError, r"ids (must have shape \(\.\.\., K\)|\(2, 3\) must have the shape of e).*\(2, 3\)"),
    ({"ids": T[:1, :, None]}, ValueError, r"(ids|got ids) \(1, 3, 1\)"),
    ({"ids": np.zeros((2, 3, 257), int)}, ValueError, r"K <= 256, got ids \(2, 3, 257\)|ids \(2, 3, 257\).*1 to 256"),
    ({"ids": E}, TypeError, r"ids must be of an integer type, got ids float32"),
    ({"top_k": 10}, ValueError, r"top_k=10 must be (in \[0, 9\], for V = 9|from 0 to 9)"),
    ({"top_k": -1}, ValueError, r"top_k=-1 must be (in \[0, 9\]|from 0 to 9)"),
    ({"top_k": 1.5}, TypeError, r"top_k must be an integer, got float"),
    ({"targets": None, "shift": 1}, ValueError, r"shift=1 (moves targets, and there are none|needs targets)"),
    ({"predicted": 1}, ValueError, "predicted=1 must be one of False, True"),
    ({"mean_logit": None}, ValueError, "mean_logit=None must be one of False, True"),
]
OF_TOKEN_LOSS = [
    ({"fn": 3}, TypeError, "fn must be a function of numbers and arguments, got int"),
    ({"fn": times, "arguments": [ones(2)]}, ValueError, r"argument 0 of fn \(2,\) must broadcast.*\(2, 3\)"),
    ({"fn": times, "arguments": [ones(2, 3)], "shift": 1}, ValueError, r"of fn \(2, 3\) must .*\(2, 2\)"),
    ({"entropy": "detached"}, ValueError, r"entropy='detached' must be one of False, True"),
    ({"return_numbers": 1}, ValueError, "return_numbers=1 must be one of False, True"),
    ({"reduction": "max"}, ValueError, "reduction='max' must be one of 'mean', 'sum', 'none'"),
    ({"num_items": 3, "reduction": "sum"}, ValueError, "num_items divides the loss with reduction='mean' only"),
    ({"num_items": ones(2)}, ValueError, r"num_items must be a number or a .*\(2,\)"),
]
DISTILLED = {"e": ones(40, 16), "c": ones(90, 16), "teacher_e": ones(40, 24), "teacher_c": ones(90, 24)}
OF_DIVERGENCE = [
    ({"divergence": "kl"}, ValueError, "divergence='kl' must be one of 'forward_kl', 'reverse_kl', 'jsd'"),
    ({"beta": 0.0}, ValueError, "beta=0.0 .* divergence='forward_kl' .* divergence='reverse_kl'"),
    ({"beta": 1}, ValueError, "beta=1 must be above 0 and below 1 .*'forward_kl' .*'reverse_kl'"),
    ({"beta": float("nan")}, ValueError, "beta=nan"),
    ({"beta": ones()}, TypeError, "beta must be a Python number"),
    ({"reduction": "max"}, ValueError, "reduction='max'"),
    ({"return_entropy": 1}, ValueError, "return_entropy=1 must be one of False, True"),
    ({"num_items": 3, "reduction": "sum"}, ValueError, "num_items"),
    ({"num_items": ones(3)}, ValueError, r"num_items must be a number or a .*\(3,\)"),
    ({"token_weight": ones(3)}, ValueError, r"token_weight \(3,\) and e \(40, 16\)"),
    ({"token_weight": ones(40, dtype=np.complex64)}, TypeError, "token_weight must be real.*complex64"),
    ({"teacher_e": ones(39, 24)}, ValueError, r"teacher_e \(39, 24\) and e \(40, 16\)"),
    ({"teacher_e": ones(40, 25)}, ValueError, r"teacher_e \(40, 25\) and teacher_c \(90, 24\)"),
    ({"teacher_c": ones(91, 24)}, ValueError, r"teacher_c must have the vocabulary of c, 90, and has 91.*c \(90, 16\)"),
    ({"teacher_c": ones(24, 90)}, ValueError, r"teacher_e must have.*teacher_vocab_axis=1\?"),
    (
        {"teacher_c": ones(90, 24, dtype=np.float16)},
        TypeError,
        r"teacher_c must be of teacher_e's type.*teacher_c\.(astype|to)\(teacher_e\.dtype\)",
    ),
    ({"teacher_e": [1.0]}, TypeError, r"teacher_e must be an? .*, got list: write \w+\.\w+\(teacher_e\)"),
    ({"teacher_e": ones(40, 24, dtype=np.int32)}, TypeError, "teacher_e must be one of .*int32"),
    ({"teacher_bias": ones(3)}, ValueError, r"teacher_bias must have shape \(V,\) = \(90,\).*teacher_bias \(3,\)"),
    ({"teacher_softcap": -1.0}, ValueError, "teacher_softcap=-1.0"),
    ({"teacher_logit_scale": "x"}, TypeError, "teacher_logit_scale must be a Python number"),
    ({"teacher_logit_scale": 1e39}, ValueError, r"teacher_logit_scale=1e\+39 must be finite in float32"),
    ({"teacher_vocab_axis": 2}, ValueError, "teacher_vocab_axis=2"),
    ({"c": ones(90, 17)}, ValueError, r"e \(40, 16\) and c \(90, 17\)"),
    ({"e": ones(40, 16, dtype=np.int32)}, TypeError, "^e must be one of"),
    ({"bias": ones(91)}, ValueError, r"^bias must have shape \(V,\)"),
    ({"softcap": 0.0}, ValueError, r"^softcap=0\.0"),
    ({"vocab_axis": 2}, ValueError, "^vocab_axis=2"),
    ({"impl": "triton"}, ValueError, r"impl='triton'.*'auto'"),
    ({"memory_budget": -1}, ValueError, "memory_budget=-1"),
]
LEAF, MASK = torch.ones((), requires_grad=True), torch.ones(6, dtype=torch.bool)
NOT_MINE = {"vocab_parallel": 3}, TypeError, r"vocab_parallel must be a cce_torch\.VocabParallel, got int"
LEAVES = {"temperature": torch.ones(3, requires_grad=True)}, TypeError, r"temperature gets no gradient.*detach"
IN_TORCH = {
    "linear_log_probs": [({"ids": E}, TypeError, r": write ids\.long\(\)"), LEAVES, NOT_MINE],
    "linear_token_loss": [
        ({"fn": lambda n: 1.0}, TypeError, r"fn must return a torch\.Tensor.*returned float"),
        ({"fn": lambda n: n.lse[MASK]}, ValueError, r"fn fails for 2 tokens: The shape of the mask \[6\].*as an"),
        ({"fn": times, "arguments": [LEAF]}, TypeError, "argument 0 of fn requires a gradient.*linear_log_probs"),
        NOT_MINE,
    ],
    "linear_divergence": [
        ({"temperature": torch.ones(40, requires_grad=True)}, TypeError, "temperature gets no gradient"),
        ({"token_weight": torch.ones(40, requires_grad=True)}, TypeError, "token_weight gets no gradient.*detach"),
    ],
}
IN_BOTH = {
    "linear_log_probs": OF_TOKENS + OF_LOG_PROBS,
    "linear_token_loss": OF_TOKENS + OF_TOKEN_LOSS,
    "linear_divergence": OF_DIVERGENCE,
}
OF_FUNCTIONS = [(p, name, *row) for p in (cce_jax, cce_torch) for name, rows in IN_BOTH.items() for row in rows]
OF_FUNCTIONS += [(cce_torch, name, *row) for name, rows in IN_TORCH.items() for row in rows]


def named(x: Any) -> str:
    return getattr(x, "__name__", re.sub(r" at 0x\w+", "", str(x)))[:40]


@pytest.mark.parametrize(("package", "name", "changed", "error", "message"), OF_FUNCTIONS, ids=named)
def test_other_functions_raise(package, name, changed, error, message):
    make = tensor if package is cce_torch else jnp.asarray
    given = {"e": E, "c": C, "targets": T, **({"fn": log_prob} if name == "linear_token_loss" else {})}
    given = (DISTILLED | {"divergence": "jsd"} if name == "linear_divergence" else given) | changed
    given = {k: make(x) if isinstance(x, np.ndarray) else x for k, x in given.items()}
    arguments = [make(x) if isinstance(x, np.ndarray) else x for x in given.pop("arguments", ())]
    first = [given.pop(k) for k in ("e", "c", "targets", "fn") if arguments and k in given]
    with pytest.raises(error, match=message):
        getattr(package, name)(*first, *arguments, **given)


NO_ARRAYS = {
    "None": None,
    "a list": [1.0],
    "a string": "abc",
    "a key": jax.random.key(0),
    "a sparse array": jax.experimental.sparse.BCOO.fromdense(jnp.ones((2, 3))),
    "a tensor": torch.ones(3),
}
ARRAYS_OF = {
    "linear_cross_entropy": ("e", "c", "targets", "bias", "class_weight", "token_weight", "num_items"),
    "linear_log_probs": ("e", "c", "targets", "bias", "ids", "temperature"),
    "linear_token_loss": ("e", "c", "targets", "bias", "temperature", "num_items", "argument 0 of fn"),
    "linear_divergence": (
        *("e", "c", "bias", "teacher_e", "teacher_c", "teacher_bias", "token_weight", "temperature", "num_items"),
    ),
}
MAY_BE_NONE = {"bias", "class_weight", "token_weight", "ids", "teacher_bias", "num_items"}


@pytest.mark.parametrize("kind", NO_ARRAYS)
@pytest.mark.parametrize(("function", "name"), [(f, name) for f, names in ARRAYS_OF.items() for name in names])
def test_what_is_no_array_is_named_in_every_function_of_jax(function, name, kind):
    given = {"e": E, "c": C, **({} if function == "linear_divergence" else {"targets": T})}
    given |= {"teacher_e": E, "teacher_c": C} if function == "linear_divergence" else {}
    given |= {"fn": log_prob} if function == "linear_token_loss" else {}
    bad = NO_ARRAYS[kind]
    if bad is None and (name in MAY_BE_NONE or (function, name) == ("linear_log_probs", "targets")):
        return
    call = partial(getattr(cce_jax, function), **given | {name: bad})
    if name == "argument 0 of fn":
        call = partial(getattr(cce_jax, function), E, C, T, lambda numbers, x: numbers.log_probs * x, bad)
    with pytest.raises(TypeError, match=rf"^{name} (must be|is) a") as raised:
        call()
    others = {f for f in ARRAYS_OF if f in str(raised.value)} - {function}
    assert not others


NO_TENSORS = {
    "None": None,
    "an array of NumPy": np.ones((2, 3), np.float32),
    "a list": [1.0],
    "a string": "abc",
    "a sparse tensor": torch.ones(2, 3).to_sparse(),
    "a nested tensor": torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]),
    "a jagged tensor": torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged),
    "an array of JAX": jnp.ones(3),
    "a tensor without memory": torch.ones(2, 3, device="meta"),
}


@pytest.mark.parametrize("kind", NO_TENSORS)
@pytest.mark.parametrize(("function", "name"), [(f, name) for f, names in ARRAYS_OF.items() for name in names])
def test_what_is_no_tensor_is_named_in_every_function_of_torch(function, name, kind):
    call, bad = getattr(cce_torch, function), NO_TENSORS[kind]
    e, c, targets = map(tensor, (E, C, T))
    given = {"e": e, "c": c, **({} if function == "linear_divergence" else {"targets": targets})}
    given |= {"teacher_e": e, "teacher_c": c} if function == "linear_divergence" else {}
    given |= {"fn": log_prob} if function == "linear_token_loss" else {}
    if bad is None and (name in MAY_BE_NONE or (function, name) == ("linear_log_probs", "targets")):
        return
    run = partial(call, **given | {name: bad})
    if name == "argument 0 of fn":
        run = partial(call, e, c, targets, lambda numbers, x: numbers.log_probs * x, bad)
    with pytest.raises((TypeError, ValueError), match=rf"^{name} (must be|is a|of shape)") as raised:
        run()
    assert not {f for f in ARRAYS_OF if f in str(raised.value)} - {function}


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_ids_of_every_integer_type_are_compared_before_they_are_narrowed(kind):
    """A vocabulary that 8 bits do not hold, and ids that would wrap into it."""
    c = jax.random.normal(jax.random.key(0), (300, D))
    info = np.iinfo(kind)
    outside = {8: None, 16: 400, 32: 2**31 - 1, 64: 2**32 + 5}[info.bits]
    ids = np.array([5, info.max if outside is None else outside, 100], kind)
    found = cce_jax.linear_log_probs(E, c, T, ids=np.broadcast_to(ids, (2, 3, 3))).id_log_probs
    whole = cce_jax.linear_log_probs(E, c, T, ids=np.broadcast_to(np.arange(256, dtype=np.int32), (2, 3, 256)))
    want = [whole.id_log_probs[..., i] if i < 256 else np.full((2, 3), -np.inf) for i in ids.tolist()]
    np.testing.assert_allclose(found, np.stack(want, -1), rtol=1e-5)
    given = torch.from_numpy(np.array(np.broadcast_to(ids, (2, 3, 3))))
    of_torch = partial(cce_torch.linear_log_probs, tensor(E), torch.tensor(np.asarray(c)), impl="reference")
    np.testing.assert_allclose(of_torch(torch.tensor(T), ids=given).id_log_probs, np.stack(want, -1), rtol=1e-5)
    np.testing.assert_allclose(of_torch(given[..., 0]).log_probs, want[0], rtol=1e-5)


def in_torch(e, c, targets, **options):
    """cce_torch's answer to the same arrays as tensors."""
    arguments = {"e": e, "c": c, "targets": targets, **options}
    for name, x in arguments.items():
        if isinstance(x, jax.Array | np.ndarray):
            arguments[name] = tensor(np.asarray(x))
    return cce_torch.linear_cross_entropy(**arguments)


@pytest.mark.parametrize("call", [linear_cross_entropy, in_torch])
@pytest.mark.parametrize(("changed", "error", "message"), ROWS, ids=lambda x: str(x)[:40])
def test_raises(changed, error, message, call):
    arguments = {"e": E, "c": C, "targets": T, **changed}
    with pytest.raises(error, match=message):
        call(arguments.pop("e"), arguments.pop("c"), arguments.pop("targets"), **arguments)


@pytest.mark.parametrize("package", [cce_jax, cce_torch])
@pytest.mark.parametrize("name", ["linear_log_probs", "linear_token_loss", "linear_divergence"])
@pytest.mark.parametrize(("temperature", "error", "message"), OF_TEMPERATURE, ids=lambda x: str(x)[:40])
def test_a_temperature_is_refused_in_the_same_words(package, name, temperature, error, message):
    make = tensor if package is cce_torch else jnp.asarray
    arrays = {"linear_divergence": (E, C), "linear_token_loss": (T,), "linear_log_probs": (T,)}[name]
    fn = (lambda numbers: numbers.log_probs,) if name == "linear_token_loss" else ()
    temperature = make(temperature) if isinstance(temperature, np.ndarray) else temperature
    with pytest.raises(error, match=f"^{message}$"):
        getattr(package, name)(*map(make, (E, C, *arrays)), *fn, temperature=temperature)


@pytest.mark.parametrize("package", [cce_jax, cce_torch])
def test_a_temperature_is_any_array_of_real_numbers(package):
    make = tensor if package is cce_torch else jnp.asarray
    run = partial(package.linear_log_probs, *map(make, (E, np.arange(36.0, dtype=np.float32).reshape(V, D), T)))
    want = np.asarray(run(temperature=2.0).lse)
    for temperature in (2, np.float32(2), *(make(np.full(s, 2, x)) for s in ((), 3) for x in (np.int32, np.float16))):
        np.testing.assert_array_equal(run(temperature=temperature).lse, want)
    assert np.isfinite(np.asarray(run(temperature=1e-50).lse)).all()


@pytest.mark.parametrize(("changed", "error", "message"), TORCH_ROWS, ids=lambda x: str(x)[:40])
def test_torch_raises(changed, error, message):
    with pytest.raises(error, match=message):
        in_torch(**{"e": E, "c": C, "targets": T, **changed})


@pytest.mark.parametrize("impl", ["torch_compile", "reference"])
def test_float64_takes_numbers_that_float32_does_not_hold(impl, monkeypatch):
    monkeypatch.setattr(compiled, "_compiled", lambda function, variant: function)
    given = dict(e=np.float64(E), c=np.float64(C), targets=T, impl=impl)
    assert in_torch(**given, logit_scale=1e39).isfinite()
    assert in_torch(**given, num_items=1e39) > 0


@pytest.mark.parametrize("impl", contract.IMPLS)
def test_an_integer_that_int32_does_not_hold_is_a_number_of_items(impl):
    total = in_torch(E, C, T, impl=impl, reduction="sum")
    torch.testing.assert_close(in_torch(E, C, T, impl=impl, num_items=3_000_000_000), total / 3e9)


@pytest.mark.parametrize("name", ["e", "c", "targets", "bias", "class_weight", "token_weight", "num_items"])
def test_an_array_of_the_other_framework_is_named(name):
    arrays = {"e": E, "c": C, "targets": T, "bias": C[:, 0], "class_weight": C[:, 0]}
    arrays |= {"token_weight": E[:, :, 0], "num_items": np.ones((), np.float32)}
    tensors = {key: torch.tensor(x) for key, x in arrays.items()}
    with pytest.raises(TypeError, match=rf"^{name} is a torch\.Tensor: cce_torch\.linear_cross_entropy takes those"):
        linear_cross_entropy(**{**arrays, name: tensors[name]})
    with pytest.raises(TypeError, match=rf"^{name} is a jax\.Array: cce_jax\.linear_cross_entropy .*from_dlpack"):
        cce_torch.linear_cross_entropy(**{**tensors, name: jnp.asarray(arrays[name])})
    if name != "num_items":  # NumPy's numbers are numbers
        with pytest.raises(TypeError, match=rf"^{name} must be a torch\.Tensor.*torch\.from_numpy\({name}\)"):
            cce_torch.linear_cross_entropy(**{**tensors, name: arrays[name]})


@pytest.mark.parametrize("name", ["e", "c", "targets", "bias", "class_weight", "token_weight", "num_items"])
def test_a_tensor_without_plain_numbers_is_named(name):
    tensors = {"e": E, "c": C, "targets": T, "bias": C[:, 0], "class_weight": C[:, 0]}
    tensors |= {"token_weight": E[:, :, 0], "num_items": np.ones(())}
    tensors = {key: torch.tensor(x) for key, x in tensors.items()}
    shape = re.escape(str(tuple(tensors[name].shape)))
    with pytest.raises(TypeError, match=rf"^{name} of shape {shape} on meta has no memory"):
        cce_torch.linear_cross_entropy(**{**tensors, name: tensors[name].to("meta")})
    with pytest.raises(TypeError, match=rf"^{name} is a sparse tensor.*sparse_coo: pass {name}\.to_dense\(\)"):
        cce_torch.linear_cross_entropy(**{**tensors, name: tensors[name].to_sparse()})


def test_tensors_on_different_devices_are_named():
    with FakeTensorMode(allow_non_fake_inputs=True):
        e, c = torch.ones(6, D), torch.ones(V, D, device="cuda")
        with pytest.raises(ValueError, match=r"one device.*e cpu, c cuda"):
            cce_torch.linear_cross_entropy(e, c, torch.zeros(6, dtype=torch.int64))


@pytest.mark.parametrize("name", ["bias", "token_weight", "num_items"])
def test_the_module_says_what_goes_to_the_call(name):
    with pytest.raises(TypeError, match=rf"^{name} belongs to a batch.*\(e, c, targets, {name}={name}\)"):
        cce_torch.LinearCrossEntropy(**{name: 3})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"impl": "tritan"}, ValueError, r"impl='tritan'.*'torch_compile'"),
        ({"shift": 1.0}, TypeError, r"shift must be an integer"),
        ({"softcap": -1.0}, ValueError, r"softcap=-1\.0.*positive"),
        ({"gradient_tolerance": 1.0}, ValueError, r"gradient_tolerance=1\.0 must be in \[0, 1\)"),
        ({"class_weight": [1.0] * V}, TypeError, r"class_weight must be a .*got list: write torch\.tensor"),
    ],
)
@pytest.mark.parametrize("make", [cce_torch.LinearCrossEntropy, partial(cce_torch.LinearCrossEntropyHead, D, V)])
def test_the_module_refuses_wrong_options_when_it_is_made(make, options, error, message):
    with pytest.raises(error, match=message):
        make(**options)


@pytest.mark.parametrize(("given", "head"), [((64, 1000), "64, 1000"), ((-100,), "in_features, out_features")])
def test_the_module_takes_its_options_by_name(given, head):
    with pytest.raises(TypeError, match=rf"options by name, got .* is cce_torch\.LinearCrossEntropyHead\({head}\)$"):
        cce_torch.LinearCrossEntropy(*given)


def test_the_module_names_every_option_if_one_is_unknown():
    with pytest.raises(TypeError, match=r"unknown options \['sofcap'\].*class_weight.* softcap.* z_loss"):
        cce_torch.LinearCrossEntropy(sofcap=3.0)


@pytest.mark.parametrize("call", [linear_cross_entropy, in_torch])
@pytest.mark.parametrize("budget", [0, 2e9, np.int64(2**31), np.float32(2**31), 10**30, "all"])
def test_a_memory_budget_is_any_whole_number_or_all(budget, call):
    assert call(E, C, T, memory_budget=budget) == call(E, C, T)


def test_all_is_more_than_any_machine_has_and_an_operator_takes_it():
    assert contract.memory_budget("all") == contract.memory_budget(10**30) == contract.EVERYTHING
    assert 2**60 < contract.EVERYTHING < 2**63
    assert contract.memory_budget(2e9) == 2 * 10**9
    assert type(contract.memory_budget(np.int32(7))) is int


def test_float64_names_what_can_hold_it():
    e, c = E.astype(np.float64), C.astype(np.float64)
    with pytest.raises(TypeError, match=r"float64.*jax_enable_x64.*chunked"):
        linear_cross_entropy(e, c, T)
    for impl in ("cce", "chunked"):
        with pytest.raises(TypeError, match=rf"impl='{impl}'.*float64.*'reference' and 'torch_compile'"):
            in_torch(e, c, T, impl=impl)
    with small_blocks():  # to compile takes seconds
        assert in_torch(e, c, T).dtype == torch.float64


def test_the_same_errors_under_jit():
    with pytest.raises(ValueError, match=r"targets.*\(2, 4\)"):
        jax.jit(linear_cross_entropy)(E, C, np.zeros((2, 4), np.int32))


def test_check_targets_names_the_first_bad_position():
    targets = T.copy()
    targets[0, 1], targets[1, 0], targets[1, 2] = -100, 9, -7
    first = T.copy()
    first[:, 0] = 50  # the first target of a sequence is nobody's after a shift
    for call in (linear_cross_entropy, in_torch):
        with pytest.raises(ValueError, match=r"targets\[1, 0\] = 9 is outside \[0, 9\)"):
            call(E, C, targets, check_targets=True)
        with pytest.raises(ValueError, match=r"targets\[1, 2\] = -7 .*=-100: .* did you mean ignore_index=-7"):
            call(E, C, np.where(targets == 9, 0, targets), check_targets=True)
        assert np.isfinite(call(E, C, first, check_targets=True, shift=1))
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(lambda t: linear_cross_entropy(E, C, t, check_targets=True))(T)


def test_an_old_gpu_is_named_and_so_is_what_works(monkeypatch):
    from cce_jax import prepare
    from cce_kernels.device import Gpu

    monkeypatch.setattr(prepare, "local_gpu", lambda: Gpu("7.5", 40))
    with pytest.raises(NotImplementedError, match=r"8\.0 or more.*7\.5.*'chunked'"):
        linear_cross_entropy(E, C, T, impl="cce")
    assert np.isfinite(linear_cross_entropy(E, C, T))  # auto
    monkeypatch.setattr(prepare, "local_gpu", lambda: Gpu("gfx942", 304))
    with pytest.raises(NotImplementedError, match="gfx942"):
        linear_cross_entropy(E, C, T, impl="cce")


@pytest.mark.parametrize("package", [cce_jax, cce_torch])
def test_a_memory_budget_below_a_mebibyte_was_meant_in_mebibytes(package, monkeypatch):
    monkeypatch.setattr(contract, "LEAST_BUDGET", 2**20)
    arrays = (E, C, T) if package is cce_jax else tuple(torch.tensor(np.asarray(x)) for x in (E, C, T))
    for size in (1, 640, 2.0**20 - 1):
        with pytest.raises(ValueError, match=rf"memory_budget={size!r} is in bytes: for MiB write {size!r} \* 2\*\*20"):
            package.linear_cross_entropy(*arrays, memory_budget=size)
    for size in (0, 2**20):
        package.linear_cross_entropy(*arrays, memory_budget=size)

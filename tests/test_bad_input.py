"""The bad-input table of all functions of both packages: each row raises, names its argument and prints what it got."""

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
from cce_jax import linear_cross_entropy, prepare
from cce_kernels import contract
from cce_kernels.device import Gpu
from tests.call_torch import small_blocks, tensor

D, V = 4, 9
E, C, T = np.ones((2, 3, D), np.float32), np.ones((V, D), np.float32), np.zeros((2, 3), np.int32)


def ones(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def log_prob(numbers):
    return numbers.log_probs


def times(numbers, x):
    return numbers.log_probs * x


OF_E, OF_TARGETS = {"e": E, "c": C}, {"e": E, "c": C, "targets": T}
GIVEN = {
    "linear_cross_entropy": OF_TARGETS,
    "linear_log_probs": OF_TARGETS,
    "linear_token_loss": OF_TARGETS | {"fn": log_prob},
    "linear_divergence": OF_E | {"teacher_e": ones(2, 3, 5), "teacher_c": ones(V, 5), "divergence": "jsd"},
}
LOSS, NUMBERS, OWN, DIVERGENCE = GIVEN
PACKAGES = pytest.mark.parametrize("package", [cce_jax, cce_torch])


def call(package, function: str, changed: dict[str, Any]) -> Any:
    """The function of its usual arguments, some of which are changed: tensors in cce_torch. arguments: those of fn."""

    def made(x: Any) -> Any:
        return tensor(np.asarray(x)) if package is cce_torch and isinstance(x, jax.Array | np.ndarray) else x

    given = {k: made(x) for k, x in (GIVEN[function] | changed).items()}
    arguments = [made(x) for x in given.pop("arguments", ())]
    first = [given.pop(k) for k in ("e", "c", "targets", "fn") if arguments]
    return getattr(package, function)(*first, *arguments, **given)


Row = tuple[dict[str, Any], type[Exception], str]
OF_EVERY: list[Row] = [
    ({"c": ones(V, D + 1)}, ValueError, r"e .*\(2, 3, 4\).*c \(9, 5\)"),
    ({"c": C.T}, ValueError, r"e .*\(2, 3, 4\).*c \(4, 9\): did you mean vocab_axis=1\?"),
    ({"vocab_axis": 1}, ValueError, r"e .*\(2, 3, 4\).*c \(9, 4\): did you mean vocab_axis=0\?"),
    ({"e": ones(2, 3, V)}, ValueError, r"e \(2, 3, 9\) .*If e holds logits, give the hidden states"),
    ({"c": ones(D + 1, V)}, ValueError, r"e .*c \(5, 9\)$"),
    ({"c": ones(1, V, D)}, ValueError, r"c must have shape \(V, D\).*\(1, 9, 4\)"),
    ({"c": ones(0, D)}, ValueError, r"V, D >= 1.*\(0, 4\)"),
    ({"bias": ones(D)}, ValueError, r"bias.*\(9,\).*\(4,\)"),
    ({"bias": jnp.ones(V, jnp.float16)}, TypeError, r"bias must be of c's.*float16.*float32: write bias\.\w+\(c\.dt"),
    ({"bias": np.ones(V, np.int32)}, TypeError, r"bias must be one of.*int32"),
    ({"e": E.astype(np.int32)}, TypeError, r"e must be one of.*int32"),
    ({"c": C.astype(np.int8)}, TypeError, r"c must be one of.*int8"),
    (
        {"c": jnp.ones((V, D), jnp.bfloat16)},
        TypeError,
        r"c must be of e's type, or float32 beside a 16-bit e, got c bfloat16 and e float32: "
        r"write c\.(astype|to)\(e\.dtype\) or e\.(astype|to)\(c\.dtype\)$",
    ),
    ({"impl": "cce_exact"}, ValueError, "impl='cce_exact' must be one of 'auto', 'cce', .*'cce' has exact gradients"),
    ({"impl": "triton"}, ValueError, r"impl='triton'.*'auto', 'cce', 'chunked', 'reference'"),
    ({"vocab_axis": 2}, ValueError, r"vocab_axis=2.*0, 1"),
    ({"vocab_axis": True}, ValueError, r"vocab_axis=True.*0, 1"),
    ({"softcap": -30.0}, ValueError, r"softcap=-30\.0.*positive"),
    ({"softcap": 0.0}, ValueError, r"softcap=0\.0.*positive"),
    ({"softcap": float("nan")}, ValueError, r"softcap=nan.*positive"),
    ({"softcap": "30"}, TypeError, r"softcap.*number.*str"),
    ({"logit_scale": float("inf")}, ValueError, r"logit_scale=inf"),
    ({"logit_scale": jnp.ones(())}, TypeError, r"logit_scale.*number"),
    ({"logit_scale": -1e39}, ValueError, r"logit_scale=-1e\+39 must be finite in float32"),
    ({"memory_budget": -1}, ValueError, r"memory_budget=-1 .*bytes, at least 0.*'all'"),
    ({"memory_budget": -2e9}, ValueError, r"memory_budget=-2000000000\.0 .*at least 0"),
    ({"memory_budget": 1.5}, ValueError, r"memory_budget=1\.5 must be a whole number of bytes"),
    ({"memory_budget": float("nan")}, ValueError, r"memory_budget=nan must be a whole number"),
    ({"memory_budget": float("inf")}, ValueError, r"memory_budget=inf .*'all'"),
    ({"memory_budget": "300 MiB"}, TypeError, r"memory_budget='300 MiB' must be a whole number.*2e9, or 'all'"),
    ({"memory_budget": True}, TypeError, r"memory_budget=True .*'all' .*; leave it out for 640 MiB or more"),
]
OF_NAMED_TARGETS: list[Row] = [
    ({"targets": T[:, :2]}, ValueError, r"targets.*\(2, 3\).*\(2, 2\)"),
    ({"targets": np.zeros(6, np.int32)}, ValueError, r"targets.*\(6,\)"),
    ({"targets": T.astype(np.float32)}, TypeError, r"targets.*integer.*float32"),
    ({"targets": T.astype(bool)}, TypeError, r"targets.*integer.*bool"),
    ({"targets": T + V, "check_targets": True}, ValueError, r"targets\[0, 0\] = 9 is outside \[0, 9\)"),
    ({"check_targets": 2}, ValueError, "check_targets=2 must be one of False, True"),
    ({"shift": 3}, ValueError, r"shift=3.*\[0, T\).*T = 3"),
    ({"shift": -1}, ValueError, r"shift=-1.*\[0, T\)"),
    ({"shift": 1.0}, TypeError, r"shift must be an integer.*float"),
    ({"e": E[0, 0], "targets": np.array(0), "shift": 1}, ValueError, r"shift=1.*\[0, T\).*targets \(\)"),
    ({"e": E[:, :1], "targets": T[:, :1], "shift": 2}, ValueError, r"shift=2.*\[0, T\).*T = 1"),
    ({"ignore_index": None}, TypeError, r"ignore_index must be an integer.*NoneType"),
]
OF_LOSSES: list[Row] = [
    ({"num_items": ones(2)}, ValueError, r"num_items.*\(2,\)"),
    ({"num_items": -1}, ValueError, r"num_items=-1.*at least 0"),
    ({"num_items": np.float32(-2)}, ValueError, r"num_items=.*-2\.0.*at least 0"),
    ({"num_items": float("nan")}, ValueError, r"num_items=nan.*at least 0"),
    ({"num_items": "3"}, TypeError, r"num_items must be a number.*str"),
    ({"num_items": np.complex64(3)}, TypeError, r"num_items must be real, got complex64"),
    ({"num_items": 1e39}, ValueError, r"num_items=1e\+39 must be finite in float32"),
    ({"num_items": 3, "reduction": "sum"}, ValueError, r"num_items.*reduction='mean' only.*reduction='sum'"),
    ({"num_items": np.ones(()), "reduction": "none"}, ValueError, r"num_items.*reduction='mean' only.*'none'"),
    ({"reduction": "avg"}, ValueError, r"reduction='avg'.*'mean', 'sum', 'none'"),
]
OF_CROSS_ENTROPY: list[Row] = [
    ({"return_lse": "no"}, ValueError, "return_lse='no' must be one of False, True"),
    ({"sofcap": 3.0}, TypeError, r"unknown options \['sofcap'\]; allowed: .*softcap"),
    ({"filter_eps": None}, TypeError, r"unknown options \['filter_eps'\]; for filter_eps write gradient_tolerance"),
    ({"lse_square_scale": 1}, TypeError, r"linear_cross_entropy: .*; for lse_square_scale write z_loss; .*: .*shift"),
    ({"class_weight": ones(V, 1)}, ValueError, r"class_weight.*\(9,\).*\(9, 1\)"),
    ({"class_weight": np.ones(V, np.complex64)}, TypeError, r"class_weight must be real.*complex64"),
    ({"token_weight": ones(6)}, ValueError, r"token_weight.*\(6,\).*\(2, 3\)"),
    ({"z_loss": float("nan")}, ValueError, r"z_loss=nan"),
    ({"z_loss": 1e39}, ValueError, r"z_loss=1e\+39 must be finite in float32"),
    ({"label_smoothing": 1.1}, ValueError, r"label_smoothing=1\.1.*\[0, 1\]"),
    ({"label_smoothing": -0.1}, ValueError, r"label_smoothing=-0\.1.*\[0, 1\]"),
    ({"label_smoothing": float("nan")}, ValueError, r"label_smoothing=nan.*\[0, 1\]"),
    ({"gradient_tolerance": 1.0}, ValueError, r"gradient_tolerance=1\.0 must be in \[0, 1\)"),
    ({"gradient_tolerance": -0.1}, ValueError, r"gradient_tolerance=-0\.1 must be in \[0, 1\)"),
    ({"gradient_tolerance": float("nan")}, ValueError, r"gradient_tolerance=nan must be finite"),
    ({"gradient_tolerance": None}, TypeError, r"gradient_tolerance must be a Python number, got NoneType"),
    ({"gradient_tolerance": jnp.zeros(())}, TypeError, r"gradient_tolerance must be .*: write float\(gradient_"),
]
OF_LOG_PROBS: list[Row] = [
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
OF_TOKEN_LOSS: list[Row] = [
    ({"fn": 3}, TypeError, "fn must be a function of numbers and arguments, got int"),
    ({"fn": times, "arguments": [ones(2)]}, ValueError, r"argument 0 of fn \(2,\) must broadcast.*\(2, 3\)"),
    ({"fn": times, "arguments": [ones(2, 3)], "shift": 1}, ValueError, r"of fn \(2, 3\) must .*\(2, 2\)"),
    ({"entropy": "detached"}, ValueError, r"entropy='detached' must be one of False, True"),
    ({"return_numbers": 1}, ValueError, "return_numbers=1 must be one of False, True"),
]
OF_DIVERGENCE: list[Row] = [
    ({"divergence": "kl"}, ValueError, "divergence='kl' must be one of 'forward_kl', 'reverse_kl', 'jsd'"),
    ({"beta": 0.0}, ValueError, "beta=0.0 .* divergence='forward_kl' .* divergence='reverse_kl'"),
    ({"beta": 1}, ValueError, "beta=1 must be above 0 and below 1 .*'forward_kl' .*'reverse_kl'"),
    ({"beta": float("nan")}, ValueError, "beta=nan"),
    ({"beta": ones()}, TypeError, "beta must be a Python number"),
    ({"return_entropy": 1}, ValueError, "return_entropy=1 must be one of False, True"),
    ({"token_weight": ones(3)}, ValueError, r"token_weight \(3,\) and e \(2, 3, 4\)"),
    ({"token_weight": ones(2, 3, dtype=np.complex64)}, TypeError, "token_weight must be real.*complex64"),
    ({"teacher_e": ones(2, 5, 5)}, ValueError, r"teacher_e \(2, 5, 5\) and e \(2, 3, 4\)"),
    ({"teacher_e": ones(2, 3, 6)}, ValueError, r"teacher_e \(2, 3, 6\) and teacher_c \(9, 5\)"),
    ({"teacher_c": ones(8, 5)}, ValueError, r"teacher_c must have the vocabulary of c, 9, and has 8.*c \(9, 4\)"),
    ({"teacher_c": ones(5, V)}, ValueError, r"teacher_e must have.*teacher_vocab_axis=1\?"),
    ({"teacher_c": ones(V, 5, dtype=np.float16)}, TypeError, r"teacher_c must be of teacher_e's .*\(teacher_e\.dtype"),
    ({"teacher_e": ones(2, 3, 5, dtype=np.int32)}, TypeError, "teacher_e must be one of .*int32"),
    ({"teacher_bias": ones(3)}, ValueError, r"teacher_bias must have shape \(V,\) = \(9,\).*teacher_bias \(3,\)"),
    ({"teacher_softcap": -1.0}, ValueError, "teacher_softcap=-1.0"),
    ({"teacher_logit_scale": "x"}, TypeError, "teacher_logit_scale must be a Python number"),
    ({"teacher_logit_scale": 1e39}, ValueError, r"teacher_logit_scale=1e\+39 must be finite in float32"),
    ({"teacher_vocab_axis": 2}, ValueError, "teacher_vocab_axis=2"),
]
OF_TEMPERATURES: list[Row] = [
    ({"temperature": given}, error, f"^{message}$")
    for given, error, message in [
        (0.0, ValueError, r"temperature=0\.0 must be finite and positive"),
        (-1, ValueError, r"temperature=-1 must be finite and positive"),
        (float("inf"), ValueError, r"temperature=inf must be finite and positive"),
        (float("nan"), ValueError, r"temperature=nan must be finite and positive"),
        (1e39, ValueError, r"temperature=1e\+39 must be finite in float32, in .* float32 embeddings .*"),
        ("1", TypeError, r"temperature must be a number or an array, got str"),
        (True, TypeError, r"temperature must be a number or an array, got bool"),
        ([1.0], TypeError, r"temperature must be a number or an array, got list.*"),
        (ones(2), ValueError, r"temperature must .*, \(2, 3\), got temperature \(2,\)"),
        (ones(1, 2, 3), ValueError, r"temperature must .*, \(2, 3\), got temperature \(1, 2, 3\)"),
        (np.ones(3, np.complex64), TypeError, r"temperature must be real, got temperature complex64"),
        (np.ones(3, bool), TypeError, r"temperature must be real, got temperature bool"),
    ]
]
LEAF, MASK = torch.ones((), requires_grad=True), torch.ones(6, dtype=torch.bool)
GRADED = torch.ones(2, 3, requires_grad=True)
IN_TORCH = {
    LOSS: [
        ({"c": torch.nn.Linear(D, V)}, TypeError, r"c must be a torch\.Tensor, got Linear: pass its weight, and its b"),
        ({"c": torch.nn.Embedding(V, D)}, TypeError, r"c must be a torch\.Tensor, got Embedding: pass its weight$"),
        ({"targets": T.tolist()}, TypeError, r"targets must be a torch\.Tensor, got list: write torch\.tensor\(tar"),
        ({"e": list(torch.ones(2, 3, D))}, TypeError, r"e must be a torch\.Tensor, got list: write torch\.stack\(e\)"),
        ({"targets": T.astype(np.float32)}, TypeError, r"got targets float32 of shape \(2, 3\): write targets\.long"),
        ({"targets": ones(2, 3, V)}, TypeError, r"targets .*: probabilities as targets are not supported"),
        ({"num_items": torch.ones((), dtype=torch.complex64)}, TypeError, r"num_items must be real, got complex64"),
        ({"accumulate_into": ones(D, V)}, ValueError, r"accumulate_into must have c's shape, \(9, 4\), got \(4, 9\)"),
        ({"accumulate_into": np.ones((V, D), int)}, TypeError, r"accumulate_into must be one of bfloat16, .*got int"),
        ({"accumulate_into": [1.0]}, TypeError, r"accumulate_into must be a torch\.Tensor, got list: write torch\.ten"),
        ({"accumulate_into": torch.ones(V, D, requires_grad=True)}, ValueError, r": pass accumulate_into\.detach\(\)"),
        ({"accumulate_into": ones(V, D)}, ValueError, r"accumulate_into gets the gradient of c, but c requires none"),
        ({"accumulate_into": torch.ones(V, D, device="meta")}, TypeError, r"accumulate_into .*meta"),
    ],
    NUMBERS: [
        ({"ids": E}, TypeError, r": write ids\.long\(\)"),
        ({"temperature": GRADED}, TypeError, r"temperature gets no gradient.*detach"),
        ({"vocab_parallel": 3}, TypeError, r"vocab_parallel must be a cce_torch\.VocabParallel, got int"),
    ],
    OWN: [
        ({"fn": lambda n: 1.0}, TypeError, r"fn must return a torch\.Tensor.*returned float"),
        ({"fn": lambda n: n.lse[MASK]}, ValueError, r"fn fails for 2 tokens: The shape of the mask \[6\].*as an"),
        ({"fn": times, "arguments": [LEAF]}, TypeError, "argument 0 of fn requires a gradient.*linear_log_probs"),
        ({"vocab_parallel": 3}, TypeError, r"vocab_parallel must be a cce_torch\.VocabParallel, got int"),
    ],
    DIVERGENCE: [
        ({"temperature": GRADED}, TypeError, "temperature gets no gradient"),
        ({"token_weight": GRADED}, TypeError, "token_weight gets no gradient.*detach"),
    ],
}


@dataclass
class Layer:
    """A layer of another library, such as Equinox' Linear (weight) and Flax NNX's Linear (kernel) and Embed."""

    weight: np.ndarray | None = None


IN_JAX: list[Row] = [
    ({"sharding": "data"}, TypeError, r"sharding must be a pair of jax\.sharding\.PartitionSpec.*data"),
    ({"c": Layer()}, TypeError, r"c must be an array, got Layer: pass its weight, with vocab_axis=0 if .* \(V, D\)"),
    ({"c": {"kernel": C.T}}, TypeError, r"c must .* got dict: pass its kernel, with vocab_axis=1 if .* \(D, V\)"),
    ({"c": {"embedding": C}}, TypeError, r"c must .* got dict: pass its embedding, with vocab_axis=0"),
    ({"e": E.tolist()}, TypeError, r"e must be an array, got list: write jnp\.asarray\(e\)"),
    ({"targets": T.astype(np.float32)}, TypeError, r"float32 of shape .*: write targets\.astype\(jnp\.int32\)"),
    ({"precision": "bf16"}, ValueError, r"precision='bf16' must be None, 'default', 'high', 'highest', or another"),
    ({"precision": ["highest", "highest"]}, ValueError, r"precision=\['highest', 'highest'\] must be None, 'default'"),
    ({"precision": 3}, ValueError, r"precision=3 must be None, 'default'"),
    ({"num_items": 10**400}, ValueError, r"num_items=10*0 must be finite"),
    ({"logit_scale": 10**400}, ValueError, r"logit_scale=10*0 must be finite"),
    ({"num_items": 3j}, TypeError, r"num_items must be .* complex"),
    ({"num_items": jnp.ones((), jnp.complex64)}, TypeError, r"num_items must be real, got complex64"),
    ({"logit_scale": jnp.ones(())}, TypeError, r"logit_scale must be a Python number.*: write float\(logit_scale\)"),
]
TABLE = [
    *((tuple(GIVEN), row) for row in OF_EVERY),
    *(((LOSS, NUMBERS, OWN), row) for row in OF_NAMED_TARGETS),
    *(((LOSS, OWN, DIVERGENCE), row) for row in OF_LOSSES),
    *(((NUMBERS, OWN, DIVERGENCE), row) for row in OF_TEMPERATURES),
    *(((LOSS,), row) for row in OF_CROSS_ENTROPY),
    *(((NUMBERS,), row) for row in OF_LOG_PROBS),
    *(((OWN,), row) for row in OF_TOKEN_LOSS),
    *(((DIVERGENCE,), row) for row in OF_DIVERGENCE),
]
EACH = [(package, *row) for row in TABLE for package in (cce_jax, cce_torch)]
EACH += [(cce_torch, (name,), row) for name, rows in IN_TORCH.items() for row in rows]
EACH += [(cce_jax, (LOSS,), row) for row in IN_JAX]


def named(x: Any) -> str:
    return getattr(x, "__name__", re.sub(r" at 0x\w+", "", str(x)))[:60]


@pytest.mark.parametrize(("package", "functions", "row"), EACH, ids=named)
def test_raises(package, functions, row):
    changed, error, message = row
    for function in functions:
        with pytest.raises(error, match=message) as raised:
            call(package, function, changed)
        assert len(str(raised.value)) < 900
        assert not {name for name in GIVEN if name in str(raised.value)} - {function, NUMBERS, DIVERGENCE}


# What is no array

NO_ARRAYS = {
    "None": (None, "must be"),
    "a list": ([1.0], "must be"),
    "a string": ("abc", "must be"),
    "a key": (jax.random.key(0), "(must be|is) a"),
    "a sparse array": (jax.experimental.sparse.BCOO((ones(1), np.zeros((1, 1), int)), shape=(3,)), "(must be|is) a"),
    "a tensor": (torch.ones(3), r"is a torch\.Tensor: cce_torch\.{function} takes those"),
}
NO_TENSORS = {
    "None": (None, "must be"),
    "a list": ([1.0], "must be"),
    "a string": ("abc", "must be"),
    "an array of NumPy": (ones(2, 3), r"must be a torch\.Tensor.*torch\.from_numpy\({name}\)"),
    "an array of JAX": (jnp.ones(3), r"is a jax\.Array: cce_jax\.{function} .*from_dlpack"),
    "a sparse tensor": (torch.ones(2, 3).to_sparse(), r"is a sparse tensor.*sparse_coo: pass {name}\.to_dense\(\)"),
    "a nested tensor": (torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]), "is a"),
    "a jagged tensor": (torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged), "is a"),
    "a tensor without memory": (torch.ones(2, 3, device="meta"), r"of shape \(2, 3\) on meta has no memory"),
}
ARRAYS = {
    LOSS: ("e", "c", "targets", "bias", "class_weight", "token_weight", "num_items"),
    NUMBERS: ("e", "c", "targets", "bias", "ids", "temperature"),
    OWN: ("e", "c", "targets", "bias", "temperature", "num_items", "argument 0 of fn"),
    DIVERGENCE: (
        *("e", "c", "bias", "teacher_e", "teacher_c"),
        "teacher_bias",
        "token_weight",
        "temperature",
        "num_items",
    ),
}
MAY_BE_NONE = {"bias", "class_weight", "token_weight", "ids", "teacher_bias", "num_items"}
WRONG = [(cce_jax, kind) for kind in NO_ARRAYS] + [(cce_torch, kind) for kind in NO_TENSORS]


@pytest.mark.parametrize(("package", "kind"), WRONG, ids=named)
def test_what_is_no_array_is_named_in_every_function(package, kind):
    bad, words = (NO_ARRAYS if package is cce_jax else NO_TENSORS)[kind]
    for function, names in ARRAYS.items():
        for name in names:
            if bad is None and (name in MAY_BE_NONE or (function, name) == (NUMBERS, "targets")):
                continue
            if isinstance(bad, np.ndarray) and name in ("num_items", "temperature"):
                continue  # NumPy's numbers are numbers
            given = GIVEN[function] | (
                {} if package is cce_jax else {k: x for k, x in TENSORS.items() if k in GIVEN[function]}
            )
            run = partial(getattr(package, function), **given | {name: bad})
            if name == "argument 0 of fn":
                run = partial(getattr(package, function), *(given[k] for k in OF_TARGETS), times, bad)
            with pytest.raises(
                (TypeError, ValueError), match=f"^{name} {words.format(name=name, function=function)}"
            ) as raised:
                run()
            assert not {f for f in ARRAYS if f in str(raised.value)} - {function}


TENSORS = {k: tensor(x) for of in GIVEN.values() for k, x in of.items() if isinstance(x, np.ndarray)}


def test_tensors_on_different_devices_are_named():
    with FakeTensorMode(allow_non_fake_inputs=True):
        e, c = torch.ones(6, D), torch.ones(V, D, device="cuda")
        with pytest.raises(ValueError, match=r"one device.*e cpu, c cuda"):
            cce_torch.linear_cross_entropy(e, c, torch.zeros(6, dtype=torch.int64))


# A loss of the user's own

FUNCTIONS = {
    "closes over a number for each token": (lambda x, six, two: x.log_probs * six, ValueError, "6.*as an argument"),
    "closes over two numbers": (lambda x, six, two: x.log_probs * two, ValueError, "2.*as an argument"),
    "sums": (lambda x, six, two: x.log_probs.sum(), ValueError, r"of the shape of log_probs, \(2,\).* of shape \(\)"),
    "complex": (lambda x, six, two: x.log_probs * 1j, TypeError, "fn must return real numbers of .*, got complex64"),
    "a comparison": (lambda x, six, two: x.log_probs > 0, TypeError, "fn must return .* got bool"),
    "nothing": (lambda x, six, two: None, TypeError, "returned NoneType: numbers.entropy is None without entropy=True"),
    "a tuple": (lambda x, six, two: (x.log_probs, 1), TypeError, "fn must return .* returned tuple"),
    "the entropy": (lambda x, six, two: x.log_probs - 0.1 * x.entropy, TypeError, "which is None: give entropy=True"),
}


@PACKAGES
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_loss_that_is_none_of_each_token_is_refused(name, package):
    """By one rule, whatever the number of chunks: for all six tokens at once some of these would run, and be wrong."""
    fn, error, message = FUNCTIONS[name]
    make = tensor if package is cce_torch else jnp.asarray
    fn = partial(fn, six=make(ones(6)), two=make(ones(2)))
    e = make(E).requires_grad_() if package is cce_torch else E  # the forward pass forms its gradient
    for impl in contract.IMPLS:
        for _ in range(2):  # what was refused once is refused again
            with pytest.raises(error, match=message):
                package.linear_token_loss(e, make(C), make(T), fn, impl=impl)


def test_a_function_that_jax_cannot_look_up_or_trace():
    @dataclass
    class Unhashable:
        weight: float

        def __call__(self, numbers):
            return self.weight * numbers.log_probs

    with pytest.raises(TypeError, match=r"fn must be hashable, .* Unhashable is not: define a function, and give"):
        cce_jax.linear_token_loss(E, C, T, Unhashable(1.0))
    with pytest.raises(jax.errors.TracerBoolConversionError):
        cce_jax.linear_token_loss(E, C, T, lambda numbers: numbers.lse if numbers.lse.sum() > 0 else -numbers.lse)


# Options

STATIC = "shift", "ignore_index", "softcap", "logit_scale", "label_smoothing", "z_loss", "memory_budget"


@pytest.mark.parametrize(("name", "allowed"), [*((x, 1) for x in STATIC), ("gradient_tolerance", 0.25)])
def test_an_option_that_jax_traces_is_to_be_static(name, allowed):
    def call(value):
        return linear_cross_entropy(E, C, T, **{name: value})

    with pytest.raises(TypeError, match=rf"^{name} must be .*JitTracer.*static_argnames='{name}'"):
        jax.jit(call)(allowed)
    assert np.isfinite(call(allowed))
    if name == "logit_scale":
        with pytest.raises(TypeError, match="or multiply e by a scale that is learned"):
            jax.grad(call)(1.0)


PRECISIONS = ["highest", "tensorfloat32", "BF16_BF16_F32", jax.lax.Precision.HIGH, ("highest", "highest")]


@pytest.mark.parametrize("precision", [*PRECISIONS, jax.lax.DotAlgorithmPreset.BF16_BF16_F32])
def test_every_precision_of_jax_is_taken(precision):
    assert np.isfinite(linear_cross_entropy(E, C, T, precision=precision, impl="chunked"))


@PACKAGES
def test_a_temperature_is_any_array_of_real_numbers(package):
    make = tensor if package is cce_torch else jnp.asarray
    run = partial(package.linear_log_probs, *map(make, (E, np.arange(36.0, dtype=np.float32).reshape(V, D), T)))
    want = np.asarray(run(temperature=2.0).lse)
    for temperature in (2, np.float32(2), *(make(np.full(s, 2, x)) for s in ((), 3) for x in (np.int32, np.float16))):
        np.testing.assert_array_equal(run(temperature=temperature).lse, want)
    assert np.isfinite(np.asarray(run(temperature=1e-50).lse)).all()


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_ids_of_every_integer_type_are_compared_before_they_are_narrowed(kind):
    """A vocabulary that 8 bits do not hold, and ids that would wrap into it."""
    c = np.random.default_rng(0).normal(size=(300, D)).astype(np.float32)
    info = np.iinfo(kind)
    outside = {8: None, 16: 400, 32: 2**31 - 1, 64: 2**32 + 5}[info.bits]
    ids = np.broadcast_to(np.array([5, info.max if outside is None else outside, 100], kind), (2, 3, 3))
    z = np.float64(E) @ np.float64(c).T
    log_p = np.append((z - np.logaddexp.reduce(z, -1, keepdims=True))[0, 0], -np.inf)
    want = np.broadcast_to(log_p[np.minimum(ids.astype(np.uint64), 300).astype(int)], (2, 3, 3))
    np.testing.assert_allclose(cce_jax.linear_log_probs(E, c, T, ids=ids).id_log_probs, want, rtol=1e-5)
    given = torch.from_numpy(ids.copy())
    of_torch = partial(cce_torch.linear_log_probs, tensor(E), tensor(c), impl="reference")
    np.testing.assert_allclose(of_torch(tensor(T), ids=given).id_log_probs, want, rtol=1e-5)
    np.testing.assert_allclose(of_torch(given[..., 0]).log_probs, want[..., 0], rtol=1e-5)


def test_float64():
    """What can hold it is named, and takes numbers that float32 does not hold."""
    wide = {"e": np.float64(E), "c": np.float64(C)}
    with pytest.raises(TypeError, match=r"float64.*jax_enable_x64.*chunked"):
        call(cce_jax, LOSS, wide)
    for impl in ("cce", "chunked"):
        with pytest.raises(TypeError, match=rf"impl='{impl}'.*float64.*'reference' and 'torch_compile'"):
            call(cce_torch, LOSS, wide | {"impl": impl})
    with small_blocks():  # to compile takes seconds
        for impl in ("auto", "torch_compile", "reference"):
            assert call(cce_torch, LOSS, wide | {"impl": impl}).dtype == torch.float64
            assert call(cce_torch, LOSS, wide | {"impl": impl, "logit_scale": 1e39}).isfinite()
            assert call(cce_torch, LOSS, wide | {"impl": impl, "num_items": 1e39}) > 0


@pytest.mark.parametrize("impl", contract.IMPLS)
def test_an_integer_that_int32_does_not_hold_is_a_number_of_items(impl):
    total, mean = (call(cce_torch, LOSS, {"impl": impl} | x) for x in ({"reduction": "sum"}, {"num_items": 3 * 10**9}))
    torch.testing.assert_close(mean, total / 3e9)


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
        ({"sofcap": 3.0}, TypeError, r"unknown options \['sofcap'\].*softcap.* z_loss"),
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


@PACKAGES
def test_a_memory_budget_is_any_whole_number_of_bytes_or_all(package, monkeypatch):
    """Below a mebibyte it was meant in mebibytes."""
    want = call(package, LOSS, {})
    for budget in (0, 2e9, np.int64(2**31), np.float32(2**31), 10**30, "all"):
        assert call(package, LOSS, {"memory_budget": budget}) == want
    monkeypatch.setattr(contract, "LEAST_BUDGET", 2**20)
    for size in (1, 640, 2.0**20 - 1):
        with pytest.raises(ValueError, match=rf"memory_budget={size!r} is in bytes: for MiB write {size!r} \* 2\*\*20"):
            call(package, LOSS, {"memory_budget": size})
    call(package, LOSS, {"memory_budget": 2**20})
    assert contract.memory_budget("all") == contract.memory_budget(10**30) == contract.EVERYTHING
    assert 2**60 < contract.EVERYTHING < 2**63, "an operator of PyTorch takes it"
    assert type(contract.memory_budget(np.int32(2**21))) is type(contract.memory_budget(2e9)) is int


def test_the_same_errors_under_jit():
    with pytest.raises(ValueError, match=r"targets.*\(2, 4\)"):
        jax.jit(linear_cross_entropy)(E, C, np.zeros((2, 4), np.int32))


@PACKAGES
def test_check_targets_names_the_first_bad_position(package):
    targets = T.copy()
    targets[0, 1], targets[1, 0], targets[1, 2] = -100, 9, -7
    first = T.copy()
    first[:, 0] = 50  # the first target of a sequence is nobody's after a shift
    run = partial(call, package, LOSS)
    with pytest.raises(ValueError, match=r"targets\[1, 0\] = 9 is outside \[0, 9\)"):
        run({"targets": targets, "check_targets": True})
    with pytest.raises(ValueError, match=r"targets\[1, 2\] = -7 .*=-100: .* did you mean ignore_index=-7"):
        run({"targets": np.where(targets == 9, 0, targets), "check_targets": True})
    assert np.isfinite(run({"targets": first, "check_targets": True, "shift": 1}))
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(lambda t: linear_cross_entropy(E, C, t, check_targets=True))(T)


def test_an_old_gpu_is_named_and_so_is_what_works(monkeypatch):
    monkeypatch.setattr(prepare, "local_gpu", lambda: Gpu("7.5", 40))
    with pytest.raises(NotImplementedError, match=r"8\.0 or more.*7\.5.*'chunked'"):
        linear_cross_entropy(E, C, T, impl="cce")
    assert np.isfinite(linear_cross_entropy(E, C, T))  # auto
    monkeypatch.setattr(prepare, "local_gpu", lambda: Gpu("gfx942", 304))
    with pytest.raises(NotImplementedError, match="gfx942"):
        linear_cross_entropy(E, C, T, impl="cce")

"""Named calls of the random search in PyTorch, held to float64: what it draws seldom, or never."""

from dataclasses import replace
from itertools import count, islice

import pytest

from cce_torch.on_jax import kinds
from tests.call_torch import in_chunks
from tests.search.calls import CROSS_ENTROPY, DIVERGENCE, DIVERGENCES, SHARED, TOKEN_LOSS, Call, Data, Program, draw
from tests.search.run import failures

FORMED = {CROSS_ENTROPY: "torch_finish", TOKEN_LOSS: "torch_chunk_gradients"}  # a program that runs in both cases
OF_A_STEP = {CROSS_ENTROPY: ["torch_begin"], TOKEN_LOSS: 3 * ["torch_chunk_statistics", "torch_chunk_gradients"]}
THROUGH_AUTOGRAD = ("second backward", "batched cotangents", "checkpoint", "reentrant checkpoint", "offloaded")
THROUGH_AUTOGRAD += ("second derivative", "forward mode")


def drawn_to_be_formed(function: str, number: int) -> Call:
    """A drawn call of PyTorch, of one loss whose gradients the forward pass may form."""
    programs = (draw(1, k, "torch") for k in count(0, SHARED))
    calls = (x for x in programs if (x.program.function, x.program.form) == (function, "function"))
    calls = (x for x in calls if x.program.dtype != "float64" and {"e", "c", "bias"}.intersection(x.program.wanted))
    call = next(islice(calls, number, None))
    program = replace(call.program, impl="chunked", transformation="gradient", leading=(40 + number,), shift=number % 3)
    program = replace(
        program, num_items=None, reduction=("mean", "sum")[number % 2], objective=("loss",), memory_budget=2**30
    )
    return Call(program, call.data)


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("function", FORMED)
def test_gradients_formed_in_chunks(function, number):
    """A drawn call has too few tokens for two chunks."""
    with in_chunks((8, 24)[number // 2 % 2]) as ran:
        assert not failures(drawn_to_be_formed(function, number))
    assert FORMED[function] in ran


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transformation", THROUGH_AUTOGRAD)
@pytest.mark.parametrize("function", FORMED)
def test_gradients_formed_in_chunks_through_autograd(function, transformation, dtype):
    of_function = {"fn": "bonus", "entropy": True} if function == TOKEN_LOSS else {}
    program = Program("torch", "chunked", function, dtype=dtype, transformation=transformation, **of_function)
    with in_chunks(16) as ran:
        assert not failures(Call(program, Data(ignored="few", seed=1)))
    if "checkpoint" in transformation:  # which forms its gradients once, the second time
        assert [x for x in ran if "finish" not in x] == ["torch_loss", *OF_A_STEP[function]]


SAVING = Program("torch", dtype="bfloat16", memory_budget="all", arrays=("bias",), wanted=("e", "c", "bias"))
EACH = {"reduction": "none", "objective": ("loss", "lse"), "return_lse": True}
WEIGHTED = {"arrays": ("token_weight",), "wanted": ("e", "c", "token_weight"), "leading": (4, 10), "shift": 2}
PADDED = [
    Program("torch", "chunked"),  # a mean in which no weight of 0 hides the padding
    Program("torch", "chunked", **WEIGHTED, **EACH, label_smoothing=0.1),
    Program("torch", "chunked", **WEIGHTED, transformation="in place", reduction="none"),
    Program("torch", "chunked", transformation="in place"),
    Program("torch", "chunked", "linear_log_probs", entropy=True, objective=("log_probs", "lse", "entropy")),
    Program("torch", "chunked", "linear_log_probs", ids=3, objective=("id_log_probs",)),
    SAVING,
    replace(SAVING, **EACH),
]


@pytest.mark.parametrize("program", PADDED, ids=repr)
def test_padded_to_another_size(program, monkeypatch):
    monkeypatch.setattr(kinds, "EXACT", 0)
    monkeypatch.setattr(kinds, "SMALLEST", 16)
    monkeypatch.setattr(kinds, "_kinds", {})
    assert not failures(Call(program, Data(ignored="few", seed=2)))
    assert {kind.sizes(40) for kind in kinds._kinds.values()} == {48 if program.impl == "chunked" else 64}


def test_terms_of_a_low_temperature_that_cancel():
    """The rows of c are alike, so that the second derivative is 0."""
    options = {
        "transformation": "second derivative",
        "wanted": ("e",),
        "strides_c": "expanded",
        "temperature": 0.00138,
        "reduction": "none",
        "fn": "clipped",
    }
    program = Program("torch", "reference", TOKEN_LOSS, dtype="float64", **options)
    assert not failures(Call(replace(program, leading=(3,), width=3, vocabulary=64), Data(622617334, size=2.759)))


LSE = Program("torch", "chunked", objective=("loss", "lse"), return_lse=True)
WEIGHTED_LSE = replace(LSE, arrays=("token_weight",), wanted=("e", "c", "token_weight"))
BESIDE = [*(replace(LSE, dtype=x) for x in ("float32", "bfloat16", "float16")), replace(LSE, objective=("lse",))]
BESIDE += [WEIGHTED_LSE, replace(WEIGHTED_LSE, wanted=("token_weight",))]


@pytest.mark.parametrize("program", BESIDE, ids=repr)
def test_what_was_formed_is_of_no_use_where_lse_is_differentiated_too(program):
    with in_chunks(16):
        assert not failures(Call(program, Data(ignored="few", seed=3)))


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_mean_of_a_divergence_without_weights(divergence):
    program = Program("torch", "chunked", DIVERGENCE, divergence=divergence, teacher_width=24, teacher_dtype="float32")
    assert not failures(Call(program, Data(seed=4)))

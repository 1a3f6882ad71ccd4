"""Calls that a drawn one (tests/search) reaches too rarely, each held to float64 as those are."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cce_jax import linear_cross_entropy
from cce_kernels import given_ids, selections
from cce_kernels.engines.triton import statistics as kernels
from cce_kernels.engines.xla import XLA
from cce_kernels.engines.xla import statistics as xla_kernels
from cce_kernels.plan import choose, plan_of, schedules
from tests.search import run as search_run
from tests.search.calls import DIVERGENCE, DIVERGENCES, LOG_PROBS, TOKEN_LOSS, Call, Data, Program
from tests.search.run import failures

call_torch = pytest.importorskip("tests.call_torch", exc_type=ImportError)


def calls(program: Program, *data: Data, **fields: Any) -> list[Call]:
    """One program with each of these data."""
    return [Call(replace(program, **fields), x) for x in data or (Data(),)]


def in_each(name: str, makes: Callable[..., list[Call]], *impls: str) -> dict[str, list[Call]]:
    """The same calls of several packages and implementations, such as "jax cce"."""
    return {f"{name}, {x}": makes(**dict(zip(("package", "impl"), x.split(), strict=True))) for x in impls}


NARROW = "jax cce", "jax chunked", "torch chunked", "torch torch_compile"
FEW, NAN, ODD = Data(ignored="few"), Data(ignored="few", poison="nan"), Data(odd=True)
PLAIN = Program(leading=(24,), width=16, vocabulary=70)
OF_ARRAYS = replace(PLAIN, arrays=("bias", "class_weight", "token_weight"), wanted=("e", "c", "bias"))
OF_WEIGHTS = replace(PLAIN, arrays=("token_weight",), wanted=("token_weight",))
SMOOTHED = replace(PLAIN, leading=(40,), arrays=("bias", "class_weight"), wanted=("e", "c", "bias"))
SMOOTHED = replace(SMOOTHED, impl="cce", dtype="bfloat16", label_smoothing=0.5, logit_scale=0.6)
LOSSES = {
    # The exponentials of ignored tokens are infinite in float32 too.
    **in_each(
        "what an ignored token holds",
        lambda **of: calls(
            replace(OF_ARRAYS, label_smoothing=0.1, z_loss=0.1, reduction="none", **of),
            *(replace(NAN, poison=x, bias=200.0) for x in ("nan", "inf")),
        ),
        *("jax cce", "jax chunked", "jax reference", "torch reference", "torch torch_compile"),
    ),
    # p/N of a mean over many tokens is below float16's smallest number; a loss scale times it, above its largest. dz is
    # divided by a number that is computed from the cotangents of all tokens, of which one may be NaN.
    **in_each(
        "cotangents that float16 does not hold",
        lambda **of: calls(
            replace(PLAIN, dtype="float16", leading=(64,), vocabulary=300, reduction="sum", **of),
            *(Data(size=3.0, cotangent=x / 64) for x in (1e-6, 1e4)),
            Data(out_of_range=1, cotangent=100.0),
        ),
        *NARROW,
    ),
    # A mean divides by the sum of the weights: float16 holds neither them nor the sum, but the gradients.
    **in_each(
        "weights of any size in float16",
        lambda **of: calls(
            replace(OF_ARRAYS, dtype="float16", leading=(300,), vocabulary=300, arrays=("bias", "token_weight"), **of),
            *(Data(weight=x, ignored="few", seed=y) for y, x in enumerate((1e6, 1e-6))),
        ),
        *NARROW,
    ),
    **in_each(
        "a loss of one's own of any size in float16",
        lambda **of: [
            call
            for size in (1e6, 1e-6)
            for call in calls(
                Program(function=TOKEN_LOSS, fn="bonus", entropy=True, dtype="float16", leading=(300,), **of),
                Data(weight=size, ignored="few"),
                num_items=1000 * size,
            )
        ],
        *("jax chunked", "torch chunked"),
    ),
    # Which would wrap into the vocabulary in 32 bits.
    **in_each(
        "targets of 64 bits out of range",
        lambda **of: calls(
            replace(PLAIN, index_dtype="int64", objective=("lse",), return_lse=True, reduction="none", **of),
            *(Data(out_of_range=3, seed=seed) for seed in range(4)),
        ),
        *("jax chunked", "torch chunked", "torch torch_compile"),
    ),
    **in_each("no items", lambda **of: calls(PLAIN, num_items=0.0, **of), *NARROW),
    **in_each(
        "float64",
        lambda package, impl: calls(
            replace(OF_ARRAYS, vocabulary=150, arrays=("bias",), logit_scale=0.7, softcap=5.0),
            **dict(package=package, impl=impl, dtype="float64", setting="x64" if package == "jax" else "usual"),
        ),
        *("jax reference", "jax chunked", "torch reference", "torch torch_compile"),
    ),
    # Its gradients are formed in the forward pass, from a sum of rank one.
    "label smoothing": calls(SMOOTHED, Data(bias=30.0), memory_budget=2**30),
    "label smoothing, (D, V)": calls(SMOOTHED, Data(bias=30.0), impl="chunked", vocab_axis=1, memory_budget=2**30),
    "label smoothing alone": calls(SMOOTHED, Data(size=8.0), arrays=(), wanted=("e", "c"), memory_budget=2**30),
    # In windows of columns that overlap, and of tokens that are not consecutive.
    "label smoothing under a softcap": [
        *calls(SMOOTHED, FEW, softcap=7.0, vocabulary=1500, memory_budget=2**20, reduction="none"),
        *calls(SMOOTHED, Data(ignored="most", poison="nan"), softcap=7.0, vocabulary=1500, wanted=()),
    ],
    # A mean divides by the weights: it is not linear in them.
    **in_each(
        "a mean differentiated twice in the weights",
        lambda **of: calls(OF_WEIGHTS, Data(size=3.0), transformation="second derivative", **of),
        *("jax chunked", "torch chunked", "torch torch_compile"),
    ),
    # And their gradient back.
    **in_each(
        "weights are shifted with their targets",
        lambda **of: [
            *calls(OF_WEIGHTS, leading=(4, 6), shift=1, memory_budget=0, **of),
            *calls(OF_WEIGHTS, leading=(4, 6), shift=1, memory_budget="all", wanted=("e", "token_weight"), **of),
        ],
        *("jax cce", "jax chunked", "torch chunked", "torch reference"),
    ),
    # Only 975 of the 6088 tokens are different: dc loses more by the rounding of dz than if each were another.
    "equal tokens are all rounded to the same side": calls(
        Program(impl="chunked", leading=(6088,), width=1152, vocabulary=512, dtype="bfloat16", memory_budget=0),
        Data(seed=2062543425, kind="confident", size=7.195, cotangent=0.011076),
        **dict(logit_scale=0.169, ignore_index=-(2**31)),
    ),
    # Confident tokens have the same dz: the roundings of 3070 tokens add up, also in a dc that is not rounded.
    "tokens whose dz is rounded alike": calls(
        Program(leading=(3070,), width=128, vocabulary=4, dtype="bfloat16", mixed=True, wanted=("c",)),
        Data(seed=2039562229, kind="confident", size=59.647, cotangent=3.665186),
    ),
    # The NaN of such a token's loss was multiplied by a cotangent of 0.
    "in torch the gradient of lse alone of a target out of range": calls(
        Program("torch", leading=(4,), width=1, vocabulary=3, objective=("lse",), return_lse=True), Data(out_of_range=1)
    ),
    # XLA's CPU has no product of e and a batch of dz: an UNIMPLEMENTED error.
    "batched cotangents of a transposed classifier in 16 bits": calls(
        Program(leading=(2, 4), vocabulary=64, dtype="bfloat16", mixed=True, vocab_axis=1, reduction="none"),
        Data(ignored="runs"),
        **dict(transformation="batched cotangents", impl="chunked", wanted=("c",), memory_budget="all"),
    ),
}

OF_TOKENS = Program(function=LOG_PROBS, impl="chunked", objective=("log_probs", "lse"), memory_budget=0)
ENTROPY = replace(OF_TOKENS, entropy=True, objective=("log_probs", "lse", "entropy"))
IDS = replace(OF_TOKENS, ids=5, objective=("log_probs", "id_log_probs"), arrays=("bias",), wanted=("e", "c", "bias"))
CERTAIN = Program("torch", function=LOG_PROBS, leading=(21,), width=2, vocabulary=1, dtype="float16", mixed=True)
CERTAIN = replace(CERTAIN, objective=("entropy", "id_log_probs"), temperature=4.6, entropy=True, ids=6)
BY_KERNELS = {"impl": "cce", "dtype": "bfloat16"}
NUMBERS = {
    "the entropy, over runs of the vocabulary": calls(ENTROPY, dtype="bfloat16", vocabulary=2500),
    "the entropy, by kernels": calls(ENTROPY, **BY_KERNELS, temperatures=True, softcap=5.0),
    "the entropy, from saved exponentials": calls(ENTROPY, Data(size=2.0), **BY_KERNELS, memory_budget=2**40),
    "the entropy, from saved exponentials, beside every option": calls(
        replace(ENTROPY, **BY_KERNELS, temperatures=True, arrays=("bias",), wanted=("e", "c", "bias"), vocab_axis=1),
        *(Data(ignored="most"), Data(size=2.0), Data(size=0.01), Data(kind="confident", size=20.0)),
        **dict(leading=(260,), width=16, memory_budget=2**40),
    ),
    "the entropy in evaluation, of scattered tokens": calls(
        ENTROPY, FEW, **BY_KERNELS, leading=(97,), transformation="value", temperatures=True
    ),
    "classes that a bias removes": calls(
        ENTROPY, Data(masked=50, bias=1.0), arrays=("bias",), wanted=("e", "c", "bias")
    ),
    "logits far above the target's": calls(ENTROPY, Data(kind="far", size=60.0), impl="cce"),
    "cotangents of the entropy in float16": calls(
        ENTROPY, Data(cotangent=1e3), Data(cotangent=1e-3), dtype="float16", objective=("entropy",)
    ),
    "ids": calls(IDS, Data(), NAN, dtype="bfloat16", vocabulary=2500),
    "ids, some of which are repeated": calls(IDS, vocabulary=20),
    "ids, by kernels": calls(IDS, Data(ignored="most"), **BY_KERNELS, leading=(260,), vocabulary=1100),
    "the likeliest id of confident tokens": calls(
        IDS, Data(kind="confident", size=11.0), **BY_KERNELS, ids=1, objective=("id_log_probs",)
    ),
    # Their cotangents and those of the log-sum-exp cancel, before anything is rounded to 16 bits.
    "ids of probability 1": [
        *calls(CERTAIN, Data(seed=865458343, kind="trained", bias=-41.0), arrays=("bias",), wanted=("e", "c", "bias")),
        *calls(CERTAIN, Data(seed=865458343, kind="trained"), impl="torch_compile", vocab_axis=1),
    ],
    **in_each(
        "ids of many windows",
        lambda **of: calls(
            Program(function=LOG_PROBS, leading=(300,), width=16, vocabulary=3000, objective=("id_log_probs",), **of),
            FEW,
            **dict(ids=5, memory_budget=2**20),
        ),
        *("torch chunked", "torch torch_compile"),
    ),
    # Its mean logit, and its likeliest ids, had no shape to be given.
    "in torch one token has numbers of shape nothing": calls(
        Program("torch", "chunked", LOG_PROBS, transformation="value", leading=(), top_k=2, objective=("lse",)),
        **dict(predicted=True, mean_logit=True),
    ),
}

DISTILLED = Program(function=DIVERGENCE, divergence="jsd", beta=0.3, impl="chunked", teacher_dtype="float32")
DISTILLED = replace(DISTILLED, teacher_width=24, width=16, vocabulary=90, memory_budget=0)
LEFT_OUT = replace(DISTILLED, divergence="reverse_kl", softcap=5.0, arrays=("bias", "token_weight"), teacher_bias=True)
REVERSE = Program(function=DIVERGENCE, divergence="reverse_kl", leading=(1,), width=1, vocabulary=56, teacher_width=1)
REVERSE = replace(REVERSE, arrays=("bias",), wanted=("e", "c", "bias"), teacher_dtype="float32", teacher_bias=True)
FAR = Program(function=LOG_PROBS, impl="reference", leading=(71,), width=6, vocabulary=118, dtype="float16")
SMALL_P = Program(function=DIVERGENCE, divergence="jsd", leading=(2,), vocabulary=68, dtype="bfloat16", mixed=True)
SMALL_P = replace(SMALL_P, vocab_axis=1, arrays=("bias", "token_weight"), wanted=("e", "c", "bias"), reduction="sum")
SMALL_P = replace(SMALL_P, teacher_width=10, teacher_dtype="float16", teacher_bias=True, teacher_vocab_axis=1)
DIVERGED = {
    # It goes to 0 itself.
    **in_each(
        "a jsd whose beta goes to 0 or 1",
        lambda **of: [x for beta in (1e-12, 1 - 1e-6) for x in calls(DISTILLED, Data(size=5.0), beta=beta, **of)],
        *("jax chunked", "jax reference", "torch reference", "torch torch_compile"),
    ),
    **in_each(
        "weights of any size of a divergence in float16",
        lambda **of: calls(
            replace(
                DISTILLED, dtype="float16", teacher_dtype="float16", leading=(300,), arrays=("token_weight",), **of
            ),
            *(Data(weight=x, ignored="few", seed=y) for y, x in enumerate((1e6, 1e-6))),
        ),
        *("jax chunked", "torch chunked", "torch torch_compile"),
    ),
    # However large it is, no derivative by a logit is above 1: a row of dc that is small keeps its digits.
    **in_each(
        "a large forward KL costs float16 no digits",
        lambda **of: calls(
            replace(DISTILLED, leading=(3,), width=1, vocabulary=3135, wanted=("c",), teacher_width=8, **of),
            Data(469166881, size=6.249, offset=1000.0),
            **dict(divergence="forward_kl", dtype="float16", teacher_dtype="bfloat16"),
        ),
        *("jax chunked", "torch chunked"),
    ),
    "ids that neither has count nothing": [
        call
        for kind in DIVERGENCES
        for call in calls(
            replace(DISTILLED, impl="reference", arrays=("bias",), wanted=("e", "bias"), teacher_bias=True),
            Data(masked=10),
            divergence=kind,
        )
    ],
    # The student's softcap makes a number of a logit of −inf: it has ids that the teacher lacks.
    **in_each(
        "a token that is left out has no infinite divergence",
        lambda **of: calls(LEFT_OUT, Data(masked=3, ignored="all"), Data(masked=3, ignored="few"), **of),
        *("jax chunked", "jax reference", "torch torch_compile"),
    ),
    # XLA computed the logits anew in each pass, and rounded them otherwise: the entropy was -inf, the loss inf.
    "a low temperature multiplies no rounding of logits": calls(
        Program(function=DIVERGENCE, divergence="forward_kl", impl="chunked", leading=(2,), width=3, vocabulary=30),
        Data(seed=534423925, kind="trained", cotangent=0.018374, teacher="near"),
        **dict(transformation="scan", dtype="float16", mixed=True, vocab_axis=1, wanted=("c",), reduction="sum"),
        **dict(logit_scale=-0.167, temperature=3.34e-9, teacher_width=3, teacher_dtype="float16", return_entropy=True),
    ),
    # The student's probabilities are 1e-20 and the teacher's are not.
    **in_each(
        "the derivative of small probabilities",
        lambda **of: [
            call
            for beta in (2.169e-6, 1 - 2.169e-6)
            for call in calls(
                SMALL_P, Data(1821734325, "trained", ignored="one", odd=True, teacher="same"), beta=beta, **of
            )
        ],
        *("jax reference", "torch reference"),
    ),
    # In float32 the likeliest id's probability is 1 in both distributions here.
    **in_each(
        "the derivative of equal probabilities",
        lambda **of: calls(
            replace(REVERSE, leading=(19,), width=2, vocabulary=95, vocab_axis=1, wanted=("e", "bias"), **of),
            Data(seed=242995094, size=0.191, offset=100.0, cotangent=1.814906, teacher="near"),
            **dict(temperature=0.362, logit_scale=1.626, teacher_width=2, teacher_bias=False),
        ),
        *("jax reference", "torch reference"),
    ),
    # What is not formed was saved in another type the second time.
    "a checkpoint of a wide classifier": calls(
        Program("torch", "torch_compile", DIVERGENCE, transformation="checkpoint", leading=(8,), width=32),
        **dict(vocabulary=128, dtype="bfloat16", mixed=True, divergence="jsd", wanted=("c",)),
        **dict(teacher_width=32, teacher_dtype="float16"),
    ),
    # What the bounds must allow.
    "a second derivative that float16 does not hold": calls(
        FAR,
        Data(kind="far", size=506.0),
        **dict(transformation="second derivative", softcap=788.0, targets=False, objective=("lse",), temperature=1e-9),
    ),
    "an infinite gradient in a type that does not round it": calls(
        REVERSE,
        Data(123090486, size=3.424, masked=3, teacher="near"),
        **dict(impl="chunked", dtype="bfloat16", mixed=True, teacher_dtype="bfloat16", softcap=30.0),
    ),
    "probabilities that float32 does not hold": calls(
        REVERSE,
        Data(1160093427, size=2.452, offset=100.0, bias=-108.5),
        **dict(leading=(2,), vocabulary=80, impl="reference", logit_scale=-1.851),
    ),
}

SAVED = Program(dtype="bfloat16", vocabulary=232, memory_budget=2**40, reduction="none", return_lse=True)
SAVED = replace(SAVED, objective=("loss", "lse"))
OF_BIAS = replace(SAVED, arrays=("bias",), wanted=("e", "c", "bias"))
IGNORED = "none", "few", "most", "runs", "all but one", "all"
POISONED = [Data(ignored=x, poison="nan" * (x != "none"), odd=True) for x in IGNORED]
ABOVE = [Data(kind="confident", size=x, ignored=y, odd=True) for x in (60.0, 100.0) for y in ("none", "most")]
EXPONENTIALS = {
    # XLA multiplies all rows, those that nothing wrote too: for a vocabulary of a multiple of 256.
    "whichever tokens are ignored": calls(SAVED, *POISONED, vocabulary=256),
    # Ignored ones are not looked for: their numbers are NaN.
    "of few tokens, whichever are ignored": calls(
        SAVED, *POISONED, Data(kind="confident", size=100.0, ignored="few", poison="nan"), vocabulary=256, leading=(20,)
    ),
    "of label smoothing, whichever tokens are ignored": calls(OF_BIAS, *POISONED[1:4], label_smoothing=0.1),
    # Rows of blocks without kept tokens are not written, where logits are computed again too.
    "that are not saved, of few kept tokens": calls(
        OF_BIAS, *(Data(ignored=x, poison="nan") for x in ("most", "all but one")), memory_budget=0, leading=(90,)
    ),
    # The slope 1 − (z/κ)² of such a logit is small. From a rounded exponential it would be wrong by 2⁻⁹·2/κ.
    "of logits that reach the softcap": [
        call for x in (0.5, 40.0) for call in calls(SAVED, Data(size=4.0), softcap=x, logit_scale=x)
    ],
    # By more than 30 nats, from where on exponentials are relative to lse; and by 90, where they overflow.
    "of rows whose largest logit is far above their targets": [
        *calls(OF_BIAS, *ABOVE, Data(masked=40)),
        *calls(OF_BIAS, *ABOVE, vocab_axis=1, vocabulary=229),
    ],
    # The interpreter's tiles of 32 columns end with V. Rows of saved exponentials end 32 columns later.
    "where a whole tile lies beyond the vocabulary": calls(SAVED, vocabulary=32),
    "in evaluation, of rows that overflow": calls(
        SAVED,
        *(Data(kind="confident", size=100.0, ignored=x) for x in ("few", "runs")),
        **dict(memory_budget=0, transformation="value", wanted=()),
    ),
    # A column of the padding had a number for it, inf where lse < −88, and de was NaN.
    "of a target out of range": calls(OF_BIAS, Data(bias=-110.0, out_of_range=1, seed=3), objective=("lse",)),
    # Gradients that float16 holds, of a dz that is 4096 times its largest cotangent.
    "of a scale of 4096 in float16": calls(
        SAVED, Data(size=7e-4), impl="chunked", dtype="float16", vocabulary=300, logit_scale=4096.0
    ),
}
HELD = LOSSES | NUMBERS | DIVERGED | {f"exponentials {name}": x for name, x in EXPONENTIALS.items()}


def held(found: list[Call]) -> None:
    assert not [words for call in found for words in failures(call)]


@pytest.mark.parametrize("name", HELD)
def test_held_to_float64(name):
    with call_torch.small_blocks(narrow=True):
        held(HELD[name])


# Where a part of the packages is changed, for plans and programs that are made anew


@pytest.fixture
def changed(monkeypatch):
    def forget() -> None:
        plan_of.cache_clear()
        search_run.forget()
        jax.clear_caches()

    def change(holder, name, value):
        monkeypatch.setattr(holder, name, value)
        forget()

    yield change
    monkeypatch.undo()
    forget()


KL = replace(DISTILLED, teacher_dtype="bfloat16", dtype="bfloat16", leading=(70,), vocabulary=300, softcap=4.0)
KL = replace(KL, temperatures=True, arrays=("bias", "token_weight"), wanted=("e", "c", "bias"))
APPENDED = replace(OF_BIAS, impl="chunked", memory_budget=0)
CHANGED = {
    # The last chunk overlaps its neighbour.
    "ids in chunks of tokens": (
        *(given_ids, "CHUNK_BYTES", 10 * 5 * 20 * 8),
        calls(IDS, leading=(37,), memory_budget=2**40),
    ),
    "the entropy beside the largest logits, in chunks of 13 tokens": (
        *(selections, "MOST", 13),
        calls(ENTROPY, FEW, top_k=64, mean_logit=True, predicted=True),
    ),
    # In several chunks, of which logits are held of few tokens at a time.
    **{
        f"a {kind}, {impl}": (choose, "MOST_LOGITS", (11,), calls(KL, NAN, divergence=kind, impl=impl))
        for kind, impl in zip(
            ("jsd", "reverse_kl", "jsd", "forward_kl"), ("cce", "cce", "chunked", "chunked"), strict=True
        )
    },
    # Blocks of 32 tokens, as if 16 MiB held no more of e.
    "evaluation in several blocks": (
        *(schedules, "EVALUATED", 1),
        [
            call
            for softcap in (None, 9.0)
            for call in calls(
                replace(SMOOTHED, leading=(90,), wanted=(), reduction="none", z_loss=0.1, softcap=softcap),
                *(Data(ignored=x, poison="nan") for x in ("few", "most")),
            )
        ],
    ),
    # As on a GPU, where XLA would else pad.
    "rows that are appended for XLA change no gradient": (
        *(type(XLA), "rows", lambda self, call, gpu: call.tokens + 7),
        [
            *calls(APPENDED, *POISONED[::2], dtype="float32", softcap=4.0, logit_scale=1.3),
            *calls(APPENDED, *POISONED[::2], dtype="float16", label_smoothing=0.2, vocab_axis=1, vocabulary=229),
        ],
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_held_to_float64_where_a_part_is_changed(name, changed):
    *part, found = CHANGED[name]
    changed(*part)
    held(found)


def test_infinite_exponentials_of_tokens_that_keep_their_reference_are_saved_again(changed):
    """As on a GPU where two kernels' roundings of the largest logit, the target's, are 90 nats apart."""
    sums = kernels.sums

    def overflowing(*arguments):
        found = sums(*arguments)
        infinite = [None if x is None else jnp.full_like(x, jnp.inf) for x in (found.log_mass, found.saved)]
        return found._replace(log_mass=infinite[0], saved=infinite[1])

    changed(kernels, "sums", overflowing)
    program = replace(SAVED, function=TOKEN_LOSS, return_lse=False, objective=("loss",), entropy=True, fn="bonus")
    held(calls(program, Data(kind="confident", size=30.0)))


E, C = jnp.cos(jnp.arange(48.0)).reshape(6, 8), jnp.sin(jnp.arange(160.0)).reshape(20, 8)


@pytest.mark.parametrize("engine", [kernels, xla_kernels], ids=["cce", "chunked"])
def test_a_logit_that_is_computed_again_is_not_above_lse(engine, changed, request):
    """As on a GPU at a low temperature, where the roundings of two kernels are any number of nats apart."""
    sums, impl = engine.sums, request.node.callspec.id
    changed(engine, "sums", lambda *x: (found := sums(*x))._replace(log_mass=found.log_mass - 20))
    options = {"reduction": "none", "logit_scale": 3.0, "memory_budget": 0, "impl": impl}
    loss = lambda e, c: jnp.sum(jnp.arange(6.0) * linear_cross_entropy(e, c, jnp.arange(6), **options))  # noqa: E731
    assert all(np.max(np.abs(x)) < 1e3 for x in jax.grad(loss, (0, 1))(E, C))


@pytest.mark.parametrize(("reduction", "impl"), [("sum", "cce"), ("mean", "chunked"), ("none", "chunked")])
def test_derivatives_in_the_weights_and_in_e(reduction, impl):
    """The gradient of the weights can be differentiated in e. That of e cannot be in the weights, and says so."""
    weight = along = jnp.linspace(0.1, 2, 6)

    def loss(e, weight, impl=impl):
        found = linear_cross_entropy(e, C, jnp.arange(6), token_weight=weight, reduction=reduction, impl=impl)
        return jnp.sum(found * along)

    def of_e(impl):
        return jax.grad(lambda e: jnp.sum(along * jax.grad(loss, 1)(e, weight, impl)))(E)

    np.testing.assert_allclose(of_e(impl), of_e("reference"), rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.grad(lambda weight: jnp.sum(E * jax.grad(loss)(E, weight)))(weight)

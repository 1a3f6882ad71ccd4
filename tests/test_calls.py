"""Calls that a drawn one (tests/search) reaches too rarely, each held to float64 as those are."""

from contextlib import nullcontext
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cce_jax import linear_cross_entropy
from cce_kernels import given_ids, selections
from cce_kernels.engines.triton import statistics as kernels
from cce_kernels.engines.xla import XLA
from cce_kernels.engines.xla import statistics as xla_kernels
from cce_kernels.plan import choose, plan_of, setting
from tests.search import run as search_run
from tests.search.calls import DIVERGENCE, DIVERGENCES, LOG_PROBS, TOKEN_LOSS, Call, Data, Program
from tests.search.run import failures

# JAX


@pytest.fixture
def changed(monkeypatch):
    """changed(holder, name, value): for plans and programs that are made anew."""

    def change(holder, name, value):
        monkeypatch.setattr(holder, name, value)
        forget()

    yield change
    monkeypatch.undo()
    forget()


def forget() -> None:
    plan_of.cache_clear()
    search_run.forget()
    jax.clear_caches()


def held(*calls: Call) -> None:
    assert not [words for call in calls for words in failures(call)]


OF_JAX = [("jax", impl) for impl in ("cce", "chunked", "reference")]
OF_BOTH = [*OF_JAX, *(("torch", impl) for impl in ("chunked", "reference", "torch_compile"))]
IN_BOTH = pytest.mark.parametrize(("package", "impl"), OF_BOTH)
NARROW_IN_BOTH = pytest.mark.parametrize(("package", "impl"), [x for x in OF_BOTH if x[1] != "reference"])


@pytest.fixture
def small_blocks(package):
    call_torch = pytest.importorskip("tests.call_torch", exc_type=ImportError)
    with call_torch.small_blocks(narrow=True) if package == "torch" else nullcontext():
        yield


PLAIN = Program(leading=(24,), width=16, vocabulary=70)


@IN_BOTH
@pytest.mark.usefixtures("small_blocks")
def test_what_an_ignored_token_holds(package, impl):
    """The exponentials of ignored tokens are infinite in float32 too."""
    every = ("bias", "class_weight", "token_weight")
    program = replace(PLAIN, package=package, impl=impl, arrays=every, wanted=("e", "c", "bias"), label_smoothing=0.1)
    program, data = replace(program, z_loss=0.1, reduction="none"), Data(ignored="few", poison="nan", bias=200.0)
    held(Call(program, data), Call(replace(program, reduction="mean"), replace(data, poison="inf")))


@NARROW_IN_BOTH
@pytest.mark.usefixtures("small_blocks")
def test_cotangents_that_float16_does_not_hold(package, impl):
    """p/N of a mean over many tokens is below its smallest number; a loss scale times it, above its largest."""
    program = replace(PLAIN, package=package, impl=impl, dtype="float16", leading=(64,), vocabulary=300)
    held(*(Call(program, Data(size=3.0, cotangent=cotangent)) for cotangent in (1e-6, 1e4)))


@NARROW_IN_BOTH
@pytest.mark.usefixtures("small_blocks")
def test_in_float16_a_target_out_of_range_reaches_no_other_row(package, impl):
    """dz is divided by a number that is computed from the cotangents of all tokens, of which one is NaN."""
    program = replace(PLAIN, package=package, impl=impl, dtype="float16", reduction="sum")
    held(Call(program, Data(out_of_range=1, cotangent=100.0)))


@pytest.mark.parametrize(
    ("package", "impl"),
    [("jax", "reference"), ("jax", "chunked"), ("jax", "auto"), ("torch", "reference"), ("torch", "torch_compile")],
)
@pytest.mark.usefixtures("small_blocks")
def test_float64(package, impl):
    program = replace(PLAIN, package=package, impl=impl, dtype="float64", vocabulary=150, label_smoothing=0.3)
    program = replace(program, arrays=("bias",), wanted=("e", "c", "bias"), z_loss=0.1, logit_scale=0.7, softcap=5.0)
    held(Call(replace(program, setting="x64" if package == "jax" else "usual"), Data()))


SMOOTHED = replace(PLAIN, leading=(40,), arrays=("bias", "class_weight"), wanted=("e", "c", "bias"))
SMOOTHED = replace(SMOOTHED, dtype="bfloat16", label_smoothing=0.5, logit_scale=0.6)


@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_label_smoothing(vocab_axis):
    """Whose gradients are formed in the forward pass, from a sum of rank one; with weights of classes and without."""
    for impl in ("cce", "chunked"):
        program = replace(SMOOTHED, impl=impl, vocab_axis=vocab_axis, memory_budget=2**30)
        held(Call(program, Data(bias=30.0)), Call(replace(program, arrays=(), wanted=("e", "c")), Data(size=8.0)))


@pytest.mark.parametrize("impl", ["cce", "chunked"])
def test_label_smoothing_under_a_softcap(impl):
    """In windows of columns that overlap, and of tokens that are not consecutive."""
    program = replace(SMOOTHED, impl=impl, softcap=7.0, vocabulary=1500, memory_budget=2**20, reduction="none")
    held(Call(program, Data(ignored="few")), Call(replace(program, wanted=()), Data(ignored="most", poison="nan")))


@IN_BOTH
@pytest.mark.usefixtures("small_blocks")
def test_a_mean_is_differentiated_twice_in_the_weights(package, impl):
    """Which it divides by: it is not linear in them."""
    fields = dict(package=package, impl=impl, arrays=("token_weight",), wanted=("token_weight",))
    held(Call(replace(PLAIN, transformation="second derivative", **fields), Data(size=3.0)))


@IN_BOTH
@pytest.mark.usefixtures("small_blocks")
def test_weights_are_shifted_with_their_targets(package, impl):
    """And their gradient back."""
    fields = dict(package=package, impl=impl, leading=(4, 6), shift=1, arrays=("token_weight",))
    wanted = ("token_weight",), ("e", "token_weight")
    held(*(Call(replace(PLAIN, wanted=x, memory_budget=y, **fields), Data()) for x in wanted for y in (0, "all")))


@pytest.mark.parametrize("impl", ["cce", "chunked"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_derivatives_in_the_weights_and_in_e(reduction, impl):
    """The gradient of the weights can be differentiated in e. That of e cannot be in the weights, and says so."""
    e, c, targets = jnp.cos(jnp.arange(48.0)).reshape(6, 8), jnp.sin(jnp.arange(160.0)).reshape(20, 8), jnp.arange(6)
    weight = along = jnp.linspace(0.1, 2, 6)

    def loss(e, weight, impl=impl):
        found = linear_cross_entropy(e, c, targets, token_weight=weight, reduction=reduction, impl=impl)
        return jnp.sum(found * along)

    def of_e(impl):
        return jax.grad(lambda e: jnp.sum(along * jax.grad(loss, 1)(e, weight, impl)))(e)

    np.testing.assert_allclose(of_e(impl), of_e("reference"), rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.grad(lambda weight: jnp.sum(e * jax.grad(loss)(e, weight)))(weight)


# Numbers of tokens

OF_TOKENS = Program(function=LOG_PROBS, impl="chunked", objective=("log_probs", "lse"), memory_budget=0)
ENTROPY = replace(OF_TOKENS, entropy=True, objective=("log_probs", "lse", "entropy"))
IDS = replace(OF_TOKENS, ids=5, objective=("log_probs", "id_log_probs"), arrays=("bias",), wanted=("e", "c", "bias"))
KERNELS = {"impl": "cce", "dtype": "bfloat16"}
NUMBERS = {
    "the entropy, over runs of the vocabulary": Call(replace(ENTROPY, dtype="bfloat16", vocabulary=2500), Data()),
    "the entropy, by kernels": Call(replace(ENTROPY, **KERNELS, temperatures=True, softcap=5.0), Data()),
    "the entropy, from saved exponentials": Call(replace(ENTROPY, **KERNELS, memory_budget=2**40), Data(size=2.0)),
    "the entropy in evaluation, of scattered tokens": Call(
        replace(ENTROPY, **KERNELS, leading=(97,), transformation="value", temperatures=True), Data(ignored="few")
    ),
    "classes that a bias removes": Call(
        replace(ENTROPY, arrays=("bias",), wanted=("e", "c", "bias")), Data(masked=50, bias=1.0)
    ),
    "classes that a bias removes, by kernels": Call(
        replace(ENTROPY, impl="cce", arrays=("bias",), wanted=("e", "c", "bias")), Data(masked=50, bias=1.0)
    ),
    "logits far above the target's": Call(replace(ENTROPY, impl="cce"), Data(kind="far", size=60.0)),
    "logits far above the target's, in 16 bits": Call(replace(ENTROPY, **KERNELS), Data(kind="far", size=60.0)),
    "a large cotangent of the entropy in float16": Call(
        replace(ENTROPY, dtype="float16", objective=("entropy",)), Data(cotangent=1e3)
    ),
    "a small cotangent of the entropy in float16": Call(
        replace(ENTROPY, impl="cce", dtype="float16", objective=("entropy",)), Data(cotangent=1e-3)
    ),
    "ids": Call(replace(IDS, dtype="bfloat16", vocabulary=2500), Data()),
    "ids, some of which are repeated": Call(replace(IDS, vocabulary=20), Data()),
    "ids, by kernels": Call(replace(IDS, **KERNELS, leading=(260,), vocabulary=1100), Data(ignored="most")),
    "ids of ignored tokens": Call(replace(IDS, dtype="bfloat16"), Data(ignored="few", poison="nan")),
    "the likeliest id of confident tokens": Call(
        replace(IDS, **KERNELS, ids=1, objective=("id_log_probs",)), Data(kind="confident", size=11.0)
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_tokens(name):
    held(NUMBERS[name])


def test_ids_in_chunks_of_tokens(changed):
    """The last chunk overlaps its neighbour."""
    changed(given_ids, "CHUNK_BYTES", 10 * 5 * 20 * 8)
    held(Call(replace(IDS, leading=(37,), memory_budget=2**40), Data()))


def test_the_entropy_beside_the_largest_logits(changed):
    """In chunks of 13 tokens."""
    changed(selections, "MOST", 13)
    held(Call(replace(ENTROPY, top_k=64, mean_logit=True, predicted=True), Data(ignored="few")))


# Divergences

DISTILLED = Program(function=DIVERGENCE, divergence="jsd", beta=0.3, impl="chunked", teacher_dtype="float32")
DISTILLED = replace(DISTILLED, teacher_width=24, width=16, vocabulary=90, memory_budget=0)


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("impl", ["cce", "chunked"])
def test_divergences(kind, impl, changed):
    """In several chunks, of which logits are held of few tokens at a time."""
    changed(choose, "MOST_LOGITS", (11,))
    program = replace(DISTILLED, divergence=kind, impl=impl, dtype="bfloat16", teacher_dtype="bfloat16", leading=(70,))
    program = replace(program, vocabulary=300, arrays=("bias", "token_weight"), wanted=("e", "c", "bias"))
    held(Call(replace(program, softcap=4.0, temperatures=True), Data(ignored="few", poison="nan")))


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_divergences_from_a_near_or_a_far_teacher(kind):
    near = replace(DISTILLED, divergence=kind, teacher_width=16)
    held(Call(near, Data(teacher="near")), Call(replace(near, impl="cce"), Data(kind="far", size=3000.0)))


@IN_BOTH
def test_a_jsd_whose_beta_goes_to_0_or_1(package, impl):
    """It goes to 0 itself."""
    program = replace(DISTILLED, package=package, impl=impl)
    held(*(Call(replace(program, beta=beta), Data(size=5.0)) for beta in (1e-12, 1e-6, 1 - 1e-6)))


@pytest.mark.parametrize("package", ["jax", "torch"])
def test_a_large_forward_kl_costs_float16_no_digits(package):
    """However large it is, no derivative by a logit is above 1: a row of dc that is small keeps its digits."""
    fields = dict(leading=(3,), width=1, vocabulary=3135, dtype="float16", wanted=("c",), teacher_dtype="bfloat16")
    program = replace(DISTILLED, package=package, divergence="forward_kl", **fields)
    held(Call(replace(program, teacher_width=8), Data(469166881, size=6.249, offset=1000.0)))


def test_ids_that_neither_has_count_nothing():
    program = replace(DISTILLED, impl="reference", arrays=("bias",), wanted=("e", "bias"), teacher_bias=True)
    held(*(Call(replace(program, divergence=kind), Data(masked=10)) for kind in DIVERGENCES))


@IN_BOTH
def test_a_token_that_is_left_out_has_no_infinite_divergence(package, impl):
    """The student's softcap makes a number of a logit of −inf: it has ids that the teacher lacks."""
    fields = dict(package=package, impl=impl, divergence="reverse_kl", softcap=5.0, teacher_bias=True)
    program = replace(DISTILLED, arrays=("bias", "token_weight"), wanted=("e", "c", "bias"), **fields)
    held(*(Call(program, Data(masked=3, ignored=x)) for x in ("all", "few")))


BENT = {"transformation": "second derivative", "impl": "reference"}
FAR = Program(function=LOG_PROBS, leading=(71,), width=6, vocabulary=118, dtype="float16", softcap=788.0, **BENT)
REVERSE = Program(function=DIVERGENCE, divergence="reverse_kl", leading=(1,), width=1, vocabulary=56, teacher_width=1)
REVERSE = replace(REVERSE, arrays=("bias",), wanted=("e", "c", "bias"), teacher_dtype="float32", teacher_bias=True)
LACKED = {
    "a second derivative that float16 does not hold": Call(
        replace(FAR, targets=False, objective=("lse",), temperature=1e-9), Data(kind="far", size=506.0)
    ),
    "an infinite gradient in a type that does not round it": Call(
        replace(REVERSE, impl="chunked", dtype="bfloat16", mixed=True, teacher_dtype="bfloat16", softcap=30.0),
        Data(123090486, size=3.424, masked=3, teacher="near"),
    ),
    "probabilities that float32 does not hold": Call(
        replace(REVERSE, leading=(2,), vocabulary=80, impl="reference", logit_scale=-1.851),
        Data(1160093427, size=2.452, offset=100.0, bias=-108.5),
    ),
}


@pytest.mark.parametrize("name", LACKED)
def test_what_the_bounds_must_allow(name):
    held(LACKED[name])


# Saved exponentials

SAVED = Program(dtype="bfloat16", vocabulary=232, memory_budget=2**40, reduction="none", return_lse=True)
SAVED = replace(SAVED, objective=("loss", "lse"))
OF_BIAS = replace(SAVED, arrays=("bias",), wanted=("e", "c", "bias"))


@pytest.mark.parametrize("ignored", ["none", "few", "most", "runs", "all but one", "all"])
def test_saved_exponentials_whichever_tokens_are_ignored(ignored):
    """Where XLA multiplies all rows, those that nothing wrote too: for a vocabulary of a multiple of 256.

    And for few tokens, where ignored ones are not looked for: their numbers are NaN.
    """
    data = Data(ignored=ignored, poison="nan" * (ignored != "none"), odd=True)
    held(Call(replace(SAVED, vocabulary=256), data), Call(replace(SAVED, vocabulary=256, leading=(20,)), data))


@pytest.mark.parametrize("softcap", [0.5, 40.0])
def test_saved_exponentials_of_logits_that_reach_the_softcap(softcap):
    """The slope 1 − (z/κ)² of such a logit is small. From a rounded exponential it would be wrong by 2⁻⁹·2/κ."""
    held(Call(replace(SAVED, softcap=softcap, logit_scale=softcap), Data(size=4.0)))


@pytest.mark.parametrize("size", [60.0, 100.0])
@pytest.mark.parametrize(
    "program", [OF_BIAS, replace(OF_BIAS, vocab_axis=1, vocabulary=229), replace(OF_BIAS, label_smoothing=0.1)], ids=str
)
def test_rows_whose_largest_logit_is_far_above_their_targets(program, size):
    """By more than 30 nats, from where on exponentials are relative to lse; and by 90, where they overflow."""
    held(*(Call(program, Data(kind="confident", size=size, ignored=x, odd=True)) for x in ("none", "most")))


def test_infinite_exponentials_of_tokens_that_keep_their_reference_are_saved_again(changed):
    """As on a GPU where two kernels' roundings of the largest logit, the target's, are 90 nats apart."""
    sums = kernels.sums

    def overflowing(*arguments):
        found = sums(*arguments)
        infinite = [None if x is None else jnp.full_like(x, jnp.inf) for x in (found.log_mass, found.saved)]
        return found._replace(log_mass=infinite[0], saved=infinite[1])

    changed(kernels, "sums", overflowing)
    program = replace(SAVED, function=TOKEN_LOSS, return_lse=False, objective=("loss",), entropy=True, fn="bonus")
    held(Call(program, Data(kind="confident", size=30.0)))


@pytest.mark.parametrize("vocabulary", [32, 96])
def test_a_whole_tile_beyond_the_vocabulary(vocabulary):
    """The interpreter's tiles of 32 columns end with V. Rows of saved exponentials end 32 columns later."""
    held(Call(replace(SAVED, impl="cce", vocabulary=vocabulary), Data()))


@pytest.mark.parametrize("engine", [kernels, xla_kernels], ids=["cce", "chunked"])
def test_a_logit_that_is_computed_again_is_not_above_lse(engine, changed, request):
    """As on a GPU at a low temperature, where the roundings of two kernels are any number of nats apart."""
    sums, impl = engine.sums, request.node.callspec.id
    changed(engine, "sums", lambda *x: (found := sums(*x))._replace(log_mass=found.log_mass - 20))
    e, c, targets = jnp.cos(jnp.arange(48.0)).reshape(6, 8), jnp.sin(jnp.arange(160.0)).reshape(20, 8), jnp.arange(6)
    options = {"reduction": "none", "logit_scale": 3.0, "memory_budget": 0, "impl": impl}
    of = jax.grad(lambda *x: jnp.sum(jnp.arange(6.0) * linear_cross_entropy(*x, targets, **options)), (0, 1))(e, c)
    assert all(np.max(np.abs(x)) < 1e3 for x in of)


def test_saved_exponentials_of_classes_that_a_bias_removes():
    held(Call(OF_BIAS, Data(masked=40)))


@pytest.mark.parametrize("ignored", ["few", "most"])
def test_evaluation_in_several_blocks(ignored, monkeypatch):
    """Of 32 tokens, as if 16 MiB held no more of e."""
    monkeypatch.setattr(setting, "EVALUATED", 1)
    plan_of.cache_clear()
    program = replace(SMOOTHED, impl="cce", leading=(90,), wanted=(), reduction="none", z_loss=0.1)
    held(*(Call(replace(program, softcap=x), Data(ignored=ignored, poison="nan")) for x in (None, 9.0)))
    plan_of.cache_clear()
    jax.clear_caches()


def test_evaluation_rescues_what_overflows_wherever_its_row_lies():
    """Among tokens that are ignored."""
    program = replace(SAVED, memory_budget=0, transformation="value", wanted=())
    held(*(Call(program, Data(kind="confident", size=100.0, ignored=x)) for x in ("few", "runs")))


APPENDED = [
    replace(OF_BIAS, dtype="float32", softcap=4.0, logit_scale=1.3),
    replace(OF_BIAS, dtype="float16", arrays=("bias", "class_weight"), label_smoothing=0.2, vocab_axis=1),
    replace(OF_BIAS, arrays=("bias", "token_weight"), vocab_axis=1, vocabulary=229),
]


@pytest.mark.parametrize("program", APPENDED, ids=str)
def test_rows_that_are_appended_for_xla_change_no_gradient(program, changed):
    """As on a GPU, where XLA would else pad."""
    changed(type(XLA), "rows", lambda self, call, gpu: call.tokens + 7)
    program = replace(program, impl="chunked", memory_budget=0)
    held(*(Call(program, Data(ignored=x, poison="nan" * (x != "none"), odd=True)) for x in ("none", "most", "all")))


@pytest.mark.parametrize("impl", ["cce", "chunked"])
def test_batched_cotangents_of_a_transposed_classifier_in_16_bits(impl):
    """XLA's CPU has no product of e and a batch of dz: an UNIMPLEMENTED error."""
    fields = dict(leading=(2, 4), vocabulary=64, dtype="bfloat16", mixed=True, vocab_axis=1, reduction="none")
    program = Program(transformation="batched cotangents", impl=impl, wanted=("c",), memory_budget="all", **fields)
    held(Call(program, Data(ignored="runs")), Call(replace(program, mixed=False), Data(ignored="runs")))


def test_a_scale_of_4096_in_float16():
    """Gradients that float16 holds, of a dz that is 4096 times its largest cotangent."""
    program = replace(SAVED, impl="chunked", dtype="float16", vocabulary=300, logit_scale=4096.0)
    held(Call(program, Data(size=7e-4)), Call(replace(program, impl="cce"), Data(size=7e-4)))

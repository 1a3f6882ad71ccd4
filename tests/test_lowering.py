"""Every kernel lowers for CUDA without a GPU, and every shipped tile configuration fits the GPUs it is for."""

import itertools
import warnings
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

import cce_jax
from cce_jax import linear_cross_entropy, prepare
from cce_kernels import blocks
from cce_kernels.block_floats import steps_shape
from cce_kernels.block_sparse import DE_BLOCK
from cce_kernels.device import Gpu
from cce_kernels.divergence_terms import Pass, Static, Whole
from cce_kernels.engines import hopper
from cce_kernels.engines.engine import Part, Problem, Step
from cce_kernels.engines.triton import TRITON
from cce_kernels.engines.triton.tiles import NARROW, NARROW_TABLE, SAFE, TABLE, Tiles, tiles_for
from cce_kernels.exponentials import saved_shape
from cce_kernels.head import Head
from cce_kernels.numbers import Cotangents, Inputs, Numbers, Wanted, WantedNumbers
from cce_kernels.plan import plan_of
from cce_kernels.request import Request
from tests.lowering import (
    LIMITS,
    REGISTERS,
    Resources,
    accesses_of_two_bytes,
    exported,
    kernels,
    resources,
    stack_accesses_in_loops,
)
from tests.nightly import NIGHTLY
from tests.plans import request_of, whole_bytes

S = jax.ShapeDtypeStruct
MIB = 2**20


@pytest.fixture(autouse=True, scope="module")
def on_a_gpu_that_only_triton_serves():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "local_gpu", lambda: Gpu("8.9", 132))
        patch.setattr(hopper, "MOSAIC", False)
        plan_of.cache_clear()
        jax.clear_caches()
        yield
    plan_of.cache_clear()
    jax.clear_caches()


def gradient(dtype, n=256, d=128, v=1024, vocab_axis=0, arrays=False, **options):
    """The kernels of loss and both gradients."""

    def loss(e, c, t, bias, class_weight):
        more = {"bias": bias, "class_weight": class_weight} if arrays else {}
        return linear_cross_entropy(e, c, t, impl="cce", vocab_axis=vocab_axis, **more, **options)

    c = S((v, d) if vocab_axis == 0 else (d, v), dtype)
    given = S((n, d), dtype), c, S((n,), jnp.int32), S((v,), dtype), S((v,), jnp.float32)
    return kernels(jax.value_and_grad(loss, (0, 1)), *given)


def names(launched) -> list[str]:
    return [kernel.name for kernel in launched]


FORWARD = ["target", "statistics", "rescue"]
# Twice where the device chooses: until the last kept token, or all of them with the matmuls left to XLA.
DZ = ["dz", "de", "dc", "dz"]
SAVED_DZ = ["saved_dz", "de", "dc", "saved_dz"]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_the_kernels_of_the_gradient(dtype, vocab_axis):
    """The loop over windows launches one kernel, or three; no kernel has more than one matmul."""
    found = gradient(dtype, vocab_axis=vocab_axis, memory_budget=0)
    assert sorted(names(found)) == sorted([*FORWARD, *DZ])
    assert {kernel.module.count("tt.dot ") for kernel in found} == {1}
    few = gradient(dtype, n=192, d=1024, vocab_axis=vocab_axis, memory_budget=0)  # XLA multiplies, and copies nothing
    assert names(few) == [*FORWARD, "dz"]
    for tokens in (255, 256):
        given = S((tokens, 64), dtype), S((512, 64), dtype), S((tokens,), jnp.int32)
        assert sorted(names(kernels(partial(linear_cross_entropy, impl="cce"), *given))) == sorted(FORWARD)


def test_the_kernels_of_a_gradient_with_saved_exponentials():
    shape = 2048, 128, 65536
    whole = gradient(jnp.bfloat16, *shape, memory_budget=whole_bytes(*shape))
    assert sorted(names(whole)) == sorted([*FORWARD, "replace", "targets", "clear", "de", "dc"])
    smoothed = gradient(jnp.bfloat16, *shape, memory_budget=2 * whole_bytes(*shape), label_smoothing=0.1)
    assert sorted(names(smoothed)) == sorted([*FORWARD, "replace", *SAVED_DZ])
    assert names(gradient(jnp.float16, *shape, memory_budget=10**10)).count("replace") == 0


def test_an_odd_vocabulary_costs_no_accesses_of_single_elements():
    """Masks end at a multiple of 8 columns, or each would be read and written by itself, without running ahead."""
    shape = 2048, 128, 50257
    found = [
        k
        for k in gradient(jnp.bfloat16, *shape, memory_budget=whole_bytes(*shape))
        if k.name not in ("target", "targets")
    ]
    assert {"statistics", "replace", "de", "dc"} <= set(names(found))
    assert [k.name for k in found if accesses_of_two_bytes(k, "9.0")] == []


@pytest.mark.parametrize(
    ("shape", "vocab_axis", "memory_budget"),
    [((1, 1, 1), 0, 0), ((250, 100, 1000), 1, 10**10), ((300, 65, 257), 0, 10**10), ((300, 65, 257), 1, 0)],
)
def test_ragged_shapes_and_every_option_lower(shape, vocab_axis, memory_budget):
    options: dict[str, Any] = {"softcap": 30.0, "logit_scale": 2.0, "arrays": True}
    found = gradient(jnp.bfloat16, *shape, vocab_axis, memory_budget=memory_budget, **options)
    assert set(FORWARD) < set(names(found))
    smoothed = gradient(jnp.bfloat16, *shape, vocab_axis, memory_budget=10**10, label_smoothing=0.1, **options)
    assert "dz" in names(smoothed)
    assert not set(FORWARD) & set(names(smoothed)), "with a softcap XLA computes the sum, and all other numbers"


def test_that_jax_deprecates_triton_reaches_no_user():
    """Nor an error where warnings are errors in each test of a user, and the loss was traced in an earlier one.

    cce_torch also has programs that launch kernels without cce_jax.
    """
    given = S((256, 128), jnp.bfloat16), S((512, 128), jnp.bfloat16), S((256,), jnp.int32)
    traced = jax.jit(jax.grad(linear_cross_entropy, (0, 1)))
    plan = plan_of(request_of((256, 128, 512), 2**20), Gpu("8.9", 132), "cce")

    def alone(e, c, targets):
        return blocks.numbers(Inputs(e, c, None, targets), plan)[0].lse

    for function, factor in itertools.product((traced, alone), (1, 2, 3)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = kernels(lambda *x, f=function, by=factor: jax.tree.map(lambda y: by * y, f(*x)), *given)
        assert "statistics" in names(found)
    before = list(warnings.filters)
    kernels(traced, *given)
    kernels(traced, *given)
    assert len(warnings.filters) <= len(before) + 1


@pytest.mark.parametrize("impl", ["auto", "cce"])
@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_log_probs", "linear_divergence"])
def test_kernels_are_exported_for_one_platform_at_a_time(name, impl):
    """JAX's own error for two is "Only interpret mode is supported on CPU backend"; docs/jax.md names the check."""
    given = S((256, 128), jnp.bfloat16), S((512, 128), jnp.bfloat16), S((256,), jnp.int32)

    def loss(e, c, targets, impl=impl):
        others = (e, c) if name == "linear_divergence" else (targets,)
        return sum(map(jnp.sum, jax.tree.leaves(getattr(cce_jax, name)(e, c, *others, impl=impl))))

    gradient = jax.grad(loss, (0, 1))
    with pytest.raises(NotImplementedError, match=rf"^{name}: .* one platform at a time.* for cpu, cuda: .*'chunked'"):
        exported(gradient, *given, platforms=("cpu", "cuda"))
    with pytest.raises(ValueError, match="compatibility guarantees"):
        exported(gradient, *given, platforms=("cuda",))
    calls = exported(gradient, *given, platforms=("cuda",), allowed=("__gpu$xla.gpu.triton",))
    assert "__gpu$xla.gpu.triton" in calls
    assert not exported(gradient, *given, platforms=("cpu",))
    exported(partial(loss, impl="chunked"), *given, platforms=("cpu", "cuda"))


@pytest.mark.parametrize("precision", ["highest", "default", "tensorfloat32"])
def test_float32_precision_reaches_the_kernels(precision):
    for kernel in gradient(jnp.float32, precision=precision):
        assert ("inputPrecision = tf32" in kernel.module) == (precision != "highest")


def test_an_invalid_module_is_refused():
    """A loop whose bounds have different types: JAX lowers it, and only a GPU's compiler would complain."""

    def kernel(n_ref, out_ref):
        last = jnp.where(n_ref[0] > 0, 5, 0)  # 64 bits wide, where the first is 32
        plgpu.store(out_ref.at[jnp.arange(16)], lax.fori_loop(0, last, lambda _, x: x + 1, jnp.zeros(16)))

    call = pl.pallas_call(kernel, out_shape=S((16,), jnp.float32), compiler_params=plgpu.CompilerParams(num_warps=1))
    with pytest.raises(ValueError, match="lowerBound, upperBound, step"):
        kernels(call, S((1,), jnp.int32))


SASS = """
 /*0100*/ LDG.E R0, [R2.64] ;
 /*0110*/ HMMA.16816.F32.BF16 R4, R0, R2, R4 ;
 /*0120*/ {} ;
 /*0130*/ @P0 BRA 0x110 ;
 /*0140*/ STL [R1+0x8], R4 ;
 /*0150*/ @P1 BRA 0x100 ;
"""


@pytest.mark.parametrize(("instruction", "count"), [("LDL R4, [R1+0x8]", 1), ("STL.64 [R1], R4", 1), ("NOP", 0)])
def test_spills_in_the_innermost_loop_are_seen(instruction, count):
    assert stack_accesses_in_loops(SASS.format(instruction)) == count


class Variant(NamedTuple):
    """A call at a real size, and which of its kernels are to be compiled."""

    dtype: Any
    kinds: tuple[str, ...]
    shape: tuple[int, int, int] = (8192, 2304, 256000)
    vocab_axis: int = 0
    precision: str | None = None
    every: bool = False  # option: bias, scale, softcap if nothing is saved, and in dz the weighted sum
    softcap: float | None = None
    saved: bool = False
    entropy: bool = False  # the mean of the logits, and temperatures
    spilled: int = 0  # bytes, at most, and never in a loop over D
    twins: bool = False  # compile every kernel of a name: dz of all tokens too, beside the one that stops; and, with
    # every option, the statistics of evaluation, which look up every row of e, beside those of training


@cache
def launched(variant: Variant, tiles: Tiles) -> list:
    """The kernels of the forward and the backward pass as the packages above launch them on a GPU with these tiles."""
    (n, d, v), f32 = variant.shape, jnp.float32
    dtype, every = jnp.dtype(variant.dtype), variant.every
    softcap = (
        30.0 if every and not variant.saved else variant.softcap
    )  # with every option and a softcap nothing is saved
    head = Head(softcap, variant.vocab_axis, variant.precision)  # type: ignore[arg-type]
    request = request_of(
        variant.shape, 300 * MIB, head, dtype=dtype.name, with_sum=every, wanted=Wanted(True, True, every)
    )
    request = replace(request, numbers=WantedNumbers(every, variant.entropy), with_temperature=variant.entropy)
    gpus = (Gpu(capability, 132) for capability in (*LIMITS, *UNKNOWN))
    gpu = next(gpu for gpu in gpus if tiles_for(dtype.itemsize, d, gpu) == tiles)
    plan = plan_of(
        replace(request, memory_budget=300 * MIB + 2 * v * n * variant.saved),
        gpu,
        "cce",
        "saved" if variant.saved else "recomputed",
    )
    alone = replace(request, numbers=replace(request.numbers, sum=False))  # XLA computes the sum
    training, evaluation = (plan_of(replace(alone, wanted=x), gpu, "cce") for x in (request.wanted, None))

    def both(e, c, bias, targets, weights, scale, inverse, numbers, saved, cotangents):
        if not every:
            bias, weights, scale = None, None, None
            numbers, cotangents = numbers._replace(sum=None), cotangents._replace(sum=None)
        if not variant.entropy:
            inverse, numbers, cotangents = None, numbers._replace(mean=None), cotangents._replace(mean=None)
        inputs = Inputs(e, c, bias, targets, weights, scale, inverse)
        forward_plans = [plan] if variant.saved else [training, evaluation] if every else [evaluation]
        found = blocks.gradients(inputs, numbers, saved if variant.saved else None, cotangents, plan)
        return [blocks.numbers(inputs, x) for x in forward_plans], found

    c = S((v, d) if variant.vocab_axis == 0 else (d, v), dtype)
    each = [S((n,), f32)] * 5
    return kernels(
        both,
        S((n, d), dtype),
        c,
        S((v,), dtype),
        S((n,), jnp.int32),
        S((v,), f32),
        S((1,), f32),
        S((n,), f32),
        Numbers(*each),
        S(saved_shape(n, v), dtype),
        Cotangents(*each[:4]),
    )


BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
LOGITS, PRODUCTS = ("statistics", "rescue", "dz"), ("de", "dc")
# With every option at a ragged shape, masks and tanh take more registers after the loop over D, once a tile.
RAGGED: dict[str, Any] = {"shape": (8000, 2300, 50257), "every": True, "spilled": 1024}
VARIANTS = {
    "bfloat16": Variant(BF16, ("target", *LOGITS, *PRODUCTS), twins=True),
    "(D, V)": Variant(BF16, ("statistics", "dz", *PRODUCTS), vocab_axis=1),
    # For 10.0 Triton 3.7's registers are just those with which two programs share a multiprocessor.
    "all saved": Variant(BF16, ("statistics", "replace", "targets", "clear", *PRODUCTS), saved=True, spilled=8),
    # The slope of each logit waits in registers for its exponential; on 9.0, where other kernels serve most calls, some
    # wait in memory, once a tile.
    "all saved, softcap": Variant(BF16, ("statistics", "replace"), saved=True, softcap=30.0, spilled=320),
    "every option, all saved": Variant(BF16, ("saved_dz",), saved=True, **RAGGED),
    "float16, every option": Variant(F16, ("statistics", "dz", "dc"), twins=True, **RAGGED),
    # On 9.0, where other kernels serve most calls, some registers wait in memory, once a tile.
    "entropy": Variant(BF16, ("target", *LOGITS), entropy=True, twins=True, spilled=112),
    "entropy, float32": Variant(F32, LOGITS, entropy=True, softcap=30.0),
    "float32": Variant(F32, ("statistics", "dz", *PRODUCTS)),
    # Matmuls on the CUDA cores: the tiles that suit TF32 leave few registers to what comes after the loop.
    "float32, highest": Variant(F32, ("statistics", "dz", "dc"), precision="highest", spilled=64),
}
UNKNOWN = ("12.1",)  # not in the table
SHIPPED = [
    *((gpu, name) for name in VARIANTS for gpu in LIMITS if gpu != "8.6"),  # those that launch the same follow another
    ("8.6", "bfloat16"),  # the rows of 8.9, and almost its instructions
    *((gpu, name) for gpu in UNKNOWN for name in ("bfloat16", "float32")),
]
# Triton's compiler takes minutes for all. `make test` compiles all kernels for one GPU, and for the others what they
# launch most. `.ci/run` and `make test-nightly` compile the rest too.
if not NIGHTLY:
    SHIPPED = [(gpu, name) for gpu, name in SHIPPED if gpu == "9.0" or name == "bfloat16"]


def hold(variant: Variant, tiles: Tiles, capability: str) -> None:
    """Every kernel of the variant within the limits of the GPU."""
    found = [kernel for kernel in launched(variant, tiles) if kernel.name in variant.kinds]
    assert set(names(found)) == set(variant.kinds)
    if not variant.twins:
        found = {kernel.name: kernel for kernel in found}.values()
    for kernel in found:
        taken = resources(kernel, capability)
        shared = LIMITS.get(capability, min(LIMITS.values())) * 1024
        limits = Resources(shared, REGISTERS, variant.spilled, 0)
        assert all(have <= most for have, most in zip(taken, limits, strict=True)), f"{kernel.name}: {taken}"


@pytest.mark.parametrize(("capability", "name"), SHIPPED)
def test_shipped_tiles_fit_their_gpu(capability, name):
    variant = VARIANTS[name]
    itemsize = jnp.dtype(variant.dtype).itemsize
    tiles = tiles_for(itemsize, variant.shape[1], Gpu(capability, 100))
    assert tiles is (SAFE[itemsize] if capability in UNKNOWN else TABLE[capability, itemsize])
    hold(variant, tiles, capability)


@pytest.mark.parametrize("capability", [capability for capability, _ in NARROW_TABLE])
def test_tiles_for_a_narrow_d_fit_their_gpu(capability):
    gpu = Gpu(capability, 100)
    tiles = tiles_for(2, NARROW, gpu)
    assert tiles is NARROW_TABLE[capability, 2]
    assert tiles_for(2, NARROW + 1, gpu) is TABLE[capability, 2]
    hold(Variant(BF16, ("dz",), (32768, 768, 128256), twins=True), tiles, capability)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("capability", ["8.0", "9.0", "12.0"])
def test_the_pass_of_a_divergence_fits_its_gpu(capability, kind):
    """Two programs of a tile are one kernel, which has the registers of both. The vocabulary fills no last tile."""
    gpu, vocabulary = Gpu(capability, 100), 50257
    request = Request(512, 64, vocabulary, "bfloat16", Head(softcap=30.0), False, Wanted(True, True, False), 2**30)
    step = TRITON.step("divergence_pass", request, gpu)
    numbers, logits = S((512,), F32), S((512, vocabulary), F32)
    sides = (Whole(logits, numbers, numbers),) * 2
    given = Pass(*sides, numbers, None, numbers, S((1,), F32) if kind == "jsd" else None)
    static, start = Static(kind, True, True, True), S((), jnp.int32)

    def run(given, count, dz):
        return TRITON.divergence_pass(step, Problem(request, gpu, None), given, count, dz, static)  # type: ignore[arg-type]

    (kernel,) = kernels(run, given, start, (S(saved_shape(512, vocabulary), BF16), start))
    taken = resources(kernel, capability)
    assert kernel.name == "divergence"
    assert taken.stack == 0
    assert taken.registers <= 128, taken


class Summed(NamedTuple):
    """A sum of dc over chunks, whose kernel is to be compiled."""

    vocab_axis: int = 0
    width: int = 2304
    vocabulary: int = 256000
    wide: bool = False  # dc is float32
    spilled: int = 0  # bytes, at most, and never in the loop over tokens

    def kernels(self, gpu: Gpu) -> list:
        head, n, entries = Head(vocab_axis=self.vocab_axis), 1024, saved_shape(1, self.vocabulary)[1]
        request = replace(request_of((n, self.width, self.vocabulary), 0, head), wide_dc=self.wide)
        step, steps = TRITON.step("sum_dc", request, gpu), steps_shape(request.vocabulary, request.width)

        def run(dc, steps, left, e, count):
            return TRITON.sum_dc(step, request, gpu, dc, None if self.wide else steps, Part(left, e, None, count))

        c = (self.vocabulary, self.width) if self.vocab_axis == 0 else (self.width, self.vocabulary)
        return kernels(
            run,
            S(c, F32 if self.wide else BF16),
            S(steps, F32),
            S((n, entries), BF16),
            S((n, self.width), BF16),
            S((1,), jnp.int32),
        )


# The elements of a (D, V) array with an odd V are read and written one by one, each at an address of its own.
ODD = Summed(1, vocabulary=50257, spilled=2048)
SUMS = Summed(), Summed(1), ODD, Summed(wide=True), Summed(1, 640)


@pytest.mark.parametrize(
    "capability", [gpu for gpu in (*LIMITS, *UNKNOWN) if gpu != "8.6"] if NIGHTLY else ["8.9", "9.0"]
)
def test_the_sum_of_dc_fits_its_gpu(capability):
    """The old tile waits in registers while the new part is summed."""
    for summed in SUMS:
        (kernel,) = summed.kernels(Gpu(capability, 100))
        taken = resources(kernel, capability)
        limits = Resources(LIMITS.get(capability, min(LIMITS.values())) * 1024, REGISTERS, summed.spilled, 0)
        assert all(have <= most for have, most in zip(taken, limits, strict=True)), f"{summed}: {taken}"


@pytest.mark.parametrize("bits", [32, 64])
def test_the_search_for_thresholds_fits_its_gpu(bits):
    """Whatever size JAX's integers have by default. Only the kernels for Hopper leave out blocks."""
    thresholds = partial(TRITON.thresholds, Step(TRITON, None), Gpu("9.0", 132))
    with jax.enable_x64(bits == 64):
        (kernel,) = kernels(thresholds, S((4000, 1024), F32), S((4000, 1024 // DE_BLOCK.tokens), F32), S((1024,), F32))
    taken, limits = resources(kernel, "9.0"), Resources(LIMITS["9.0"] * 1024, REGISTERS, 0, 0)
    assert all(have <= most for have, most in zip(taken, limits, strict=True)), taken


def test_the_table_reaches_the_kernels(monkeypatch):
    """What the GPU at hand is decides the launches of a call."""
    for gpu, width in (("9.0", 2304), ("9.0", 768), ("8.9", 768), ("13.0", 768)):
        monkeypatch.setattr(prepare, "local_gpu", lambda gpu=gpu: Gpu(gpu, 100))
        jax.clear_caches()
        tiles = tiles_for(2, width, Gpu(gpu, 100))
        found = gradient(BF16, d=width, v=1000, memory_budget=0)  # a V that no other kernel is for
        role = {
            "statistics": tiles.statistics,
            "rescue": tiles.statistics,
            "dz": tiles.dz,
            "de": tiles.de,
            "dc": tiles.dc,
        }
        for kernel in found:
            if kernel.name in role:
                tile = role[kernel.name]
                assert (kernel.warps, kernel.stages) == (tile.warps, tile.stages)
                assert f"tensor<{tile.rows}x{tile.columns}xf32>" in kernel.module
    jax.clear_caches()

"""The compiled kernels on a GPU: run with `pytest -m gpu`. `python -m tests.search` draws thousands of calls there."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import truth as float64
from bench.data import Shape, flat, trained
from cce_jax import linear_cross_entropy
from tests import test_edges as edges
from tests import test_transforms as transforms
from tests.cases import CASES, inputs
from tests.search.calls import DIVERGENCE, Call, Data, Program
from tests.search.run import failures
from tests.test_structure import arrays, traced
from tests.tolerance import error

pytestmark = pytest.mark.gpu
MIB = 2**20


def loss(e, c, targets, **options):
    return linear_cross_entropy(e, c, targets, impl="cce", **options)


def gradients(e, c, targets, **options):
    return jax.jit(jax.value_and_grad(lambda e, c: loss(e, c, targets, **options), (0, 1)))(e, c)


def check_mean_loss(e, c, targets):
    exact = float64.mean_loss(e, c, targets)
    value, (de, dc) = gradients(e, c, targets)
    assert abs(float(value) - exact.loss) < 1e-4
    assert float64.relative_error(de, exact.de) < 1.8 * float64.rounding_error(exact.de, e.dtype)
    assert float64.relative_error(dc, exact.dc) < 1.8 * float64.rounding_error(exact.dc, c.dtype)


@pytest.mark.parametrize("make", [trained, flat])
def test_more_than_two_to_the_31_logits(make):
    shape = Shape(20_000, 64, 120_000)
    assert shape.tokens * shape.vocabulary > 2**31
    check_mean_loss(*make(shape))


def test_a_classifier_of_more_than_two_to_the_32_bytes():
    shape = Shape(300, 8192, 300_000)
    assert 2 * shape.width * shape.vocabulary > 2**32
    check_mean_loss(*trained(shape))


def test_edges():
    with edges.call_torch.small_blocks():
        for package, impl in (("jax", "cce"), ("torch", "chunked"), ("torch", "torch_compile")):
            edges.test_float16_keeps_what_is_far_smaller_than_the_largest_cotangent(package, impl)
            wide = Program(package, impl, dtype="bfloat16", index_dtype="int64", objective=("lse",), return_lse=True)
            assert not failures(Call(replace(wide, reduction="none"), Data(out_of_range=3)))


def test_vmap():
    transforms.test_reverse_mode("vmap of grad of scan of checkpoint", "c", "cce")


@pytest.mark.parametrize("scaled", [{"temperature": 0.076}, {"logit_scale": 13.0}], ids=lambda x: next(iter(x)))
def test_the_exponential_of_the_largest_of_far_logits_is_1(scaled):
    """Multiplied and subtracted in one operation it would be that of the rounding of a logit, here of up to 0.01."""
    program = Program(
        function=DIVERGENCE, divergence="reverse_kl", dtype="bfloat16", teacher_dtype="bfloat16", **scaled
    )
    program = replace(program, leading=(300,), width=128, teacher_width=128, vocabulary=2048, wanted=("e",))
    assert not failures(Call(replace(program, reduction="sum"), Data(kind="far", size=3000.0)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_same_call_same_bits(dtype):
    e, c, targets = trained(Shape(1000, 256, 50_000), dtype)
    first = gradients(e, c, targets)
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, gradients(e, c, targets), first)


def test_float32_is_right_to_float32_rounding_at_highest():
    e, c, targets = trained(Shape(1024, 512, 32_000), jnp.float32)
    exact = float64.mean_loss(e, c, targets)
    value, (de, dc) = gradients(e, c, targets, precision="highest")
    reference = jax.grad(
        lambda e, c: linear_cross_entropy(e, c, targets, impl="reference", precision="highest"), (0, 1)
    )(e, c)
    assert abs(float(value) - exact.loss) < 4e-6
    for actual, want, theirs in zip((de, dc), (exact.de, exact.dc), reference, strict=True):
        assert float64.relative_error(actual, want) < 2 * float64.relative_error(theirs, want) + 1e-7


TRITON, MOSAIC = (rf'custom_call_target="{name}"' for name in (r"__gpu\$xla\.gpu\.triton", "mosaic_gpu_v2"))


def launches(program: str) -> tuple[int, int]:
    return len(re.findall(TRITON, program)), len(re.findall(MOSAIC, program))


def test_scratch_and_structure_at_gemma2_2b():
    """What the compiler reserves: at most 16 MiB to evaluate, 640 MiB for both gradients, and no logits anywhere."""
    tokens, width, vocabulary = 8192, 2304, 256_000
    e, c = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((tokens, width), (vocabulary, width)))
    t = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    evaluate = jax.jit(loss).lower(e, c, t).compile()
    assert evaluate.memory_analysis().temp_size_in_bytes <= 16 * MIB
    assert launches(evaluate.as_text()) == (2, 1)  # target, rescue; statistics
    train = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(e, c, t).compile()
    assert train.memory_analysis().temp_size_in_bytes <= 640 * MIB
    text = train.as_text()
    # in the loop: target, rescue and three more; statistics, de and dc
    assert launches(text) == (5, 3)
    sizes = [
        int(np.prod([int(n) for n in dims.split(",")])) for dims in re.findall(r"\b(?:bf16|f32)\[([\d,]+)\]", text)
    ]
    assert vocabulary * width <= max(sizes) < tokens * vocabulary


def test_a_frozen_input_costs_nothing():
    """The matmuls in the compiled program: ours, or XLA's where Triton's kernel forms dz."""
    for vocabulary, matmul in ((32_000, MOSAIC), (32_004, r"custom_call_target=\"__cublas| dot\(")):
        e, c, targets = flat(Shape(4096, 512, vocabulary))
        unsaved = partial(loss, memory_budget=0)
        texts = (jax.jit(jax.grad(unsaved, of)).lower(e, c, targets).compile().as_text() for of in ((0, 1), 0, 1))
        both, of_e, of_c = (len(re.findall(matmul, text)) for text in texts)
        assert of_e == of_c == both - 1
        assert both == (4 if matmul == MOSAIC else 2)  # those of the logits among ours
    assert ("bfloat16", 32_000 * 512) not in arrays(traced("cce", 0)), "no dc for a frozen c"


MEMCHECK = """
import jax, jax.numpy as jnp, numpy as np
from cce_jax import linear_cross_entropy
e, c = jnp.ones((200, 72), jnp.bfloat16), jnp.ones((1000, 72), jnp.bfloat16)
run = jax.jit(jax.value_and_grad(lambda e, c, t: linear_cross_entropy(e, c, t, impl="cce"), (0, 1)))
for bad in (1000, 2**31 - 1, -1, -(2**31)):
    loss, grads = run(e, c, jnp.arange(200).at[7].set(bad))
    assert np.isnan(loss), (bad, loss)
    jax.block_until_ready(grads)
print("every out-of-range target gave NaN")
"""


def test_out_of_range_targets_touch_no_memory_under_memcheck(tmp_path):
    """Compiled without the checker, under which XLA takes minutes for that."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not shutil.which(tool):
        pytest.skip("compute-sanitizer is not installed")
    cached = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    for checker in ([], [tool, "--tool", "memcheck", "--error-exitcode", "9"]):
        checked = subprocess.run(
            [*checker, sys.executable, "-c", MEMCHECK],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, **cached},
        )
        assert checked.returncode == 0, checked.stdout[-3000:] + checked.stderr[-3000:]
    assert "every out-of-range target gave NaN" in checked.stdout
    assert "ERROR SUMMARY: 0 errors" in checked.stdout + checked.stderr


@pytest.mark.parametrize(("dtype", "same", "other"), [("bfloat16", "cce", "chunked"), ("float32", "chunked", "cce")])
def test_auto_is_the_kernels_here_and_xla_for_float32(dtype, same, other):
    given = inputs(CASES[0], dtype)
    auto, same, other = (linear_cross_entropy(given.e, given.c, given.targets, impl=x) for x in ("auto", same, other))
    assert auto == same
    assert error(auto, other) < 1e-5

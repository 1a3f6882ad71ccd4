"""Every kernel lowers for CUDA without a GPU, and every shipped tile configuration fits the GPUs it is for."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from cce_jax import linear_cross_entropy
from cce_kernels import backward, forward
from cce_kernels.config import FLOAT32, SAFE, SIXTEEN_BIT, Gpu, tile_config
from cce_kernels.groups import Wanted
from cce_kernels.logits import Head
from tests.lowering import LIMITS, compile_module, triton_modules

S = jax.ShapeDtypeStruct


def gradient(dtype, n=256, d=128, v=1024, vocab_axis=0, **options):
    """The Triton modules of loss and both gradients."""
    c = S((v, d) if vocab_axis == 0 else (d, v), dtype)

    def loss(e, c, t, bias, class_weight):
        more = {"bias": bias, "class_weight": class_weight} if options.pop("arrays", False) else {}
        return linear_cross_entropy(e, c, t, impl="cce", vocab_axis=vocab_axis, **more, **options)

    return triton_modules(
        jax.grad(loss, (0, 1)), S((n, d), dtype), c, S((n,), jnp.int32), S((v,), dtype), S((v,), jnp.float32)
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_the_gradient_is_four_kernels(dtype, vocab_axis):
    """target, statistics, rescue, dz: the loop over groups launches one kernel, the matmuls are XLA's."""
    modules = gradient(dtype, vocab_axis=vocab_axis)
    names = ["_target_kernel", "_statistics_kernel", "_statistics_kernel", "_dz_kernel"]
    assert len(modules) == len(names)
    assert [m.count("tt.dot ") for m in modules] == [1, 1, 1, 1]


@pytest.mark.parametrize("shape", [(1, 1, 1), (250, 100, 1000), (129, 65, 257)])
@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_ragged_shapes_and_every_option_lower(shape, vocab_axis):
    n, d, v = shape
    modules = gradient(
        jnp.bfloat16, n, d, v, vocab_axis, arrays=True, softcap=30.0, label_smoothing=0.1, logit_scale=2.0
    )
    assert len(modules) == 4


@pytest.mark.parametrize("precision", ["highest", "default", "tensorfloat32"])
def test_float32_precision_reaches_the_kernels(precision):
    for module in gradient(jnp.float32, precision=precision):
        assert ("inputPrecision = tf32" in module) == (precision != "highest")


def test_evaluation_is_three_kernels():
    modules = triton_modules(
        lambda e, c, t: linear_cross_entropy(e, c, t, impl="auto"),
        S((256, 64), jnp.bfloat16), S((512, 64), jnp.bfloat16), S((256,), jnp.int32),
    )  # fmt: skip
    assert len(modules) == 3


def test_vmap_lowers():
    def loss(e, c, t):
        return jnp.sum(jax.vmap(lambda e, t: linear_cross_entropy(e, c, t, impl="cce"))(e, t))

    e, c, t = S((3, 64, 32), jnp.bfloat16), S((200, 32), jnp.bfloat16), S((3, 64), jnp.int32)
    assert len(triton_modules(jax.grad(loss, (0, 1)), e, c, t)) == 4


def kernels(dtype, tiles):
    """The statistics and dz modules at a real size, for the given tiles."""
    n, d, v = 4096, 2304, 128256
    e, c, t = S((n, d), dtype), S((v, d), dtype), S((n,), jnp.int32)
    head = Head(precision="highest")
    stats = partial(forward.statistics, head=head, with_sum=False, interpret=False, tiles=tiles)
    dz = partial(backward.gradients, head=head, wanted=Wanted(True, True, False), interpret=False, tiles=tiles)
    _, statistics, rescue = triton_modules(lambda e, c, t: stats(e, c, None, t, None), e, c, t)
    (form_dz,) = triton_modules(
        lambda e, c, t, lse, ct: dz(e, c, None, t, None, lse, ct), e, c, t, S((n,), jnp.float32), S((2, n), jnp.float32)
    )
    return {"statistics": statistics, "rescue": rescue, "dz": form_dz}


SHIPPED = [
    *((c, jnp.bfloat16) for c in SIXTEEN_BIT),
    *((c, jnp.float32) for c in FLOAT32),
    *((c, d) for c in LIMITS if c not in SIXTEEN_BIT for d in (jnp.bfloat16, jnp.float32)),
]


@pytest.mark.parametrize(("capability", "dtype"), SHIPPED, ids=lambda x: getattr(x, "__name__", x))
def test_shipped_tiles_fit_their_gpu(capability, dtype):
    tiles = tile_config(dtype, Gpu(capability, 100))
    if capability not in SIXTEEN_BIT:
        assert tiles is SAFE[jnp.dtype(dtype).itemsize]
    for name, module in kernels(dtype, tiles).items():
        taken = compile_module(module, capability, tiles.warps, tiles.stages)
        assert taken.shared <= LIMITS[capability] * 1024, f"{name}: {taken}"
        assert taken.stack == 0, f"{name} spills: {taken}"

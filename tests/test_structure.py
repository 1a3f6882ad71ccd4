"""What the compiled programs hold and compute: no logits, no work for a frozen input, one trace a shape."""

import re
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cce_jax import api, linear_cross_entropy
from cce_kernels.device import H200, INTERPRETER
from cce_kernels.plan import plan_of
from cce_kernels.plan.budget import GROUP_BYTES
from tests.lowering import nested
from tests.plans import call_of, whole_bytes

N, D, V = 4096, 24, 100_000
BOUND = 64 * 2**20  # of chunked's block of logits
E = jax.ShapeDtypeStruct((N, D), jnp.bfloat16)
C = jax.ShapeDtypeStruct((V, D), jnp.bfloat16)
T = jax.ShapeDtypeStruct((N,), jnp.int32)


def program(impl, argnums=None, **options):
    """The loss as a function of e, c and targets, or its gradient."""

    def loss(e, c, t):
        return linear_cross_entropy(e, c, t, impl=impl, **options)

    return loss if argnums is None else jax.grad(loss, argnums)


def traced(impl, argnums=None, **options):
    return jax.make_jaxpr(program(impl, argnums, **options))(E, C, T).jaxpr


def compiled(impl, argnums=None):
    return jax.jit(program(impl, argnums)).lower(E, C, T).compile()


def arrays(jaxpr) -> set[tuple[str, int]]:
    """(type, number of elements) of everything that a traced program computes, at any depth outside the kernels."""
    return {
        (v.aval.dtype.name, v.aval.size) for eqn in equations(jaxpr) for v in eqn.outvars if hasattr(v.aval, "dtype")
    }


def equations(jaxpr) -> Iterator:
    """All of them, at any depth outside the kernels."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name != "pallas_call":
            for inner in nested(eqn):
                yield from equations(inner)


def kernels(jaxpr) -> dict[str, list]:
    """The equations that launch a kernel, by its name: one each for the GPU and for the interpreter."""
    found: dict[str, list] = {}
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "pallas_call":
            found.setdefault(eqn.params["name"], []).append(eqn)
    return found


@pytest.mark.parametrize("argnums", [None, 0, 1, (0, 1)])
@pytest.mark.parametrize("impl", ["chunked", "cce"])
def test_no_buffer_of_the_size_of_the_logits(impl, argnums):
    sizes = arrays(traced(impl, argnums))
    assert not [s for s in sizes if s[1] >= N * V], "an array of N·V elements"
    assert ("float32", V * D) not in sizes, "a float32 copy of c or of its gradient"
    assert ("bfloat16", V * D) in sizes or argnums in (None, 0), "the check sees dc"
    assert [s for s in arrays(traced("reference", argnums)) if s[1] >= N * V], "the check sees logits"


@pytest.mark.parametrize("argnums", [None, 0, 1, (0, 1)])
def test_chunked_holds_one_bounded_block(argnums):
    """Its logits and what becomes of them; on a CPU XLA also widens bfloat16 operands of its matmuls, here c."""
    temporary = compiled("chunked", argnums).memory_analysis().temp_size_in_bytes
    assert temporary < 2 * BOUND + 2 * 4 * V * D + 2**20
    assert compiled("reference", argnums).memory_analysis().temp_size_in_bytes > 1.5 * temporary


def matmuls(argnums) -> int:
    """How many matmuls the traced program does with a block of logits on one side."""

    def count(jaxpr) -> int:
        inner = sum(count(p) for eqn in jaxpr.eqns for p in nested(eqn))
        return inner + sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns)

    return count(traced("chunked", argnums))


def test_only_what_needs_a_gradient_is_computed():
    """One matmul forward; and backward the logits again, de, dc."""
    assert matmuls(None) == 1
    assert matmuls((0, 1)) == 4
    assert matmuls(0) == 3
    assert matmuls(1) == 3


def test_stop_gradient_freezes_too():
    def loss(e, c):
        return linear_cross_entropy(e, jax.lax.stop_gradient(c), np.zeros(N, np.int32), impl="chunked")

    text = jax.jit(jax.grad(loss)).lower(E, C).compile().as_text()
    assert len(re.findall(r" dot\(", text)) == 3


WHOLE = whole_bytes(N, D, V)
PART = WHOLE // 2 + GROUP_BYTES
LAUNCHES = {  # by the name of a kernel, how often the two passes launch it: once more where the kept tokens decide
    0: {"cce_target": 1, "cce_statistics": 1, "cce_rescue": 1, "cce_dz": 2, "cce_de": 1, "cce_dc": 1},
    PART: {"cce_target": 1, "cce_statistics": 1, "cce_rescue": 1, "cce_replace": 1, "cce_targets": 1, "cce_clear": 1,
           "cce_dz": 1, "cce_de": 2, "cce_dc": 2},
    WHOLE: {"cce_target": 1, "cce_statistics": 1, "cce_rescue": 1, "cce_replace": 1, "cce_targets": 1, "cce_clear": 1,
            "cce_de": 1, "cce_dc": 1},
}  # fmt: skip


def residuals(impl, memory_budget, **options) -> list[tuple[str, int]]:
    """(type, number of elements) of what the forward pass leaves for the backward pass."""
    loss = partial(linear_cross_entropy, targets=np.zeros(N, np.int32), impl=impl, memory_budget=memory_budget)
    pullback = jax.eval_shape(lambda e, c: jax.vjp(partial(loss, **options), e, c)[1], E, C)
    return [(x.dtype.name, x.size) for x in jax.tree.leaves(pullback)]


def size(arrays: list[tuple[str, int]]) -> int:
    return sum(jnp.dtype(kind).itemsize * count for kind, count in arrays)


@pytest.mark.parametrize(("impl", "memory_budget"), [("cce", 0), ("chunked", 0), ("chunked", 2**40)])
def test_the_residuals_are_the_inputs_and_a_few_numbers_a_token(impl, memory_budget):
    assert size(residuals(impl, memory_budget)) <= 2 * (N * D + V * D) + 64 * N


@pytest.mark.parametrize("memory_budget", [300 * 2**20, PART, WHOLE - 1, WHOLE, 2**40])
def test_the_residuals_are_within_the_budget(memory_budget):
    """Beside the inputs and O(N) numbers: one bfloat16 array, of all tokens from whole_bytes on."""
    found = residuals("cce", memory_budget)
    large = [x for x in found if x[1] > N * D and x != ("bfloat16", V * D)]
    ((kind, count),) = large
    assert kind == "bfloat16"
    assert 0 < count == V * (count // V)
    assert size(large) <= memory_budget
    assert (count == N * V) == (memory_budget >= WHOLE)
    assert size(found) <= 2 * (N * D + V * D) + size(large) + 64 * N


def test_float16_and_float32_save_nothing():
    for dtype, tokens in (("float16", 0), ("float32", 0), ("bfloat16", N)):
        assert plan_of(call_of((N, D, V), 2**40, dtype=dtype), INTERPRETER, "cce").saved == tokens


@pytest.mark.parametrize(("memory_budget", "launches"), LAUNCHES.items())
def test_the_kernels_that_a_budget_launches(memory_budget, launches):
    """With all saved, no logit is computed a second time."""
    found = kernels(traced("cce", (0, 1), memory_budget=memory_budget))
    expected = {name: 2 * n for name, n in launches.items()}
    interpreted = plan_of(call_of((N, D, V), memory_budget), INTERPRETER, "cce")
    compiled = plan_of(call_of((N, D, V), memory_budget), H200, "cce", interpreted.saved)
    if "cce_clear" in expected and compiled.backward.saved.products.engine.stops:
        expected["cce_clear"] -= 1  # XLA would pad this matmul on an H200: the kernels in its place read no such rows
    assert {name: len(eqns) for name, eqns in found.items()} == expected


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_all_saved_is_one_array_that_every_kernel_works_on_in_place(argnums):
    jaxpr = traced("cce", argnums, memory_budget=whole_bytes(N, D, V, of_c=argnums != 0))
    assert [x for x in arrays(jaxpr) if x[1] >= N * V] == [("bfloat16", N * V)], "no float32 logits, nothing larger"
    made = [e for e in equations(jaxpr) if any(v.aval.size == N * V for v in e.outvars)]
    passed_on = {"jit", "pjit", "cond", "custom_jvp_call", "custom_vjp_call", "pallas_call"}
    assert {e.primitive.name for e in made} <= passed_on
    fresh = {
        e.params["name"] for e in made if e.primitive.name == "pallas_call" and not e.params["input_output_aliases"]
    }
    assert fresh == {"cce_statistics"}


def test_evaluation_saves_nothing():
    jaxpr = traced("cce", memory_budget=2**40)
    assert not [x for x in arrays(jaxpr) if x[1] > V * D]
    assert set(kernels(jaxpr)) == {"cce_target", "cce_statistics", "cce_scattered", "cce_rescue"}


def test_traced_once_a_shape():
    api._loss.clear_cache()
    e, c, t = np.ones((32, 8), np.float32), np.ones((100, 8), np.float32), np.zeros(32, np.int32)
    for _ in range(3):
        linear_cross_entropy(e, c, t, impl="chunked")
    assert api._loss._cache_size() == 1
    linear_cross_entropy(e[:16], c, t[:16], impl="chunked")
    assert api._loss._cache_size() == 2


def test_importing_starts_no_backend():
    import subprocess
    import sys

    code = "import cce_jax, jax._src.xla_bridge as b; assert not b._backends, b._backends"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_transformers_imports_from_the_repository_root():
    """A folder named kernels once shadowed the package of that name that transformers imports."""
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", "import transformers.modeling_utils, cce_jax"], check=True, timeout=300)

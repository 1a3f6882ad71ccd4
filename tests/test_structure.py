"""What the compiled programs hold and compute: no logits, no work for a frozen input, one trace a shape."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cce_jax import api, linear_cross_entropy

N, D, V = 4096, 24, 100_000
BOUND = 64 * 2**20  # of chunked's block of logits
E = jax.ShapeDtypeStruct((N, D), jnp.bfloat16)
C = jax.ShapeDtypeStruct((V, D), jnp.bfloat16)
T = jax.ShapeDtypeStruct((N,), jnp.int32)


def program(impl, argnums=None):
    """The loss as a function of e, c and targets, or its gradient."""

    def loss(e, c, t):
        return linear_cross_entropy(e, c, t, impl=impl)

    return loss if argnums is None else jax.grad(loss, argnums)


def traced(impl, argnums=None):
    return jax.make_jaxpr(program(impl, argnums))(E, C, T).jaxpr


def compiled(impl, argnums=None):
    return jax.jit(program(impl, argnums)).lower(E, C, T).compile()


def arrays(jaxpr) -> set[tuple[str, int]]:
    """(type, number of elements) of everything that a traced program computes, at any depth outside the kernels."""
    found = set()
    for eqn in jaxpr.eqns:
        found |= {(v.aval.dtype.name, v.aval.size) for v in eqn.outvars if hasattr(v.aval, "dtype")}
        if eqn.primitive.name != "pallas_call":
            for inner in nested(eqn):
                found |= arrays(inner)
    return found


def nested(eqn) -> list:
    """The programs inside an equation: loop bodies, branches, calls."""
    values = [x for v in eqn.params.values() for x in (v if isinstance(v, tuple | list) else [v])]
    return [p for p in (getattr(x, "jaxpr", x) for x in values) if hasattr(p, "eqns")]


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


@pytest.mark.parametrize("impl", ["chunked", "cce"])
def test_the_residuals_are_the_inputs_and_one_number_a_token(impl):
    def loss(e, c):
        return linear_cross_entropy(e, c, jnp.zeros(N, jnp.int32), impl=impl)

    _, pullback = jax.vjp(loss, jnp.ones((N, D), jnp.bfloat16), jnp.ones((128, D), jnp.bfloat16))
    saved = sum(x.nbytes for x in jax.tree.leaves(pullback))
    inputs = 2 * (N * D + 128 * D)
    assert saved <= inputs + 64 * N


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

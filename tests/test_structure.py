"""What the compiled programs hold and compute: no logits, no work for a frozen input, one trace a shape."""

import importlib.machinery
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cce_jax import linear_cross_entropy, linear_log_probs, linear_token_loss
from cce_kernels import blocks, given_ids
from cce_kernels.block_floats import steps_shape
from cce_kernels.device import INTERPRETER
from cce_kernels.head import Head
from cce_kernels.numbers import Inputs, WantedNumbers, divided
from cce_kernels.plan import plan_of, schedules
from tests.lowering import nested
from tests.plans import request_of, whole_bytes

ROOT = Path(__file__).parents[1]
N, D, V = 4096, 24, 99_968
BOUND = 64 * 2**20  # of chunked's block of logits
S = jax.ShapeDtypeStruct
E, C, T = S((N, D), jnp.bfloat16), S((V, D), jnp.bfloat16), S((N,), jnp.int32)


def program(impl, argnums=None, **options):
    """The loss as a function of e, c and targets, or its gradient."""

    def loss(e, c, t):
        return jnp.sum(linear_cross_entropy(e, c, t, impl=impl, **options))

    return loss if argnums is None else jax.grad(loss, argnums)


def traced(impl, argnums=None, **options):
    return jax.make_jaxpr(program(impl, argnums, **options))(E, C, T).jaxpr


def compiled(impl, argnums=None, **options):
    return jax.jit(program(impl, argnums, **options)).lower(E, C, T).compile()


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


def test_passes_over_the_logits_read_what_comes_out_of_a_barrier():
    """Else XLA computes them again in each, perhaps with other roundings, which a low temperature multiplies."""
    shapes = (S((8, 16), jnp.float32), S((96, 16), jnp.float32), S((96,), jnp.float32), S((1,), jnp.float32))
    traced = jax.make_jaxpr(Head(softcap=3.0).whole_logits)(*shapes).jaxpr
    assert traced.eqns[-1].primitive.name == "optimization_barrier"
    assert traced.eqns[-1].outvars == traced.outvars


def test_no_reference_is_subtracted_from_a_product_itself():
    """Some operation stays between the two in the compiled program: a GPU may do both in one, which rounds once."""

    def exponentials(x, inverse, reference):
        return jnp.exp(divided(x, inverse) - reference[:, None])

    shapes = S((8, 512), jnp.float32), S((8,), jnp.float32), S((8,), jnp.float32)
    compiled = jax.jit(exponentials).lower(*shapes).compile().as_text()
    made_by = dict(re.findall(r"(\S+) = f32\[8,512\]\S* (\w+)\(", compiled))
    (of,) = re.findall(r"f32\[8,512\]\S* subtract\((\S+),", compiled)
    assert "multiply" in made_by.values()
    assert made_by[of] != "multiply"


ELEMENTWISE = {"bitcast_convert_type", "broadcast_in_dim", "convert_element_type", "mul", "reshape", "slice", "sub"}
ELEMENTWISE |= {"transpose", "select_n", "jit", "pjit"}


@pytest.mark.parametrize("argnums", [None, 0, 1, (0, 1)])
@pytest.mark.parametrize("impl", ["chunked", "cce"])
def test_no_buffer_of_the_size_of_the_logits(impl, argnums):
    program = traced(impl, argnums)
    sizes, wide = arrays(program), ("float32", V * D)
    assert not [s for s in sizes if s[1] >= N * V], "an array of N·V elements"
    made = [e for e in equations(program) if any((v.aval.dtype.name, v.aval.size) == wide for v in e.outvars)]
    copies = {e.primitive.name for e in made} - ELEMENTWISE
    assert not copies, "a float32 copy of c or of its gradient, which XLA makes no part of what reads it"
    assert ("bfloat16", V * D) in sizes or argnums in (None, 0), "the check sees dc"
    assert [s for s in arrays(traced("reference", argnums)) if s[1] >= N * V], "the check sees logits"


@pytest.mark.parametrize("argnums", [None, (0, 1)])
def test_chunked_holds_one_bounded_block(argnums):
    """Its logits and what becomes of them; on a CPU XLA also widens bfloat16 operands of its matmuls, here c.

    With gradients the block is some tokens' logits of the whole vocabulary, and dz and a part of dc are beside it.
    """
    for memory_budget in (80 * 2**20, None):
        temporary = compiled("chunked", argnums, memory_budget=memory_budget).memory_analysis().temp_size_in_bytes
        assert temporary < min(memory_budget or 2**40, (2 if argnums is None else 5) * BOUND) + 2 * 4 * V * D
    assert compiled("reference", argnums).memory_analysis().temp_size_in_bytes > 4 * temporary


@pytest.mark.parametrize("megabytes", [100, 200])
def test_a_loss_with_the_entropy_is_within_the_budget_on_a_cpu(megabytes):
    """XLA's CPU compiler stores the products for the mean of a chunk's logits."""
    shapes = [S(shape, jnp.bfloat16) for shape in ((4096, 512), (40000, 512))]

    def loss(e, c, targets):
        options = {"entropy": True, "memory_budget": megabytes * 10**6, "impl": "chunked"}
        return linear_token_loss(e, c, targets, lambda x: -x.log_probs - 0.1 * x.entropy, **options)

    run = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes, S((4096,), jnp.int32))
    memory = run.compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes <= megabytes * 10**6


@pytest.mark.parametrize("impl", ["chunked", "cce"])
def test_log_probabilities_of_many_ids_are_gathered_in_chunks(impl):
    n, ids, memory_budget = 1024, 256, 2**26

    def loss(e, c, targets, ids):
        found = linear_log_probs(e, c, targets, ids=ids, impl=impl, memory_budget=memory_budget)
        return jnp.sum(found.log_probs) + jnp.sum(found.id_log_probs)

    shapes = S((n, D), jnp.bfloat16), C, S((n,), jnp.int32), S((n, ids), jnp.int32)
    run = jax.grad(loss, (0, 1))
    jaxpr = jax.make_jaxpr(run)(*shapes).jaxpr
    assert not [s for s in arrays(jaxpr) if s[1] >= n * V]
    if impl == "chunked":  # on a GPU XLA makes one kernel of the gather and the sum: tests/test_held.py
        gathered = [x.outvars[0].aval.size for x in equations(jaxpr) if x.primitive.name == "gather"]
        assert max(gathered) * 2 <= memory_budget // given_ids.BUDGET_SHARE < 2 * n * ids * D
        held = jax.jit(run).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
        assert held < memory_budget + 4 * V * D, "on a CPU XLA widens c"


def flops(jaxpr) -> float:
    """Of all matmuls of a traced program, each as often as its loop runs. Of branches the one with most counts."""
    found = 0.0
    for eqn in jaxpr.eqns:
        inner = [flops(p) for p in nested(eqn)]
        inner = max(inner) if eqn.primitive.name == "cond" else sum(inner)
        found += inner * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        if eqn.primitive.name == "dot_general":
            ((over, _), _), left = eqn.params["dimension_numbers"], eqn.invars[0].aval
            found += 2.0 * eqn.outvars[0].aval.size * np.prod([left.shape[axis] for axis in over])
    return found


def matmuls(argnums, **options) -> float:
    """How many matmuls of all tokens and columns the traced program does. Windows and chunks may overlap a little."""
    return flops(traced("chunked", argnums, **options)) / (2.0 * N * D * V)


@pytest.mark.parametrize("memory_budget", [80 * 2**20, None])
def test_only_what_needs_a_gradient_is_computed(memory_budget):
    """The logits, de and dc; and for dc the logits again where only the backward pass knows the cotangents."""

    def stopped(e, c):
        return linear_cross_entropy(e, jax.lax.stop_gradient(c), np.zeros(N, np.int32), impl="chunked")

    assert flops(jax.make_jaxpr(jax.grad(stopped))(E, C).jaxpr) == pytest.approx(2 * 2.0 * N * D * V, rel=0.03)
    for argnums, count in ((None, 1), ((0, 1), 3), (0, 2), (1, 2)):
        assert matmuls(argnums, memory_budget=memory_budget) == pytest.approx(count, rel=0.03)
        again = argnums not in (None, 0)
        assert matmuls(argnums, memory_budget=memory_budget, reduction="none") == pytest.approx(count + again, rel=0.03)


def test_a_recomputed_forward_pass_forms_the_gradients_once():
    """And the first, whose results are dropped, forms none: in each step of a scan 1 + 3 matmuls."""

    def loss(c, e):
        each = jax.checkpoint(partial(linear_cross_entropy, targets=np.zeros(N, np.int32), impl="chunked"))
        return jax.lax.scan(lambda total, e: (total + each(e, c), None), 0.0, e)[0]

    e = S((2, N, D), jnp.float32)
    c = S((V, D), jnp.float32)
    text = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(c, e).compile().as_text()
    assert len(re.findall(r" dot\(", text)) == 4, "of one chunk, as the loops over chunks and tokens count once"
    frozen = jax.jit(jax.value_and_grad(loss)).lower(c, e).compile().as_text()
    assert len(re.findall(r" dot\(", frozen)) == 3


WHOLE = whole_bytes(N, D, V)


def residuals(impl, memory_budget, **options) -> list[tuple[str, int]]:
    """(type, number of elements) of what the forward pass leaves for the backward pass."""
    loss = partial(linear_cross_entropy, targets=np.zeros(N, np.int32), impl=impl, memory_budget=memory_budget)
    pullback = jax.eval_shape(lambda e, c: jax.vjp(partial(loss, **options), e, c)[1], E, C)
    return [(x.dtype.name, x.size) for x in jax.tree.leaves(pullback)]


def size(arrays: list[tuple[str, int]]) -> int:
    return sum(jnp.dtype(kind).itemsize * count for kind, count in arrays)


@pytest.mark.parametrize(("impl", "gpu"), [("chunked", None), ("cce", INTERPRETER)])
def test_what_the_forward_pass_leaves(impl, gpu):
    """Without a budget the inputs and a few numbers a token. Else de, dc and its steps too, within the budget."""
    memory_budget, inputs = 300 * 2**20, 2 * (N * D + V * D)
    assert size(residuals(impl, 0)) <= inputs + 64 * N
    assert size(residuals("chunked", 2**40, reduction="none")) <= inputs + 64 * N
    found = residuals(impl, memory_budget)
    how = plan_of(replace(request_of((N, D, V), memory_budget), one_factor=True), gpu, impl).in_forward
    assert how is not None
    steps = ("float32", int(np.prod(steps_shape(V, D))))
    assert sorted(x for x in found if x[1] > N * D) == sorted([("bfloat16", V * D), ("int16", V * D), steps])
    assert size(found) - 2 * inputs <= memory_budget


@pytest.mark.parametrize("memory_budget", [300 * 2**20, WHOLE - 1, WHOLE, 2**40])
def test_the_residuals_are_within_the_budget(memory_budget):
    """Beside the inputs and O(N) numbers: nothing, and from whole_bytes on one bfloat16 array of all tokens."""
    found = residuals("cce", memory_budget, reduction="none")
    large = [x for x in found if x[1] > N * D and x != ("bfloat16", V * D)]
    assert large == [("bfloat16", N * V)] * (memory_budget >= WHOLE)
    assert size(large) <= memory_budget
    assert size(found) <= 2 * (N * D + V * D) + size(large) + 64 * N


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=str)
def test_the_kernels_that_form_gradients_in_the_forward_pass(options):
    """One each for all chunks, on a GPU and in the interpreter; no exponentials of more tokens than a chunk's.

    Label smoothing needs no kernel.
    """
    jaxpr = traced("cce", (0, 1), memory_budget=300 * 2**20, **options)
    of_chunk = "cce_target", "cce_statistics", "cce_rescue", "cce_replace", "cce_targets", "cce_dc_sum"
    found = {name: len(eqns) for name, eqns in kernels(jaxpr).items()}
    assert found == {"cce_de": 1} | dict.fromkeys(of_chunk, 2), "an H200 takes XLA's product for de"
    assert max(size for _, size in arrays(jaxpr)) < N * V / 2
    made = [
        e for e in equations(jaxpr) if e.primitive.name == "pallas_call" and max(v.aval.size for v in e.outvars) > V * D
    ]
    fresh = {e.params["name"] for e in made if not e.params["input_output_aliases"]}
    assert fresh == {"cce_statistics"}, "every other kernel works on a chunk's exponentials in place"


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


def test_evaluation_in_several_blocks_is_traced_once(monkeypatch):
    monkeypatch.setattr(schedules, "EVALUATED", 1)
    plan_of.cache_clear()
    traces, sums = [], blocks._from_sums
    monkeypatch.setattr(blocks, "_from_sums", lambda *x, **y: traces.append(x) or sums(*x, **y))
    plan = plan_of(
        replace(request_of((96, 16, 300), 0, wanted=None), numbers=WantedNumbers(mean=True)), INTERPRETER, "cce"
    )
    given = S((96, 16), jnp.bfloat16), S((300, 16), jnp.bfloat16), S((96,), jnp.int32)
    found = jax.eval_shape(lambda e, c, t: blocks.numbers(Inputs(e, c, None, t), plan)[0], *given)
    assert plan.rows < 96
    assert found.mean.shape == found.log_mass.shape == (96,)
    assert len(traces) == 1
    plan_of.cache_clear()


def test_transformers_imports_from_the_repository_root():
    """A folder named kernels once shadowed the package of that name that transformers imports.

    Without an __init__.py it is part of a namespace, over which Python prefers any package.
    """
    spec = importlib.machinery.PathFinder.find_spec("kernels", [str(ROOT)])
    assert spec is not None
    assert spec.loader is None or isinstance(spec.loader, importlib.machinery.NamespaceLoader)

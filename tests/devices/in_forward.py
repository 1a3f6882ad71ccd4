"""Gradients that the forward pass forms over devices: drawn calls against float64, and what a program exchanges."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import count, cycle, islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cce_jax import linear_cross_entropy
from cce_kernels import blocks
from cce_kernels.plan import choose
from cce_kernels.plan.schedules import Setting
from cce_kernels.tokens import Chunks, gathered_rows
from tests.devices.meshes import (
    BY_NAME,
    EXCHANGED,
    PLAIN,
    WHOLE,
    arrays,
    assert_exchanged,
    collectives,
    compiled_gradient,
    leaves_of,
    loss_of,
    mesh_of,
    uneven,
)
from tests.search.calls import CROSS_ENTROPY, LEAVES, SHARED, Call, Data, Program, draw
from tests.search.run import failures
from tests.tolerance import error

IN_CHUNKS = 10**6  # memory_budget=IN_CHUNKS + n: the gradients are formed in about n chunks of each device's tokens
ROUNDING = 2e-6  # float32 sums in another order
TOLERANCE = 2.0**-7


def chunks_of(x: Setting) -> Chunks:
    tokens = gathered_rows(x.request.tokens)
    size = -(-tokens // (x.request.memory_budget - IN_CHUNKS))
    return Chunks(-(-tokens // size), size)


@pytest.fixture(autouse=True, scope="module")
def formed():
    """The plans with which the forward pass formed gradients. It always does, in chunks that the tests choose."""
    begin, plans = blocks.form, []

    def begun(inputs, of_tokens, cotangents_of, plan, *more):
        plans.append(plan)
        return begin(inputs, of_tokens, cotangents_of, plan, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "fastest_chunks", chunks_of)
        patch.setattr(choose, "_may_form_in_forward", lambda _: True)
        patch.setattr(choose, "_is_faster", lambda *_: True)
        patch.setattr(blocks, "form", begun)
        choose.plan_of.cache_clear()
        jax.clear_caches()
        yield plans
    choose.plan_of.cache_clear()
    jax.clear_caches()


def check(number: int, formed: list, impl: str) -> None:
    """A drawn call of tests/search, of one loss whose gradients the forward pass may form."""
    calls = (draw(1, k, "sharded") for k in count(0, SHARED))
    calls = (x for x in calls if x.program.function == CROSS_ENTROPY and x.program.transformation != "value")
    call = next(islice((x for x in calls if "loss" in x.program.objective), number, None))
    kind = "bfloat16" if impl == "cce" else ("float32", "bfloat16", "float16")[number % 3]
    program = replace(call.program, impl=impl, dtype=kind, mixed=False, reduction=("mean", "sum")[number % 2])
    wanted = tuple(x for x in LEAVES if x in ("e", "c", *program.arrays))[number % 2 :]
    program = replace(program, wanted=wanted, memory_budget=IN_CHUNKS + (3, 2, 5)[number % 3])
    program = replace(program, num_items=None if program.reduction == "sum" else program.num_items)
    program = replace(program, leading=(8, 8) if impl == "cce" else (32, 8))
    before = len(formed)
    assert not failures(replace(call, program=program))
    assert len(formed) > before, "the forward pass formed the gradients"


@pytest.mark.parametrize(("impl", "number"), [(impl, number) for impl in ("chunked", "cce") for number in range(3)])
def test_drawn(formed, impl, number):
    """By kernels too, in Pallas' interpreter; they store exponentials unless there is a softcap beside smoothing."""
    check(number, formed, impl)


def test_where_two_axes_split_the_vocabulary_a_device_has_consecutive_columns(formed):
    """One of them splits the tokens too, and c is gathered over it."""
    program = Program(impl="chunked", layout="auto", split="vocabulary over two axes", leading=(8, 8), vocabulary=64)
    before = len(formed)
    assert not failures(Call(replace(program, width=16, memory_budget=IN_CHUNKS + 3), Data()))
    assert len(formed) > before


def test_the_draws_had_many_chunks_of_every_kind(formed):
    """Of the tests before this one: chunks of logits and of exponentials, of all columns and of some."""
    several = [plan for plan in formed if plan.in_forward.chunks.count > 1]
    kinds = Counter((plan.forward is not None, plan.request.wide_de) for plan in several)
    assert len(kinds) == 4, kinds


@pytest.mark.parametrize(("name", "mode"), [("tokens", "explicit"), ("three axes", "unchecked")])
def test_a_tolerance_changes_no_bit_on_a_cpu(name, mode, formed):
    """The plan of a device without the kernels that leave out blocks knows no tolerance."""
    found = []
    for tolerance in (0.0, TOLERANCE):
        options = {"memory_budget": IN_CHUNKS + 3, "gradient_tolerance": tolerance}
        run, leaves, others = compiled_gradient(uneven(PLAIN, "bfloat16"), BY_NAME[name], mode, **options)
        found.append(run(leaves, others))
        assert formed[-1].request.gradient_tolerance == 0
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_a_number_of_items_has_a_gradient(formed):
    layout, before = BY_NAME["tokens and vocabulary"], len(formed)
    mesh = mesh_of(layout, "auto")
    made = arrays(uneven(PLAIN), layout, mesh)

    def loss(e, items):
        options = {"impl": "chunked", "memory_budget": IN_CHUNKS + 3, "sharding": (layout.e, layout.c)}
        return linear_cross_entropy(e, made["c"], made["targets"], num_items=items, **options)

    with jax.set_mesh(mesh):
        run = jax.jit(jax.value_and_grad(loss, (0, 1)))
        value, (_, of_items) = run(made["e"], jnp.float32(12.5))
    assert len(formed) > before
    assert error(of_items, -value / 12.5) < ROUNDING


def on_one_device(token_weight=None):
    """Loss and gradients of e, c and token_weight for the "sum" of PLAIN's tokens."""
    given = jax.tree.map(jnp.asarray, (uneven(PLAIN).e, uneven(PLAIN).c, uneven(PLAIN).targets))

    def loss(e, c, token_weight):
        return linear_cross_entropy(
            e, c, given[2], token_weight=token_weight, reduction="sum", impl="reference", precision="highest"
        )

    weight = jnp.ones(given[2].shape) if token_weight is None else token_weight
    return jax.value_and_grad(loss, (0, 1, 2))(*given[:2], weight)


def mapped(name: str, run, out, *more):
    """run(e, c, targets, ...) in jax.shard_map with check_vma, over the arrays of a layout."""
    layout, given = BY_NAME[name], uneven(PLAIN)
    specs = layout.specs()
    at = tuple(specs[name] for name in ("e", "c", "targets"))
    with jax.set_mesh(mesh_of(layout, "checked")):
        given = jax.tree.map(jnp.asarray, (given.e, given.c, given.targets, *more))
        return jax.jit(jax.shard_map(run, in_specs=(*at, *(P() for _ in more)), out_specs=out(*at)))(*given)


def call(e, c, targets, **options):
    return linear_cross_entropy(
        e, c, targets, impl="chunked", reduction="sum", precision="highest", memory_budget=IN_CHUNKS + 3, **options
    )


@pytest.mark.parametrize("name", ["tokens", "tokens and vocabulary", "three axes"])
def test_gradients_inside_a_checked_shard_map(name, formed):
    """Without `sharding` each device has a loss of its own; the types tell that dc is a sum over devices."""
    layout, before = BY_NAME[name], len(formed)
    options = {} if name == "tokens" else {"sharding": (layout.e, layout.c)}

    def run(e, c, targets):
        value, gradients = jax.value_and_grad(partial(call, targets=targets, **options), (0, 1))(e, c)
        return jax.lax.psum(value, "data") if name == "tokens" else value, gradients

    value, gradients = mapped(name, run, lambda e, c, _: (P(), (e, c)))
    want, wanted = on_one_device()
    assert len(formed) > before
    for x, y in zip((value, *gradients), (want, *wanted), strict=False):
        assert error(x, y) < ROUNDING


def test_devices_that_share_a_token_may_weight_it_differently(formed):
    """By its type the weight differs: the cotangents of a token's numbers are then not known up to one factor."""
    before = len(formed)
    token_weight = np.random.default_rng(0).uniform(size=(8, 8)).astype(np.float32)

    def run(e, c, targets, token_weight):
        def loss(e, c, token_weight):
            own = token_weight * (1.0 + jax.lax.axis_index("tensor"))
            return jax.lax.psum(call(e, c, targets, token_weight=own, sharding=(P(), P("tensor"))), "tensor")

        return jax.value_and_grad(loss, (0, 1, 2))(e, c, token_weight)

    value, gradients = mapped("vocabulary", run, lambda e, c, _: (P(), (e, c, P())), token_weight)
    want, wanted = on_one_device(36 * token_weight)
    assert len(formed) == before
    for x, y in zip((value, *gradients), (want, *wanted[:2], 36 * wanted[2]), strict=True):
        assert error(x, y) < ROUNDING


def compiled(name: str, mode: str, run=None):
    """The gradient of e and c, in four chunks; or what `run` makes of the loss."""
    layout = BY_NAME[name]
    mesh = mesh_of(layout, mode)
    leaves, others = leaves_of(arrays(uneven(PLAIN), layout, mesh))
    loss = loss_of(layout, mode, memory_budget=IN_CHUNKS + 4)
    with jax.set_mesh(mesh):
        function = (run or jax.grad)(lambda leaves: loss({**leaves, **others}))
        return jax.jit(function).lower(leaves).compile()


@pytest.mark.parametrize(("name", "mode"), list(zip(EXCHANGED, cycle(["explicit", "checked", "auto"]), strict=False)))
def test_what_is_exchanged(name, mode):
    """And a device computes its logits once: it has three matmuls a chunk.

    The gathers of two or three numbers a token are of one chunk: the program has them once, in its loop over chunks.
    """
    program = compiled(name, mode)
    assert_exchanged(program, BY_NAME[name], {name: size // 4 for name, size in WHOLE.items()})
    assert dots(program) == 3


def test_only_what_needs_a_gradient_is_computed():
    """A matmul a chunk for evaluation, two if one side is frozen."""
    name = "width over fsdp, vocabulary over tensor"

    def of_others(frozen: str, loss):
        return jax.grad(lambda leaves: loss({**leaves, frozen: jax.lax.stop_gradient(leaves[frozen])}))

    assert dots(compiled(name, "auto", lambda loss: loss)) == 1
    assert dots(compiled(name, "auto", partial(of_others, "e"))) == 2
    assert dots(compiled(name, "auto", partial(of_others, "c"))) == 2
    assert dots(compiled(name, "auto", lambda loss: jax.grad(jax.checkpoint(loss)))) == 3


def test_the_backward_pass_gathers_nothing_and_has_no_matmul():
    """In a program of its own: the forward pass left the gradient of the c that it gathered."""
    layout = BY_NAME["width over fsdp, vocabulary over tensor"]
    mesh = mesh_of(layout, "auto")
    leaves, others = leaves_of(arrays(uneven(PLAIN), layout, mesh))
    loss = loss_of(layout, "auto", memory_budget=IN_CHUNKS + 4)
    with jax.set_mesh(mesh):
        value, pull = jax.vjp(lambda leaves: loss({**leaves, **others}), leaves)
        program = jax.jit(pull).lower(value).compile()
    found = collectives(program)
    assert found
    assert not [k for k in found if "all-gather" in k], found
    assert dots(program) == 0


def dots(program) -> int:
    return len(re.findall(r" dot\(", program.as_text()))

"""The options of the loss, and JAX's transformations, over devices."""

import re
from functools import partial
from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cce_jax import linear_cross_entropy
from tests.cases import ARRAYS, Case
from tests.devices.meshes import (
    EVERYTHING,
    MODES,
    PLAIN,
    Layout,
    arrays,
    axes_of,
    collectives,
    compiled_gradient,
    gradient_of,
    leaves_of,
    loss_of,
    mesh_of,
    on_one_device,
    uneven,
)
from tests.lowering import nested
from tests.search.run_jax import SETS
from tests.tolerance import error, roundoff
from tests.wrapped import Wrapped

BOTH = Layout("both", {"data": 2, "context": 2, "tensor": 2}, P("data", "context"), P("tensor"))
ROUNDING = 2e-6  # float32 sums in another order


def one_device(given, **options):
    loss, gradients = on_one_device(given, **options)
    return {"loss": loss, **gradients}


def assert_same(found, gradients, want) -> None:
    assert error(found, want["loss"]) < ROUNDING
    for name, x in gradients.items():
        assert error(x, want[name]) < ROUNDING, name


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize(
    ("way", "mode"),
    [("wrapped", "explicit"), ("donated", "explicit"), ("exported", "explicit"), ("exported", "unchecked")],
)
def test_ways_to_give_arrays_and_to_run_the_program(way, mode):
    """wrapped: anything with __jax_array__ is an array."""
    given = uneven(Case(way, leading=(8, 8), width=16, vocabulary=64, arrays=ARRAYS if way == "wrapped" else ()))
    mesh = mesh_of(BOTH, mode)
    leaves, others = leaves_of(arrays(given, BOTH, mesh))
    at = {name: x.sharding for name, x in leaves.items()}
    if way == "wrapped":
        leaves, others = ({name: Wrapped(x) for name, x in made.items()} for made in (leaves, others))
    with jax.set_mesh(mesh):
        run = jax.jit(gradient_of(BOTH, mode), donate_argnums=0 if way == "donated" else ())
        run = run if way != "exported" else jax.jit(jax.export.export(run)(leaves, others).call)
        loss, gradients = run(leaves, others)
    gradients = {name: x.value if way == "wrapped" else x for name, x in gradients.items()}
    assert_same(loss, gradients, one_device(given))
    assert all(x.sharding.is_equivalent_to(at[name], x.ndim) for name, x in gradients.items())
    assert way != "donated" or leaves["e"].is_deleted()


@pytest.mark.parametrize(("frozen", "mode"), list(zip(cycle("ec"), MODES, strict=False)))
def test_a_frozen_input_costs_no_collective(frozen, mode):
    mesh, given = mesh_of(BOTH, mode), uneven(PLAIN)
    made = arrays(given, BOTH, mesh)
    leaves = {k: made.pop(k) for k in ("e", "c") if k != frozen}
    with jax.set_mesh(mesh):
        compiled = jax.jit(gradient_of(BOTH, mode)).lower(leaves, made).compile()
        loss, gradients = compiled(leaves, made)
    assert_same(loss, gradients, one_device(given))
    sums = [k for k in collectives(compiled) if not k.endswith("[]")]
    assert not [k for k in sums if ("[32,16]" if frozen == "c" else "[4,4,16]") in k], sums


@pytest.mark.parametrize("mode", ["explicit", "checked"])
def test_vmap(mode):
    """Over a batch of hidden states with one c, and the gradient of each."""
    given = uneven(PLAIN)
    mesh = mesh_of(BOTH, mode)
    made = arrays(given, BOTH, mesh)
    loss = loss_of(BOTH, mode)
    scales = jnp.asarray([1.0, 0.5, 2.0])

    def each(call, e, c):
        return jax.vmap(jax.value_and_grad(lambda scale, c: call(e * scale, c), (0, 1)), (0, None))(scales, c)

    with jax.set_mesh(mesh):
        run = jax.jit(lambda e, c, t: each(lambda e, c: loss({"e": e, "c": c, "targets": t}), e, c))
        values, (of_scale, dc) = run(made["e"], made["c"], made["targets"])
    call = partial(linear_cross_entropy, targets=given.targets, impl="reference", precision="highest")
    want, (want_of_scale, want_dc) = each(call, jnp.asarray(given.e), jnp.asarray(given.c))
    for x, y in ((values, want), (of_scale, want_of_scale), (dc, want_dc)):
        assert error(x, y) < ROUNDING


def mapped_over_data(mode: str, impl: str, **options):
    """Loss and gradients of e and c for each of 8 sequences, by jax.vmap; the mesh axis data splits the sequences."""
    given = uneven(PLAIN)
    layout = Layout("data", {"data": 2, "tensor": 4}, P("data"), P("tensor"))
    made = arrays(given, layout, mesh_of(layout, mode))

    def call(e, c, targets, impl, **more):
        return linear_cross_entropy(e, c, targets, impl=impl, precision="highest", **more)

    of_each = jax.value_and_grad(call, (0, 1))
    sharding = {} if mode == "explicit" else {"sharding": (P(), P("tensor"))}
    with jax.set_mesh(mesh_of(layout, mode)):
        run = jax.vmap(partial(of_each, impl=impl, **sharding), (0, None, 0), **options)
        found = jax.jit(run)(made["e"], made["c"], made["targets"])
    want = jax.vmap(partial(of_each, impl="reference"), (0, None, 0))(given.e, given.c, given.targets)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert error(x, y) < ROUNDING
        assert "data" in axes_of(x.sharding.spec[:1])


@pytest.mark.parametrize("impl", ["cce", "reference"])
def test_vmap_with_the_name_of_an_axis_that_splits_neither_array(impl):
    mapped_over_data("auto", impl, spmd_axis_name="data")


def test_vmap_over_an_axis_that_an_explicit_mesh_axis_splits():
    mapped_over_data("explicit", "reference")
    for impl in ("auto", "cce", "chunked"):
        with pytest.raises(NotImplementedError, match=r"mesh axis 'data'.*without jax\.vmap.*spmd_axis_name='data'"):
            mapped_over_data("explicit", impl)


@pytest.mark.parametrize(("setting", "mode", "impl"), list(zip(SETS, MODES, cycle(["chunked", "cce"]), strict=False)))
def test_settings_of_jax(setting, mode, impl):
    """Without jax.jit where that is quick: JAX then checks what the forward pass leaves for the backward pass."""
    given = uneven(EVERYTHING, "bfloat16")
    mesh = mesh_of(BOTH, mode)
    leaves, others = leaves_of(arrays(given, BOTH, mesh))
    run = gradient_of(BOTH, mode, impl=impl, **EVERYTHING.options)
    want, wanted = on_one_device(given, **EVERYTHING.options)
    with jax.set_mesh(mesh), SETS[setting]():
        loss, gradients = (jax.jit(run) if BOTH.manual(mode) else run)(leaves, others)
    assert error(loss, want) < ROUNDING
    for name, x in gradients.items():
        assert error(x, wanted[name]) < 2 * roundoff("bfloat16"), name


@pytest.mark.parametrize("split", [True, False])
def test_gradients_inside_a_checked_shard_map(split):
    """The types say which gradients are sums over devices: dc is summed, with `sharding` and without."""
    layout = BOTH if split else Layout("tokens", BOTH.mesh, BOTH.e, P())
    given, mesh = uneven(PLAIN), mesh_of(layout, "checked")
    made = arrays(given, layout, mesh)
    at = tuple(layout.specs()[name] for name in ("e", "c", "targets"))
    options = {"impl": "chunked", "reduction": "sum", "precision": "highest"}
    options |= {"sharding": (layout.e, layout.c)} if split else {}

    def run(e, c, t):
        value, (de, dc) = jax.value_and_grad(partial(linear_cross_entropy, targets=t, **options), (0, 1))(e, c)
        return value if split else jax.lax.psum(value, ("data", "context")), de, dc

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(run, in_specs=at, out_specs=(P(), *at[:2]))
        loss, de, dc = jax.jit(mapped)(made["e"], made["c"], made["targets"])
    assert_same(loss, {"e": de, "c": dc}, one_device(given, reduction="sum"))


@pytest.mark.parametrize("mode", MODES[:3])
def test_no_buffer_of_the_size_of_the_logits(mode):
    """And none of the size of e where the tokens are split, or of c where its vocabulary is."""
    tokens, width, vocabulary = 4096, 8, 65536
    layout = Layout("both", {"data": 2, "tensor": 4}, P("data"), P("tensor"))
    mesh, specs = mesh_of(layout, mode), {"e": P("data"), "c": P("tensor"), "targets": P("data")}
    shapes = {"e": ((tokens, width), "float32"), "c": ((vocabulary, width), "float32"), "targets": ((tokens,), "int32")}
    given = {k: jax.ShapeDtypeStruct(*shape, sharding=NamedSharding(mesh, specs[k])) for k, shape in shapes.items()}
    with jax.set_mesh(mesh):
        run = jax.jit(gradient_of(layout, mode, memory_budget=0))
        text = run.lower(*leaves_of(given)).compile().as_text()
    sizes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)}
    assert max(int(np.prod(x)) for x in sizes) <= tokens // 2 * 1024
    assert not {(tokens, width), (vocabulary, width)} & sizes
    assert (tokens // 2, width) in sizes, "the check sees a device's e"


@pytest.mark.parametrize("of_c", [P(), P("tensor")])
def test_reduced_weights(of_c):
    """c of type P(..., reduced={"data"}): dc of two micro-batches is summed over the devices once."""
    given = uneven(PLAIN)
    layout = Layout("reduced", {"data": 4, "tensor": 2}, P("data"), of_c)
    mesh = mesh_of(layout, "explicit")
    made = arrays(given, layout, mesh)

    def twice(e, c, targets):
        c = jax.reshard(c, P(*of_c, reduced={"data"}))
        gradient = jax.grad(lambda c: linear_cross_entropy(e, c, targets, impl="chunked", precision="highest"))
        return jax.reshard(gradient(c) + gradient(2 * c), of_c)

    with jax.set_mesh(mesh):
        compiled = jax.jit(twice).lower(made["e"], made["c"], made["targets"]).compile()
        found = compiled(made["e"], made["c"], made["targets"])
    plain = jax.grad(partial(linear_cross_entropy, impl="reference", precision="highest"), 1)
    c = jnp.asarray(given.c)
    assert error(found, plain(given.e, c, given.targets) + plain(given.e, 2 * c, given.targets)) < ROUNDING
    sums = {k: n for k, n in collectives(compiled).items() if k.endswith(",16]") and "reduce" in k}
    assert sums == {f"all-reduce f32[{32 if of_c else 64},16]": 1}


@pytest.mark.parametrize("mode", MODES[:3])
def test_de_is_summed_in_float32_and_dc_in_its_type(mode):
    layout = Layout("both", {"data": 2, "tensor": 4}, P("data"), P("tensor"))
    mesh = mesh_of(layout, mode)
    leaves, others = leaves_of(arrays(uneven(PLAIN, "bfloat16"), layout, mesh))
    with jax.set_mesh(mesh):
        traced = jax.jit(gradient_of(layout, mode)).trace(leaves, others)
    found = {str(x.aval.dtype) + str(x.aval.shape) for x in summed(traced.jaxpr.jaxpr)}
    assert {"float32(4, 8, 16)", "bfloat16(16, 16)"} <= found
    assert "bfloat16(4, 8, 16)" not in found


def summed(jaxpr):
    """Everything that a traced program sums over devices."""
    for eqn in jaxpr.eqns:
        if "psum" in eqn.primitive.name:
            yield from eqn.invars
        for inner in nested(eqn):
            yield from summed(inner)


def test_a_shift_longer_than_a_devices_part_of_a_sequence():
    """Each device has one token of a sequence of eight."""
    options = {"shift": 2}
    layout = Layout("sequence", {"a": 8}, P(None, "a"), P())
    given = uneven(Case("shift", leading=(8, 8), width=8, vocabulary=128, options=options))
    run, leaves, others = compiled_gradient(given, layout, "checked", **options)
    assert_same(*run(leaves, others), one_device(given, **options))

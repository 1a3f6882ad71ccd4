"""What `sharding` says is held against the mesh, the types of arrays and their sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from cce_jax import linear_cross_entropy, linear_divergence, prepare
from cce_kernels.device import Gpu

E = np.ones((8, 4, 16), np.float32)
C = np.ones((64, 16), np.float32)
T = np.zeros((8, 4), np.int32)


def mesh_of(kind, **sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


AUTO = mesh_of(AxisType.Auto, data=2, tensor=4)
EXPLICIT = mesh_of(AxisType.Explicit, data=2, tensor=4)


def call(e=E, c=C, t=T, **options):
    return linear_cross_entropy(e, c, t, impl="chunked", **options)


def test_without_a_mesh():
    with pytest.raises(ValueError, match=r"no mesh is in context: call jax\.set_mesh\(mesh\)"):
        call(sharding=(P("data"), P()))


@pytest.mark.parametrize("sharding", [P("data"), ("data", None), (P("data"),), [P("data"), P()]])
def test_of_another_type(sharding):
    with jax.set_mesh(AUTO), pytest.raises(TypeError, match=r"sharding must be a pair of jax\.sharding\.PartitionSpec"):
        call(sharding=sharding)


WRONG = {
    "names the axis 'model' for c": (P("data"), P("model")),
    "names the axis 'data' twice for e": (P("data", "data"), P()),
    "which has 2 axes": (P("data"), P("tensor", None, "data")),
    "not leave it open": (P("data"), P(P.UNCONSTRAINED)),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_spec_that_does_not_fit(message):
    with jax.set_mesh(AUTO), pytest.raises((ValueError, jax.errors.JAXTypeError), match=message):
        call(sharding=WRONG[message])


def test_sizes_that_the_devices_do_not_divide():
    with jax.set_mesh(AUTO):
        with pytest.raises(ValueError, match=r"axis 0 of c \(63, 16\) into 4 parts over \('tensor',\)"):
            call(c=C[:63], sharding=(P("data"), P("tensor")))
        with pytest.raises(ValueError, match=r"axis 1 of e \(8, 3, 16\) into 4 parts over \('tensor',\)"):
            call(E[:, :3], t=T[:, :3], sharding=(P("data", "tensor"), P()))
        # What to do instead, for such a vocabulary: the axis splits the tokens.
        loss = call(c=C[:63], sharding=(P(("data", "tensor")), P()))
    np.testing.assert_allclose(loss, np.log(63), rtol=1e-6)


def test_explicit_types_say_something_else():
    e = jax.device_put(E, NamedSharding(EXPLICIT, P("data")))
    with jax.set_mesh(EXPLICIT):
        c = jax.device_put(C, P("tensor"))
        with pytest.raises(ValueError, match=r"sharding says .*'tensor'.* for e, but the type of e says .*'data'"):
            call(e, c, sharding=(P("tensor"), P()))
        np.testing.assert_allclose(call(e, c, sharding=(P("data"), P("tensor"))), np.log(64), rtol=1e-6)


def mapped(run, e, c, check_vma=True):
    with jax.set_mesh(AUTO):
        return jax.jit(jax.shard_map(run, in_specs=(e, c, P(*e[:2])), out_specs=P(), check_vma=check_vma))(E, C, T)


def test_inside_shard_map_an_array_that_is_not_split():
    """With check_vma the types tell; targets of the whole vocabulary beside a part of c cannot pass for local ones."""
    with pytest.raises(ValueError, match=r"splits c over \['tensor'\], but c is the same on all devices"):
        mapped(lambda e, c, t: call(e, c, t, sharding=(P("data"), P("tensor"))), P("data"), P())
    with pytest.raises(ValueError, match=r"out_specs"):  # the loss of one device's columns is not the loss of all
        mapped(lambda e, c, t: call(e, c, t), P(), P("tensor"))
    with pytest.raises(ValueError, match=r"out_specs"):  # the mean of one device's tokens is not the mean of all
        mapped(lambda e, c, t: call(e, c, t), P("data"), P())


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_what_cannot_be_undone(check_vma):
    with pytest.raises(ValueError, match=r"splits the width of c over \('tensor',\), which splits no tokens"):
        mapped(
            lambda e, c, t: call(e, c, t, sharding=(P("data"), P(None, "tensor"))),
            P("data"),
            P(None, "tensor"),
            check_vma,
        )
    with pytest.raises(ValueError, match="last axis of e"):
        mapped(
            lambda e, c, t: call(e, c, t[..., 0], sharding=(P(None, None, "tensor"), P())),
            P(None, None, "tensor"),
            P(),
            check_vma,
        )
    with pytest.raises(ValueError, match="this axis must come last"):
        mapped(
            lambda e, c, t: call(e, c, t, sharding=(P("data"), P(("data", "tensor")))),
            P("data"),
            P(("data", "tensor")),
            check_vma,
        )
    with pytest.raises(ValueError, match="shift targets before"):
        mapped(
            lambda e, c, t: call(e, c, t, sharding=(P(None, "tensor"), P()), shift=1, return_lse=True)[0],
            P(None, "tensor"),
            P(),
            check_vma,
        )
    for of_c in (P("data"), P(None, "data")):
        with pytest.raises(NotImplementedError, match=r"^linear_divergence with impl='reference' .* impl='chunked'"):
            mapped(
                lambda e, c, t, of_c=of_c: linear_divergence(e, c, e, C, impl="reference", sharding=(P("data"), of_c)),
                P("data"),
                of_c,
                check_vma,
            )


@pytest.mark.parametrize("impl", ["auto", "cce"])
def test_kernels_that_xla_would_have_to_split(impl, monkeypatch):
    """A program for GPUs, over Auto axes, that does not say how its arrays lie."""
    monkeypatch.setattr(prepare, "local_gpu", lambda: Gpu("8.9", 132))
    shapes = [(E.shape, jnp.bfloat16, P("data")), (C.shape, jnp.bfloat16, P()), (T.shape, jnp.int32, P("data"))]
    given = [jax.ShapeDtypeStruct(s, d, sharding=NamedSharding(AUTO, spec)) for s, d, spec in shapes]

    def lowered(run):
        return jax.jit(run).trace(*given).lower(lowering_platforms=("cuda",))

    with pytest.raises(NotImplementedError, match=r"sharding=\(P\('data'\), P\(\)\)"):
        lowered(jax.grad(lambda e, c, t: linear_cross_entropy(e, c, t, impl=impl)))
    with pytest.raises(NotImplementedError, match=r"^linear_divergence: XLA cannot split"):
        lowered(jax.grad(lambda e, c, t: linear_divergence(e, c, e, c, impl=impl)))
    lowered(jax.grad(lambda e, c, t: linear_cross_entropy(e, c, t, impl="chunked")))
    # jax.shard_map over one of the two axes leaves the other to XLA.
    half = {"in_specs": (P("data"), P(), P("data")), "out_specs": P("data"), "axis_names": {"data"}}
    with jax.set_mesh(AUTO), pytest.raises(NotImplementedError, match=r"sharding=\(P\('tensor'\), P\(\)\)"):
        lowered(jax.shard_map(lambda e, c, t: linear_cross_entropy(e, c, t, impl=impl)[None], **half))


def test_on_a_cpu_xla_splits_the_program():
    """impl="auto" is "chunked" here. XLA does not gather e."""
    given = [jax.device_put(x, NamedSharding(AUTO, spec)) for x, spec in ((E, P("data")), (C, P()), (T, P("data")))]
    compiled = jax.jit(jax.value_and_grad(linear_cross_entropy, (0, 1))).lower(*given).compile()
    np.testing.assert_allclose(compiled(*given)[0], np.log(64), rtol=1e-6)
    assert "all-gather" not in compiled.as_text()
    for impl in ("chunked", "reference"):
        loss = jax.jit(lambda e, c, impl=impl: linear_divergence(e, c, 2 * e, jnp.cos(c), impl=impl))
        np.testing.assert_allclose(loss(*given[:2]), loss(E, C), rtol=1e-6)

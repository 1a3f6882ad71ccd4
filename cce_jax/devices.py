"""The two passes of the core on the devices of a Layout: what each device computes, and what the devices exchange.

Let device d hold some tokens, and the columns V_d of the logits. With the reference ρ_id, the log-mass m_id, sum_id and
mean_id of its columns (cce_kernels/numbers.py), ρ_i = max_d ρ_id and δ_id = ρ_id − ρ_i,

    target_i = Σ_d [t_i ∈ V_d] z_i,t_i        m_i = log Σ_d exp(m_id + δ_id)
    sum_i = Σ_d (sum_id + δ_id·Σ_{v ∈ V_d} w_v)        mean_i = Σ_d exp(m_id + δ_id − m_i)·(mean_id + δ_id)
    ids_ik = Σ_d [id(i,k) ∈ V_d] z_i,id(i,k)
    de_i = Σ_d Σ_{v ∈ V_d} dz_iv c_v          dc_v = Σ_i dz_iv e_i,  v ∈ V_d

and dz_iv needs the numbers of token i over all columns, and nothing else of another device. The devices exchange:

    forward    target_i, summed first where kernels take it as the reference of their exponentials; then the numbers of
               the devices' columns
    backward   de, summed in float32 over the devices that share its tokens; dc, summed in c's type over the devices
               that share its columns: the kernels write dc in c's type, and hold no float32 copy of it
    both       where one mesh axis splits the tokens and c: the smaller of e and c, gathered; its gradient is scattered.
               The backward pass gathers it again, so that no device holds all of it in between. (XLA gathers once where
               nothing comes between the passes.)

Where the forward pass forms the gradients (`of_columns`), it exchanges the numbers of each chunk of tokens, and
leaves to the backward pass the gradients before their exchange: of the c that was gathered, too.

One jax.shard_map runs a pass. In it all mesh axes are Manual, and the types of arrays do not say over which axes the
arrays vary: Pallas' interpreter does not work with such types. This is so even if the caller's own shard_map has such
types (check_vma). So this file sums the gradients, and gives the results their types back (`typed`).

If the caller's own shard_map has no such types, JAX gives each device only one summand of the cotangent of a sum over
devices, and JAX itself sums the gradients where they leave that shard_map. Then this file sums the cotangents, and not
the gradients.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from cce_jax import passes, reference
from cce_jax.plans import Core
from cce_jax.sharding import Axes, Layout, varying
from cce_kernels.blocks import CotangentsOf
from cce_kernels.engines import needs_reference
from cce_kernels.mean import over_runs
from cce_kernels.numbers import FLOAT32_MAX, Gradients, Inputs, Numbers, Wanted
from cce_kernels.plan.residuals import Residuals
from cce_kernels.selections import Asked, Selections, ordered


class Held(NamedTuple):
    """What a device's forward pass leaves for its backward pass. N: the tokens that the device computes."""

    numbers: Numbers  # (N,) each, over all columns, relative to the reference of the device's own
    residuals: Residuals


def forward(run: Callable, of: Any, core: Core) -> tuple[tuple[Any, Any, Any], Any]:
    """(the sum of weight · total, total, the numbers of each token), and what the devices leave for `backward`.

    of: core.Summands, with e (..., D). run(of, core) -> total, the numbers and what is left, each a tree of arrays of
    (N,) tokens: what a device computes. If total is None, so is the sum. The sum extends over the devices of the axes
    that the call maps. Over the caller's Manual axes it is the device's.
    """
    layout, core = core.layout, _summing(core, of.inputs)
    over = tuple(a for a in layout.all_tokens if a in layout.mapped)

    def on_device(of: Any) -> Any:
        of = of._replace(inputs=passes.in_type_of_e(of.inputs))
        *found, left = run(_flat(of, core), core)
        found = jax.tree.map(lambda x: _own_tokens(_shaped(x, of, layout), layout), found)
        total, numbers = found
        value = None if total is None else _summed(jnp.sum(of.terms.weight * total), over)
        return (value, total, numbers), left

    of_tokens = layout.spec_of_tokens
    out_specs = (P(), of_tokens, of_tokens), _each(layout)
    found, left = _on_devices(on_device, layout, (_specs(of, core),), out_specs)(of)
    return typed(found, axes_of_numbers(of.inputs, layout)), typed(left, _union(layout, of.inputs))


def backward(run: Callable, of: Any, left: Any, cotangents: Any, core: Core) -> Gradients:
    """de, dc and dbias, each with the shape, type and layout of its input; None where `run` has none.

    of, left: as in `forward`. cotangents: of its results; None: they are 0.
    run(of, left, cotangents, core) -> the gradients of the device's tokens and columns.
    """
    layout, sums, core = core.layout, _sums(of.inputs, core.layout), _summing(core, of.inputs)

    def on_device(of: Any, left: Any, cotangents: Any) -> Gradients:
        flat = _flat(of._replace(inputs=passes.in_type_of_e(of.inputs)), core)
        of_sum, *of_tokens = cotangents
        of_sum, of_tokens = _added((of_sum, _flat_tokens(of_tokens, of, layout)), layout)
        flat = flat._replace(inputs=_of_own_columns(flat.inputs, core))
        found = run(flat, left, (of_sum, *of_tokens), core)
        return _exchanged(found, of, core, sums)

    specs = _specs(of, core)
    of_results, of_c = (P(), specs.terms, specs.terms), layout.spec_of_dc(core.head.vocab_axis)
    of_gradients: Any = Gradients(specs.inputs.e, of_c, specs.inputs.bias)  # type: ignore[arg-type]
    found = _on_devices(on_device, layout, (specs, _each(layout), of_results), of_gradients)(of, left, cotangents)
    if not layout.typed:
        return found
    return Gradients(*(None if x is None else typed(x, varying(y)) for x, y in zip(found, of.inputs, strict=False)))


def knows_cotangents(inputs: Inputs, of_tokens: tuple, layout: Layout) -> bool:
    """Whether each device knows the cotangents of its tokens in the forward pass, up to one factor.

    It does not where, by the types inside the caller's jax.shard_map, devices that share a token have other targets,
    temperatures, weights or arguments for it. The cotangents are then sums over these devices, with one factor each.
    """
    shared = axes_of_numbers(inputs, layout)
    given = inputs.targets, inputs.inverse_temperature, *of_tokens
    return not layout.typed or all(varying(x) <= shared for x in given if x is not None)


def whole_numbers(of: Any, core: Core) -> Numbers:
    """The core's numbers from the full logits (cce_jax/reference.py), which JAX differentiates. of: core.Summands."""
    layout, local = core.layout, replace(core, layout=core.layout.local())

    def run(of: Any) -> Numbers:
        flat = _of_own_columns(_flat(of, local).inputs, local)
        numbers = reference.numbers_of(flat, local, local.layout.columns)
        return jax.tree.map(lambda x: _own_tokens(_shaped(x, of, local.layout), local.layout), numbers)

    if not layout.explicit:
        if layout.mapped:  # so that gradients lie as their inputs do
            at = zip(of.inputs, _specs(of, core).inputs, strict=True)
            pinned: Any = (None if x is None else layout.pinned(x, spec) for x, spec in at)
            of = of._replace(inputs=Inputs(*pinned))
        return run(of)
    over_auto: Any = jax.sharding.auto_axes(run, axes=tuple(layout.explicit), out_sharding=layout.out_sharding)
    return over_auto(of)


def of_columns(
    inputs: Inputs, core: Core, wanted: Wanted | None, forming: tuple[Any, CotangentsOf] | None = None
) -> tuple[Numbers, Held]:
    """The numbers over all columns, from those over the device's own columns; e: (N, D).

    forming: the terms and cotangents_of for passes.begin, if the forward pass forms the gradients of the own columns.
    """
    layout, reference, of_all_columns = core.layout, None, None
    if is_split := layout.size(layout.columns) > 1:
        inputs, reference = _own_columns(inputs, core, wanted)
        weight = core.head.vocabulary(inputs.c) if inputs.weights is None else jnp.sum(inputs.weights)
        of_all_columns = partial(_of_all_columns, layout=layout, weight=weight)
    if forming is not None:
        held = Held(*passes.begin(inputs, *forming, core, wanted, reference, of_all_columns))
        return held.numbers, held
    of_shard = replace(core, wide_de=True) if is_split else core  # de is a part of a sum over devices
    of_own, residuals = passes.forward_pass(inputs, of_shard, wanted, reference)
    if of_all_columns is None:
        return of_own, Held(of_own, residuals)
    numbers = of_all_columns(of_own)
    # The value of the sum is in no gradient, but a loss with label smoothing asks for its cotangent.
    return numbers, Held(numbers.relative_to(of_own.reference)._replace(sum=numbers.sum), residuals)


def with_selections(inputs: Inputs, core: Core, asked: Asked) -> tuple[Numbers, Selections, Held]:
    """The numbers and selections from all columns, from those of the device's own columns; e: (N, D)."""
    columns, layout = core.head.vocabulary(inputs.c), core.layout
    own = _of_own_columns(inputs, core)
    of_own, found = passes.numbers_and_selections(own, core, replace(asked, top_k=min(asked.top_k, columns)))
    if layout.size(layout.columns) == 1:
        return of_own, found, Held(of_own, Residuals())
    numbers, found = _of_all_columns(of_own, layout), _merged(found, inputs, columns, asked, layout)
    return numbers, found, Held(numbers.relative_to(of_own.reference), Residuals())


def _merged(of_own: Selections, inputs: Inputs, columns: int, asked: Asked, layout: Layout) -> Selections:
    """The selections from all columns, (N, ...). columns: how many each device has."""
    logits, ids, mean = of_own
    if logits is not None and ids is not None:
        ids = ids + columns * lax.axis_index(layout.columns)
        logits, ids = (lax.all_gather(x, layout.columns, axis=1, tiled=True) for x in (logits, ids))
        logits, ids = ordered(logits, ids, asked.top_k)
        ids = jnp.where(inputs.targets[:, None] < 0, 0, ids)
    return Selections(logits, ids, None if mean is None else lax.pmean(mean, layout.columns))


def whole_weights(weights: jax.Array | None, layout: Layout) -> jax.Array | None:
    """class_weight of the whole vocabulary, on every device: XLA then does not split the look-up of targets in it."""
    if weights is None:
        return None
    if axes := layout.manual(layout.vocabulary):
        whole = jnp.zeros(weights.size * layout.size(axes), weights.dtype)
        start = lax.axis_index(axes) * weights.size
        weights = lax.psum(lax.dynamic_update_slice_in_dim(whole, weights, start, 0), axes)
    return layout.pinned(weights, P())


def _own_columns(inputs: Inputs, core: Core, wanted: Wanted | None) -> tuple[Inputs, jax.Array | None]:
    """The inputs with targets and ids as columns of the device, and the reference of cce_kernels.blocks.numbers."""
    named, own = inputs.targets < core.vocabulary_of_columns(inputs.c), _of_own_columns(inputs, core)
    if not needs_reference(inputs.e.dtype.itemsize, core.impl):  # type: ignore[arg-type]
        return own, None
    return own, jnp.where(named, lax.psum(passes.target_logits(own, core, wanted), core.layout.columns), -FLOAT32_MAX)


def _of_all_columns(of_own: Numbers, layout: Layout, weight: Any = 0) -> Numbers:
    """The numbers over all columns, from those over each device's own. weight: Σ_v w_v of the device's columns."""
    of_sum = None if of_own.sum is None else jnp.full_like(of_own.sum, weight)
    leaves, tree = jax.tree.flatten((of_own._replace(ids=None), of_sum))
    gathered = lax.all_gather(jnp.stack(leaves), layout.columns)
    each, of_sum = jax.tree.unflatten(tree, [gathered[:, k] for k in range(len(leaves))])
    ids = None if of_own.ids is None else lax.psum(of_own.ids, layout.columns)
    return over_runs(each, of_sum)._replace(ids=ids)


def _exchanged(found: Gradients, of: Any, core: Core, sums: Any) -> Gradients:
    """The gradients of the device's tokens and columns, summed over the devices. sums: of `_sums`."""
    (de, dc, dbias), axis, layout = found, core.head.vocab_axis, core.layout
    if de is not None:
        de = _summed(_all_tokens(_shaped(de, of, layout), layout, _scattered), sums.e).astype(of.inputs.e.dtype)
    if dc is not None:
        dc = _summed(_scattered(_scattered(dc, layout.width, 1 - axis), layout.gathered_columns, axis), sums.c)
    if dbias is not None:
        dbias = _summed(_scattered(dbias, layout.gathered_columns, 0), sums.bias)
    return Gradients(de, dc, dbias)


def _of_own_columns(inputs: Inputs, core: Core) -> Inputs:
    """The inputs with targets and ids as columns of the device; as its number of columns if they are not among them.

    A negative one is -1.
    """
    layout, columns = core.layout, core.head.vocabulary(inputs.c)
    if not layout.columns:
        return inputs

    def own(of_all: jax.Array) -> jax.Array:
        local = of_all - lax.axis_index(layout.columns) * columns
        here = (local >= 0) & (local < columns)
        return jnp.where(of_all < 0, -1, jnp.where(here, local, columns))

    return inputs._replace(targets=own(inputs.targets), ids=None if inputs.ids is None else own(inputs.ids))


def _flat(of: Any, core: Core) -> Any:
    """core.Summands of what the device computes: after the gathers of tokens or of c, with one axis of tokens."""
    inputs, axis, columns, layout = of.inputs, core.head.vocab_axis, core.layout.gathered_columns, core.layout
    whole = inputs._replace(
        **_flat_tokens(inputs.of_tokens, of, layout),
        c=_all(_all(inputs.c, columns, axis), layout.width, 1 - axis),
        bias=None if inputs.bias is None else _all(inputs.bias, columns, 0),
        weights=None if inputs.weights is None else _all(inputs.weights, columns, 0),
    )
    return of._replace(inputs=whole, terms=_flat_tokens(of.terms, of, layout))


def _flat_tokens(arrays: Any, of: Any, layout: Layout) -> Any:
    """A tree of arrays that begin with the axes of the device's tokens, with one axis of all tokens of the device."""
    axes = of.inputs.targets.ndim

    def flat(x: jax.Array) -> jax.Array:
        x = _all_tokens(x, layout)
        return x.reshape(-1, *x.shape[axes:])

    return jax.tree.map(flat, arrays)


def _shaped(x: jax.Array, of: Any, layout: Layout) -> jax.Array:
    """x, (N, ...), with the axes of the tokens that the device computes."""
    shape = list(of.inputs.targets.shape)
    for axis, axes in layout.gathered_of_tokens:
        shape[axis] *= layout.size(axes)
    return x.reshape(*shape, *x.shape[1:])


def _all(x: jax.Array, axes: Axes, axis: int) -> jax.Array:
    return lax.all_gather(x, axes, axis=axis, tiled=True) if axes else x


def _all_tokens(x: jax.Array, layout: Layout, exchanged: Callable = _all) -> jax.Array:
    """x, exchanged along each axis of tokens over which e is gathered."""
    for axis, axes in layout.gathered_of_tokens:
        x = exchanged(x, axes, axis)
    return x


def _own_tokens(x: jax.Array, layout: Layout) -> jax.Array:
    """The inverse of _all_tokens."""
    for axis, axes in layout.gathered_of_tokens:
        size = x.shape[axis] // layout.size(axes)
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, axis)
    return x


def _scattered(x: jax.Array, axes: Axes, axis: int) -> jax.Array:
    """The device's own part of the sum over devices: the transpose of _all."""
    return lax.psum_scatter(x, axes, scatter_dimension=axis, tiled=True) if axes else x


def _summed(x: jax.Array, axes: Axes) -> jax.Array:
    return lax.psum(x, axes) if axes else x


def _on_devices(run: Any, layout: Layout, in_specs: Any, out_specs: Any) -> Any:
    """A function of whole arrays, in which each device calls `run` on its part of them."""

    def untyped(*arrays: Any) -> Any:
        if layout.typed:  # the types are still on the arguments; the result of any operation has none
            arrays = jax.tree.map(lambda x: lax.bitcast_convert_type(x, x.dtype), arrays)
        return run(*arrays)

    if not layout.is_known:
        return run
    mesh = layout.mesh if jax.sharding.get_abstract_mesh().empty else None
    axes = layout.mapped | frozenset(layout.mesh.manual_axes)
    return jax.shard_map(untyped, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def _specs(of: Any, core: Core) -> Any:
    """The spec of each array of core.Summands; terms and common have one each."""
    layout = core.layout
    c, of_columns, of_tokens = layout.spec_of_c(core.head.vocab_axis), layout.spec_of_columns, layout.spec_of_tokens
    specs: tuple[Any, ...] = layout.spec_of_e, c, of_columns, of_tokens, of_columns, P(), of_tokens, of_tokens
    return of._replace(inputs=Inputs(*specs), terms=of_tokens, common=P())


def _each(layout: Layout) -> P:
    """The spec of what each device holds for itself: along the first axis the devices' parts follow one another.

    Devices along an axis that splits nothing hold the same. jax.vmap(spmd_axis_name=...) may take such an axis.
    """
    split = layout.mapped.intersection(layout.all_tokens + layout.vocabulary)
    axes = tuple(a for a in layout.mesh.axis_names if a in split)
    return P(axes) if axes else P()


def _summing(core: Core, inputs: Inputs) -> Core:
    """core, with de in float32 if it is summed over devices."""
    return replace(core, wide_de=bool(_sums(inputs, core.layout).e or core.layout.gathered_tokens))


def _sums(inputs: Inputs, layout: Layout) -> Any:
    """The axes over which each of the Gradients is summed, besides the axes over which it is scattered."""
    varies = _union(layout, inputs)

    def over(x: jax.Array | None, split: Axes, scattered: frozenset[str]) -> Any:
        if x is None:
            return ()
        found = (layout.mapped.intersection(split) | (varies - varying(x) if layout.typed else varies)) - scattered
        return tuple(a for a in layout.mesh.axis_names if a in found and layout.mesh.shape[a] > 1)

    tokens = tuple(a for a in layout.all_tokens if a not in layout.gathered_tokens)
    e = over(inputs.e, layout.columns, layout.gathered_tokens)
    c = over(inputs.c, tokens, layout.gathered | layout.reduced)
    return Gradients(e, c, over(inputs.bias, tokens, frozenset(layout.gathered_columns)))


def _added(cotangents: Any, layout: Layout) -> Any:
    """The cotangents, summed over the axes over which each device has one summand: see this file's docstring."""
    over = () if layout.typed else layout.manual(layout.columns)
    summands = tuple(a for a in over if a not in layout.gathered_tokens)
    return lax.psum(cotangents, summands) if summands else cotangents


def _union(layout: Layout, arrays: Any) -> frozenset[str]:
    """The Manual axes over which any of the arrays varies."""
    return frozenset().union(*map(varying, jax.tree.leaves(arrays))) if layout.typed else frozenset()


def axes_of_numbers(inputs: Inputs, layout: Layout) -> frozenset[str]:
    """The Manual axes over which the numbers of tokens vary. Devices that share tokens compute the same numbers."""
    return _union(layout, inputs) - (frozenset(layout.columns) - layout.gathered_tokens)


def typed(arrays: Any, axes: frozenset[str]) -> Any:
    """The arrays, with types that say that they vary over these Manual axes."""
    if not axes:
        return arrays

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(axes - varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, arrays)

"""What the public functions have in common: their arguments, the static part of a call, its inputs, and the shift."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cce_jax import arguments, losses, settings
from cce_jax.errors import no_explicit_vmap, reverse_mode_only
from cce_jax.plans import Core
from cce_jax.sharding import NOWHERE_SPLIT, layout_of
from cce_kernels import contract
from cce_kernels.device import Gpu, local_gpu
from cce_kernels.head import Head
from cce_kernels.numbers import Inputs


class Asked(NamedTuple):
    """The options that all functions have, as the user gave them. `linear_cross_entropy` explains them."""

    function: str  # the name of the public function
    ignore_index: Any
    softcap: Any
    shift: Any
    logit_scale: Any
    vocab_axis: Any
    impl: Any
    memory_budget: Any
    precision: Any
    check_targets: bool
    sharding: Any


class Arrays(NamedTuple):
    """The arrays and numbers of a call, which a program takes as arguments; None: not given, or it changes nothing."""

    e: Any
    c: Any
    bias: Any
    targets: Any = None
    class_weight: Any = None
    token_weight: Any = None
    num_items: Any = None
    scale: Any = None
    label_smoothing: Any = None
    z_loss: Any = None
    temperature: Any = None
    arguments: tuple = ()  # of losses.Loss.fn
    ids: Any = None


def prepared(given: Arrays, asked: Asked, reduction: str = "mean", **more: Any) -> tuple[Arrays, Core]:
    """A call whose arguments have been checked. Raises the errors that `linear_cross_entropy` names.

    more: the fields of Core that the function alone knows.
    """
    vocab_axis, impl = asked.vocab_axis, asked.impl
    contract.choice("impl", impl, contract.IMPLS)
    contract.choice("check_targets", asked.check_targets, (False, True))
    arguments.known(ignore_index=asked.ignore_index, shift=asked.shift, memory_budget=asked.memory_budget)
    arguments.precision(asked.precision)
    ignore_index = contract.integer("ignore_index", asked.ignore_index)
    budget = contract.memory_budget(asked.memory_budget)
    shift = contract.integer("shift", asked.shift)
    given, head = _with_head(given, asked)
    e, c = given.e, given.c
    layout = layout_of(e, c, vocab_axis, asked.sharding) if e.ndim > 0 and c.ndim == 2 else NOWHERE_SPLIT
    arguments.shapes(given, layout, vocab_axis, shift)
    if asked.check_targets:
        arguments.targets(given.targets, layout.whole_vocabulary(c, vocab_axis), ignore_index, shift)
    if impl != "reference":
        no_explicit_vmap(asked.function)
    gpu = None if impl == "reference" else local_gpu()
    impl = arguments.resolved(impl, e.dtype, gpu)
    if impl != "reference" and not all(isinstance(n, int) for n in (*e.shape, *c.shape)):
        raise NotImplementedError(
            f"{asked.function}: impl={impl!r} is planned for sizes that are known, and those of e {e.shape} and c "
            f"{c.shape} are not: export it for each size, or use impl='reference'"
        )
    with settings.defaults():
        targets, ignore_index = arguments.int32(given.targets, ignore_index)
    core = Core(
        head=head,
        impl=impl,
        memory_budget=budget,
        gpu=gpu,
        wide_dc=c.dtype != e.dtype,
        may_chunk=layout.is_known or may_chunk(gpu),
        debug_nans=jax.config.jax_debug_nans,  # type: ignore[attr-defined]
        function=asked.function,
        layout=layout,
        ignore_index=ignore_index,
        shift=shift,
        **more,
    )
    if impl != "reference":  # outside of jit, whose results would else hold copies of e and c, which may hold NaN
        e, c, bias = reverse_mode_only((e, c, given.bias), asked.function)
        given = given._replace(e=e, c=c, bias=bias)
    return given._replace(targets=targets, num_items=arguments.num_items(given.num_items, reduction, e.dtype)), core


def any_targets(e: Any) -> Any:
    """Targets of a call that reads none: 0 for each token. A size that jax.export names has no array of numpy."""
    tokens = e.shape[:-1]
    return (np if all(isinstance(n, int) for n in tokens) else jnp).zeros(tokens, np.int32)


def teacher(given: Arrays, asked: Asked) -> tuple[Arrays, Head]:
    """A teacher's e, c, bias and scale, and its head. TypeError, or ValueError unless they fit together."""
    with contract.named():
        e = arguments.array("e", given.e, asked.function)
        given, head = _with_head(given._replace(e=e, targets=any_targets(e)), asked)
        arguments.shapes(given, NOWHERE_SPLIT, head.vocab_axis, 0)
    return given, head


def _with_head(given: Arrays, asked: Asked) -> tuple[Arrays, Head]:
    """The arrays and the scale, and the head, of a student or a teacher. Their shapes are not checked."""
    contract.choice("vocab_axis", asked.vocab_axis, (0, 1))
    arguments.known(softcap=asked.softcap, logit_scale=asked.logit_scale)
    head = Head(contract.softcap(asked.softcap), asked.vocab_axis, asked.precision)
    scale = 1.0 if asked.logit_scale is None else contract.number("logit_scale", asked.logit_scale)
    given = arguments.arrays(given, asked.function)
    arguments.types(given)
    contract.finite("logit_scale", scale, given.e.dtype.name)
    wide = np.promote_types(given.e.dtype, np.float32)  # jnp's would follow jax_numpy_dtype_promotion
    return given._replace(scale=None if scale == 1.0 else np.full(1, scale, wide)), head


def needs_whole_sequences(core: Core, what: str) -> None:
    """ValueError if the call shifts sequences that are split inside jax.shard_map."""
    if core.shift and (split := core.layout.split_sequences):
        raise ValueError(
            f"shift={core.shift} with {what} needs whole sequences, but sharding splits them over {split} inside "
            "jax.shard_map: shift targets before jax.shard_map"
        )


def inputs_of(given: Arrays, core: Core, named: bool = True) -> Inputs:
    """The inputs of the core, with the targets shifted. named: whether there are targets; else every token counts."""
    vocabulary, weights = core.vocabulary(given.c), given.class_weight
    targets = shifted(given.targets, core.ignore_index, core)
    columns = losses.columns(targets, core.ignore_index, vocabulary) if named else jnp.full_like(targets, vocabulary)
    if weights is not None:
        weights = jax.lax.stop_gradient(weights.astype(jnp.promote_types(given.e.dtype, jnp.float32)))
    scale, inverse = inverse_temperature(given, core)
    ids = None if given.ids is None else jnp.where((given.ids >= 0) & (given.ids < vocabulary), given.ids, -1)
    return laid_out(Inputs(given.e, given.c, given.bias, columns, weights, scale, inverse, ids), core)


def laid_out(inputs: Inputs, core: Core) -> Inputs:
    """The inputs as they lie over the devices."""
    (e, c, bias, targets, weights, scale, inverse, ids), layout = inputs, core.layout
    e = layout.laid_out(e, layout.spec_of_e, layout.given_e)
    c = layout.laid_out(c, layout.spec_of_c(core.head.vocab_axis), layout.given_c)
    bias, weights = (layout.laid_out(x, layout.spec_of_columns) for x in (bias, weights))
    targets, inverse, ids = (layout.laid_out(x, layout.spec_of_tokens) for x in (targets, inverse, ids))
    return Inputs(e, c, bias, targets, weights, scale, inverse, ids)


def inverse_temperature(given: Arrays, core: Core) -> tuple[Any, Any]:
    """The scale of the logits before the softcap, and the inverse temperature of each token; None: 1.

    Without a softcap one temperature for all tokens is part of the scale.
    """
    e, scale, temperature = given.e, given.scale, given.temperature
    if temperature is None:
        return scale, None
    inverse = inverted(temperature, e.dtype)
    if inverse.size == 1 and core.head.softcap is None:
        return inverse.reshape(1) if scale is None else scale * inverse.reshape(1), None
    return scale, jnp.broadcast_to(inverse, e.shape[:-1])


def inverted(temperature: Any, dtype: Any) -> jax.Array:
    """1 / temperature, at least float32, without a gradient; NaN where it is not positive. dtype: of e.

    A temperature below contract.COLDEST is raised to it, as a number is.
    """
    temperature = jax.lax.stop_gradient(jnp.asarray(temperature, jnp.promote_types(dtype, jnp.float32)))
    bits = jax.lax.bitcast_convert_type(temperature, f"int{8 * temperature.itemsize}")
    is_positive = bits > 0  # XLA takes numbers below the least normal one for 0
    return jnp.where(is_positive, 1 / jnp.maximum(temperature, contract.COLDEST), jnp.nan)


def may_chunk(gpu: Gpu | None) -> bool:
    """Whether a call that is `NOWHERE_SPLIT` may take its tokens in chunks.

    XLA may split the tokens of a program without kernels over all devices. It would then gather each chunk of them.
    """
    return gpu is not None or jax.device_count() == 1


def shifted(x: Any, fill: int, core: Core) -> Any:
    """x[..., shift:] followed by `shift` times fill. So e keeps all its rows, and its last rows are ignored."""
    if not core.shift or x is None:
        return x
    x = core.layout.whole_sequences(x)
    shifted = jnp.concatenate([x[..., core.shift :], jnp.full_like(x[..., : core.shift], fill)], axis=-1)
    return core.layout.own_sequences(shifted)


def unshifted(x: jax.Array, core: Core, more: int = 0) -> jax.Array:
    """x without the last `shift` tokens, which have no target. more: the axes after those of the tokens."""
    if not core.shift:
        return x
    x = core.layout.laid_out(x, core.layout.spec_of_sequences)
    axis = x.ndim - 1 - more
    return jax.lax.slice_in_dim(x, 0, x.shape[axis] - core.shift, axis=axis)

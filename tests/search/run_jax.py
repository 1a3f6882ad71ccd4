"""Runs a drawn call of cce_jax: through its transformation, under its setting of JAX, over its mesh."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache
from math import inf
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cce_jax
from cce_kernels.plan import choose
from tests.devices.meshes import LAYOUTS, Layout, axes_of, mesh_of, over
from tests.search.bounds import distance
from tests.search.calls import CROSS_ENTROPY, DIVERGENCE, LEAVES, LOG_PROBS, TOKEN_LOSS, Call, Program
from tests.search.data import Given, unrounded
from tests.search.functions import function_of
from tests.search.logits import steepest

Named = dict[str, Any]
Step = Callable[[Named, Named], Named]  # leaves, other arrays -> results
SETS = {
    "x64": lambda: jax.enable_x64(True),
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "debug_nans": lambda: jax.debug_nans(True),
    "disable_jit": jax.disable_jit,
}
EAGER = ("second derivative", "forward mode")  # which call the function without jax.jit
FACTORS = np.float32([1.0, -0.5, 0.25])  # of batched cotangents: the gradients can be divided by them without rounding
TOLERANCES = {"float64": 1e-5, "float32": 2e-3, "bfloat16": 0.03, "float16": 0.01}  # of second derivatives


@mock.patch.object(choose, "DEARER", inf)
def run(call: Call, given: Given) -> dict[str, np.ndarray]:
    """Results and gradients by name, as tests/search/bounds.py takes them.

    Raises AssertionError where two ways must agree and do not: the truth says nothing of those.
    """
    p = call.program
    with ExitStack() as stack:
        stack.enter_context(SETS.get(p.setting, nullcontext)())
        leaves, others, held = _arrays(p, given)
        if p.layout != "one":
            mesh = mesh_of(_LAYOUTS[p.split], p.layout)
            specs = _specs(p)
            leaves, others = (
                {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in y.items()} for y in (leaves, others)
            )
            stack.enter_context(jax.set_mesh(mesh))
        wanted = {name: x for name, x in leaves.items() if name in p.wanted}
        others = others | {name: x for name, x in leaves.items() if name not in p.wanted}
        program = _program(p) if not held else _made(p, held)
        others = others | (held if p.transformation in EAGER else {})
        results, gradients = program(wanted, others, jax.device_put(given.cotangents))
        found = {name: np.asarray(x) for name, x in (results | gradients).items()}
    if p.vocab_axis == 1 and "c" in gradients:
        found["c"] = found["c"].T
    return found


def _arrays(p: Program, given: Given) -> tuple[Named, Named, Named]:
    """The leaves, the other arrays, and those of types that JAX does not hold: they stay NumPy's."""
    every = {name: unrounded(name, x, p) for name, x in given.differentiable().items()}
    every["c"] = every["c"] if p.vocab_axis == 0 else np.ascontiguousarray(every["c"].T)
    others: Named = {name: x for name, x in given.optional.items() if name not in every}
    if p.function == DIVERGENCE:
        e, c = given.teacher["e"], given.teacher["c"]
        others |= {"teacher_e": e, "teacher_c": c if p.teacher_vocab_axis == 0 else np.ascontiguousarray(c.T)}
        others |= {"teacher_bias": given.teacher["bias"]} if "bias" in given.teacher else {}
    elif p.targets:
        others["targets"] = given.targets
    if given.ids is not None:
        others["ids"] = given.ids
    if given.temperature is not None:
        others["temperature"] = given.temperature
    others |= {f"argument {k}": x for k, x in enumerate(given.arguments)}
    held = {k: x for k, x in others.items() if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype}
    others = {k: x for k, x in others.items() if k not in held}
    return jax.device_put(every), jax.device_put(others), held


@cache
def _program(p: Program) -> Callable[..., tuple[Named, Named]]:
    return _made(p, {})


def _made(p: Program, held: Named) -> Callable[..., tuple[Named, Named]]:
    """(wanted leaves, other arrays, cotangents) -> results and gradients."""
    step = _step(p)

    def whole(wanted: Named, others: Named) -> Named:
        return step(wanted | {k: x for k, x in others.items() if k in LEAVES}, others | held)

    return TRANSFORMATIONS[p.transformation](p, whole)


def forget() -> None:
    """Lets compiled programs go."""
    _program.cache_clear()


# The call


def _step(p: Program) -> Step:
    """The public function, of all arrays by name."""
    if p.layout == "one":
        return lambda leaves, others: _called(p, leaves, others, {})
    layout, specs = _LAYOUTS[p.split], _specs(p)
    options = {} if p.layout == "explicit" else {"sharding": (specs["e"], specs["c"])}
    axes = layout.manual(p.layout)
    if not axes:
        return lambda leaves, others: _called(p, leaves, others, options)

    def mapped(leaves: Named, others: Named) -> Named:
        others = {k: x for k, x in others.items() if k not in LEAVES}
        into = tuple({k: over(axes, specs[k]) for k in x} for x in (leaves, others))
        out = {name: over(axes, _spec_of_result(p, name, layout)) for name in p.results}
        function = jax.shard_map(
            lambda leaves, others: _called(p, leaves, others, options),
            in_specs=into,
            out_specs=out,
            axis_names=axes,
            check_vma=p.layout != "unchecked",
        )
        return function(leaves, others)

    return mapped


def _called(p: Program, leaves: Named, others: Named, options: Named) -> Named:
    named = {k: x for k, x in (others | leaves).items() if not k.startswith("argument")}
    arguments = [others[f"argument {k}"] for k in range(sum(k.startswith("argument") for k in others))]
    e, c = named.pop("e"), named.pop("c")
    function = getattr(cce_jax, p.function)
    options = options | p.options() | {"impl": p.impl}
    if p.function == DIVERGENCE:
        found = function(e, c, named.pop("teacher_e"), named.pop("teacher_c"), **named, **options)
        return dict(zip(p.results, found if p.return_entropy else (found,), strict=True))
    targets = named.pop("targets", None)
    if p.function == TOKEN_LOSS:
        found = function(e, c, targets, function_of(p.fn, jnp), *arguments, **named, **options)
        if not p.return_numbers:
            return {"loss": found}
        loss, numbers = found
        return {"loss": loss} | {name: x for name, x in numbers._asdict().items() if x is not None}
    found = function(e, c, targets, **named, **options)
    if p.function == LOG_PROBS:
        return {name: x for name, x in found._asdict().items() if x is not None}
    assert p.function == CROSS_ENTROPY
    return dict(zip(p.results, found if p.return_lse else (found,), strict=True))


# Over a mesh

_LAYOUTS = {layout.name: layout for layout in LAYOUTS}


def _specs(p: Program) -> dict[str, P]:
    """The spec of each array."""
    layout = _LAYOUTS[p.split]
    specs = layout.specs(p.vocab_axis)
    tokens = specs["targets"]
    of_arguments = P(*tokens[:1]) if p.shift else tokens  # their last axis is shorter than the mesh may split
    found = specs | {"ids": tokens, "temperature": tokens, "teacher_e": layout.e}
    found |= {"teacher_c": P(), "teacher_bias": P()}
    return found | {f"argument {k}": of_arguments for k in range(2)}


def _spec_of_result(p: Program, name: str, layout: Layout) -> P:
    """Of a result that leaves jax.shard_map."""
    if name == "loss" and p.reduction != "none":
        return P()
    return P(*layout.e[:2])


# Transformations: (program, step) -> (wanted, others, cotangents) -> results and gradients


def _pulled(function: Callable[..., Named], wanted: Named, others: Named, cotangents: Named) -> tuple[Any, Any]:
    """All results, and what pulls cotangents of some of them back."""

    def some(wanted: Named) -> tuple[Named, Named]:
        results = function(wanted, others)
        return {name: results[name] for name in cotangents}, results

    _, pull, results = jax.vjp(some, wanted, has_aux=True)
    return results, pull


def _like(cotangents: Named, results: Named) -> Named:
    """The cotangents in the types, and where axes are Explicit in the layouts, of their results."""

    def fitted(x: Any, y: Any) -> Any:
        x = x.astype(y.dtype)
        sharding = jax.typeof(y).sharding
        return jax.reshard(x, sharding) if axes_of(sharding.spec) else x

    return {name: fitted(x, results[name]) for name, x in cotangents.items()}


def _gradient(step: Step) -> Callable[..., tuple[Named, Named]]:
    def of(wanted: Named, others: Named, cotangents: Named) -> tuple[Named, Named]:
        if not wanted:
            return step(wanted, others), {}
        results, pull = _pulled(step, wanted, others, cotangents)
        return results, pull(_like(cotangents, results))[0]

    return of


def value(p: Program, step: Step) -> Callable[..., tuple[Named, Named]]:
    run = jax.jit(step)
    return lambda wanted, others, cotangents: (run(wanted, others), {})


def gradient(p: Program, step: Step) -> Callable[..., tuple[Named, Named]]:
    return jax.jit(_gradient(step))


def eager_gradient(p: Program, step: Step) -> Callable[..., tuple[Named, Named]]:
    return _gradient(step)


def second_backward(p: Program, step: Step) -> Callable[..., tuple[Named, Named]]:
    """Of one vjp, with another cotangent between the two. Over a mesh under jax.jit: else it takes 20 s."""
    step = step if p.layout == "one" else jax.jit(step)

    def of(wanted: Named, others: Named, cotangents: Named) -> tuple[Named, Named]:
        results, pull = _pulled(step, wanted, others, cotangents)
        of_results = _like(cotangents, results)
        first = pull(of_results)[0]
        pull({name: -2 * x for name, x in of_results.items()})
        second = pull(of_results)[0]
        for name, x in second.items():
            assert _same_bits(x, first[name]), f"the second backward pass gave {name} another gradient"
        return results, second

    return of


def batched_cotangents(p: Program, step: Step) -> Callable[..., tuple[Named, Named]]:
    def of(wanted: Named, others: Named, cotangents: Named) -> tuple[Named, Named]:
        results, pull = _pulled(step, wanted, others, cotangents)
        of_results = _like(cotangents, results)
        many = {name: jnp.stack([x * f.astype(x.dtype) for f in FACTORS]) for name, x in of_results.items()}
        found = jax.vmap(pull)(many)[0]
        k = p.vocabulary % len(FACTORS)
        return results, {name: x[k] / FACTORS[k].astype(x.dtype) for name, x in found.items()}

    return jax.jit(of)


def _two(p: Program, wanted: Named, others: Named) -> tuple[Named, Named, Named, Named, int]:
    """The call beside another one with smaller embeddings, the axes that hold the two, and the call's place."""
    k = p.vocabulary % 2
    shared = () if p.width % 2 else ("c", "bias", "class_weight", "teacher_c", "teacher_bias")

    def both(name: str, x: Any) -> Any:
        other = x / 2 if name in ("e", "teacher_e") else x
        return jnp.stack([x, other] if k == 0 else [other, x])

    made = [{name: x if name in shared else both(name, x) for name, x in y.items()} for y in (wanted, others)]
    axes = [{name: None if name in shared else 0 for name in y} for y in (wanted, others)]
    return made[0], made[1], axes[0], axes[1], k


def vmap(p: Program, step: Step) -> Callable[..., tuple[Named, Named]]:
    """Over the results; the gradient is taken of one of the two, from outside."""

    def of(wanted: Named, others: Named, cotangents: Named) -> tuple[Named, Named]:
        two, of_others, *axes, k = _two(p, wanted, others)

        def one(two: Named, of_others: Named) -> Named:
            return {name: x[k] for name, x in jax.vmap(step, in_axes=tuple(axes))(two, of_others).items()}

        results, found = _gradient(one)(two, of_others, cotangents)
        return results, {name: x if axes[0][name] is None else x[k] for name, x in found.items()}

    return jax.jit(of)


def vmap_of_gradient(p: Program, step: Step) -> Callable[..., tuple[Named, Named]]:
    def of(wanted: Named, others: Named, cotangents: Named) -> tuple[Named, Named]:
        two, of_others, *axes, k = _two(p, wanted, others)
        both = jax.vmap(lambda x, y: _gradient(step)(x, y, cotangents), in_axes=tuple(axes))(two, of_others)
        return jax.tree.map(lambda x: x[k], both)

    return jax.jit(of)


def scan(p: Program, step: Step) -> Callable[..., tuple[Named, Named]]:
    """Two steps, the parameters outside of the loop; the gradient is that of one of them."""

    def of(wanted: Named, others: Named, cotangents: Named) -> tuple[Named, Named]:
        k = p.vocabulary % 2
        factors = jnp.asarray([1.0, 0.5] if k == 0 else [0.5, 1.0], jnp.float32)

        def one(wanted: Named, others: Named) -> Named:
            def body(carry: Any, factor: Any) -> tuple[Any, Named]:
                e = (wanted | others)["e"] * factor.astype((wanted | others)["e"].dtype)
                named = [{**y, "e": e} if "e" in y else y for y in (wanted, others)]
                return carry, step(*named)

            _, results = jax.lax.scan(body, 0, factors)
            return {name: x[k] for name, x in results.items()}

        return _gradient(one)(wanted, others, cotangents)

    return jax.jit(of)


def checkpoint(p: Program, step: Step) -> Callable[..., tuple[Named, Named]]:
    return jax.jit(_gradient(jax.checkpoint(step)))


def checkpoint_policy(p: Program, step: Step) -> Callable[..., tuple[Named, Named]]:
    policies = jax.checkpoint_policies
    policy = policies.dots_saveable if p.width % 2 else policies.nothing_saveable
    return jax.jit(_gradient(jax.checkpoint(step, policy=policy)))


def _directions(p: Program, wanted: Named) -> Named:
    rng = np.random.default_rng(p.tokens * p.width)
    return {name: jnp.asarray(rng.standard_normal(x.shape), x.dtype) for name, x in wanted.items()}


def _inner(x: Named, y: Named) -> tuple[float, float]:
    """Σ x·y, and Σ |x·y|."""
    products = [np.float64(x[name]) * np.float64(y[name]) for name in x]
    return float(sum(np.sum(z) for z in products)), float(sum(np.sum(np.abs(z)) for z in products))


def forward_mode(p: Program, step: Step) -> Callable[..., tuple[Named, Named]]:
    """The tangent of the objective is the product of gradient and direction; or it is refused."""

    def of(wanted: Named, others: Named, cotangents: Named) -> tuple[Named, Named]:
        along = _directions(p, wanted)
        results, tangents = jax.jvp(lambda x: step(x, others), (wanted,), (along,))
        _, gradients = _gradient(step)(wanted, others, cotangents)
        found, _ = _inner({name: cotangents[name] for name in cotangents}, tangents)
        want, size = _inner(gradients, along)
        unit = max(2.0**-19, *(float(jnp.finfo(x.dtype).eps) for x in wanted.values()))  # sums of float32 at least
        if np.isfinite(want) and np.isfinite(size):
            allowed = 4 * unit * size + _noise(p, wanted | others, cotangents, along)
            assert abs(found - want) <= allowed, f"the tangent is {found}, not {want}"
        return results, gradients

    return of


def second_derivative(p: Program, step: Step) -> Callable[..., tuple[Named, Named]]:
    """Of the gradient along a drawn direction: right, or refused."""

    def of(wanted: Named, others: Named, cotangents: Named) -> tuple[Named, Named]:
        along = _directions(p, wanted)
        name = list(wanted)[p.vocabulary % len(wanted)]

        def slope(x: Any) -> Any:
            _, found = _gradient(step)(wanted | {name: x}, others, cotangents)
            return sum(jnp.sum(found[k].astype(jnp.float32) * along[k].astype(jnp.float32)) for k in found)

        second = jax.grad(slope)(wanted[name])
        results, gradients = _gradient(step)(wanted, others, cotangents)
        want, size, bent = _differences(p, wanted, others, cotangents, along, name)
        off, allowed = distance(np.asarray(second), want), TOLERANCES[wanted[name].dtype.name] * size
        if np.isfinite(size) and bent <= 0.1 * allowed:  # else differences do not tell
            allowed += _noise(p, wanted | others, cotangents, along, 2)
            assert off <= allowed, f"the second derivative in {name} is off by {off:.2g}, of which {allowed:.2g} may be"
        return results, gradients

    return of


def _noise(p: Program, arrays: Named, cotangents: Named, along: Named, order: int = 1) -> float:
    """torch_bound.Bound.noise."""

    def sizes(x: Named) -> list[np.ndarray]:
        return [np.abs(np.nan_to_num(np.float64(y), nan=0, posinf=0, neginf=0)) for y in x.values()]

    leaves = {name: x for name, x in arrays.items() if name in LEAVES}
    c = leaves["c"] if p.vocab_axis == 0 else leaves["c"].T
    steep = steepest(p, leaves["e"], c, leaves.get("bias"), arrays.get("temperature"))
    largest = max(float(np.max(x, initial=0.0)) for x in sizes(leaves))
    reach, size = (sum(float(np.sum(y)) for y in sizes(x)) for x in (along, cotangents))
    return 1e-5 * (1 + steep * largest) ** order * reach * size


def _differences(
    p: Program, wanted: Named, others: Named, cotangents: Named, along: Named, name: str
) -> tuple[np.ndarray, float, float]:
    """The derivative in `name` of the slope along the directions, from float64 gradients on both sides.

    Also its size, and how much it changes with the step.
    """
    wide = replace(p, impl="reference", dtype="float64", mixed=False, teacher_dtype=p.teacher_dtype and "float64")
    with jax.enable_x64(True):

        def wider(x: Named) -> Named:
            """Rounded to e's type first, as the call does."""
            x = {k: y.astype(p.dtype) if k in ("c", "bias") else y for k, y in x.items()}
            return {k: np.float64(y) if jnp.issubdtype(y.dtype, jnp.floating) else np.asarray(y) for k, y in x.items()}

        run_wide = _step(wide)
        wanted, others, cotangents = map(wider, (wanted, others, cotangents))
        along = {k: np.float64(x) for k, x in along.items()}

        def gradient(step: float) -> np.ndarray:
            moved = {k: x + step * along[k] for k, x in wanted.items()}
            return np.asarray(_gradient(run_wide)(moved, others, cotangents)[1][name])

        want, again = ((gradient(h) - gradient(-h)) / (2 * h) for h in (2.0**-17, 2.0**-19))
        size = float(np.linalg.norm(want) + np.linalg.norm(gradient(0.0))) + 1e-12
    return want, size, float(np.linalg.norm(want - again))


def _same_bits(x: Any, y: Any) -> bool:
    return np.array_equal(*(np.ascontiguousarray(z).view(np.uint8) for z in (x, y)))


TRANSFORMATIONS = {
    "value": value,
    "gradient": gradient,
    "eager gradient": eager_gradient,
    "second backward": second_backward,
    "batched cotangents": batched_cotangents,
    "vmap": vmap,
    "vmap of gradient": vmap_of_gradient,
    "scan": scan,
    "checkpoint": checkpoint,
    "checkpoint policy": checkpoint_policy,
    "second derivative": second_derivative,
    "forward mode": forward_mode,
}

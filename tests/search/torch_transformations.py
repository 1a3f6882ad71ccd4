"""What a drawn call goes through in PyTorch: every way to its results and gradients, each held to the same truth.

A transformation gets the call with its tensors, and returns results and gradients by name. It raises AssertionError
where two ways must agree and do not: the truth says nothing of those.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as checkpointed

from tests.search.bounds import distance
from tests.search.torch_bound import Bound

Named = dict[str, Tensor]
Found = tuple[Named, Named]  # results and gradients
FACTORS = 1.0, -0.5, 0.25  # of batched cotangents: powers of 2, so that the gradients can be divided again
TOLERANCE = {
    torch.float64: 1e-5,
    torch.float32: 2e-3,
    torch.bfloat16: 0.03,
    torch.float16: 0.01,
}  # of second derivatives


def value(x: Bound) -> Found:
    """Nothing needs a gradient."""
    return x(x.detached()), {}


def gradient(x: Bound) -> Found:
    if x.accumulates and "c" in x.wanted and x.drawn(2, 2):
        return _accumulated(x)
    results = x()
    return results, x.gradients(results)


def _accumulated(x: Bound) -> Found:
    """The gradient of c in a buffer of its own type, or in a wider one, which was 0."""
    c = x.leaves["c"]
    dtype = torch.promote_types(c.dtype, torch.float32) if x.drawn(2, 3) else c.dtype
    buffer = torch.zeros(c.shape, dtype=dtype, device=c.device)
    results = x.named(x.function(**x.leaves, **x.others, accumulate_into=buffer))
    x.total(results).backward()
    assert c.grad is None, "the gradient was added, and returned too"
    gradients = {name: x.leaves[name].grad for name in x.wanted if name != "c"}
    return results, gradients | {"c": buffer.to(c.dtype)}  # type: ignore[return-value]


def second_backward(x: Bound) -> Found:
    """Over a graph that was kept, with a backward pass of each input alone between them."""
    results = x()
    first = x.gradients(results, retain_graph=True)
    for name in first:
        alone = x.gradients(results, (name,), retain_graph=True)[name]
        assert same_bits(alone, first[name]), f"the gradient of {name} alone has other bits"
    second = x.gradients(results)
    for name, found in second.items():
        assert same_bits(found, first[name]), f"the second backward pass gave {name} another gradient"
    return results, second


def batched_cotangents(x: Bound) -> Found:
    results = x()
    outputs = {name: results[name] for name in x.cotangents if results[name].requires_grad}
    cotangents = [torch.stack([k * x.cotangents[name].to(y.dtype) for k in FACTORS]) for name, y in outputs.items()]
    found = torch.autograd.grad(list(outputs.values()), x.wanted_leaves(), cotangents, is_grads_batched=True)
    k = x.drawn(len(FACTORS))
    return results, {name: y[k] / FACTORS[k] for name, y in zip(x.wanted, found, strict=True)}


def _checkpointed(x: Bound, reentrant: bool) -> Found:
    names: list[str] = []

    def step(*leaves: Tensor) -> tuple[Tensor, ...]:
        results = x(dict(zip(x.leaves, leaves, strict=True)))
        names[:] = results
        return tuple(results.values())

    found = checkpointed(step, *x.leaves.values(), use_reentrant=reentrant)
    results = dict(zip(names, found, strict=True))  # type: ignore[arg-type]
    if not reentrant:
        return results, x.gradients(results)
    x.total(results).backward()  # a reentrant checkpoint works with backward() alone
    return results, {name: x.leaves[name].grad for name in x.wanted}  # type: ignore[misc]


def checkpoint(x: Bound) -> Found:
    return _checkpointed(x, reentrant=False)


def reentrant_checkpoint(x: Bound) -> Found:
    return _checkpointed(x, reentrant=True)


def func_grad(x: Bound) -> Found:
    gradients, results = _traced(x, _func_grad(x))(x.detached(), x.others)
    return results, gradients


def _func_grad(x: Bound) -> Callable[[Named, Named], tuple[Named, Named]]:
    """The gradients, and beside them the results."""

    def objective(wanted: Named, fixed: Named, others: Named) -> tuple[Tensor, Named]:
        results = x({name: {**fixed, **wanted}[name] for name in x.leaves}, others)
        return x.total(results), results

    def both(leaves: Named, others: Named) -> tuple[Named, Named]:
        wanted = {name: leaves[name] for name in x.wanted}
        fixed = {name: y for name, y in leaves.items() if name not in wanted}
        return torch.func.grad(objective, has_aux=True)(wanted, fixed, others)

    return both


def _two(x: Bound) -> tuple[Named, Named, dict[str, int | None], dict[str, int | None]]:
    """The call twice, its tokens the second time in another order, and the axes that hold the two."""
    leaves, others = (
        {name: torch.stack([y, x.reordered(name, y)]) for name, y in z.items()} for z in (x.leaves, x.others)
    )
    of_leaves, of_others = (dict.fromkeys(z, 0) for z in (leaves, others))
    if x.drawn(2) and x.leading:  # what belongs to no token is there once
        for once, axes, own in ((leaves, of_leaves, x.leaves), (others, of_others, x.others)):
            for name in once:
                if not x.is_of_tokens(name, own[name]):
                    once[name], axes[name] = own[name], None  # type: ignore[assignment]
    return leaves, others, of_leaves, of_others  # type: ignore[return-value]


def vmap(x: Bound) -> Found:
    """Over the results; the gradient is that of one of the two, from outside."""
    leaves, others, *axes = _two(x)
    both = torch.func.vmap(x, in_dims=tuple(axes))(leaves, others)
    k = x.drawn(2, 1)
    results = {name: x.in_order(name, y[k], k) for name, y in both.items()}
    return results, x.gradients(results)


def _traced(x: Bound, transformed: Callable) -> Callable:
    """A transform of torch.func, in some calls inside torch.compile."""
    if x.drawn(4, 2):
        return transformed
    torch._dynamo.reset()
    return torch.compile(transformed, backend=x.backend)


def vmap_of_func_grad(x: Bound) -> Found:
    leaves, others, *axes = _two(x)
    leaves = {name: y.detach() for name, y in leaves.items()}
    k = x.drawn(2, 1)
    given = x.in_that_order(k)  # the cotangents of the tokens, in the order of the one that is looked at
    gradients, results = _traced(x, torch.func.vmap(_func_grad(given), in_dims=tuple(axes)))(leaves, others)
    return tuple({name: x.in_order(name, y[k], k) for name, y in z.items()} for z in (results, gradients))  # type: ignore


def _compiled(x: Bound, leaves: Named) -> Named:
    """The results of the second step: guards that fail at it are seen."""
    torch._dynamo.reset()
    dynamic = None if x.drawn(4, 3) else True  # numbers and sizes are symbols from the first step on
    step = torch.compile(x.function, fullgraph=True, dynamic=dynamic, backend=x.backend)
    step(**leaves, **x.others)
    return x.named(step(**leaves, **x.others))


def compile(x: Bound) -> Found:
    results = _compiled(x, x.leaves)
    return results, x.gradients(results)


def compile_without_gradient(x: Bound) -> Found:
    if x.drawn(2):
        return _compiled(x, x.detached()), {}
    with torch.no_grad():
        return _compiled(x, x.leaves), {}


def second_derivative(x: Bound) -> Found:
    """Of the gradients along drawn directions: right, or refused."""
    results, factor = x(), torch.ones((), requires_grad=True)
    gradients = x.gradients(results, factor=factor, create_graph=True)
    along = x.directions()
    slope = sum((y.double() * along[name].double()).sum() for name, y in gradients.items())
    of = ("", *x.wanted)[x.drawn(len(x.wanted) + 1)]
    leaf = x.leaves[of] if of else factor
    linear = of == "token_weight"  # the loss is linear in it
    (found,) = torch.autograd.grad(slope, leaf, retain_graph=True, materialize_grads=linear)  # type: ignore[arg-type]
    if any(y.isinf().any() for y in gradients.values()):
        return results, gradients  # float16 does not hold them, nor what follows from them
    if not of:
        want, size = _product(x, gradients, along)
        _agree(found, want, size, "the derivative of the gradients in a factor of the loss")
    elif (differences := _differences(x, along, of)) is not None:
        _agree(found, *differences, f"the second derivative in {of}")
    return results, gradients


def _product(x: Bound, gradients: Named, along: Named) -> tuple[Tensor, Tensor]:
    """The product of gradients and directions, and how far it may be off."""
    products = [y.detach().double() * along[name].double() for name, y in gradients.items()]
    value, size = (sum(y.sum() for y in z) for z in (products, [y.abs() for y in products]))
    return value, (4 * x.unit() + 1e-4) * size + x.noise(along)  # type: ignore[return-value]


def _differences(x: Bound, along: Named, of: str) -> tuple[Tensor, Tensor] | None:
    """The derivative in `of` of the slope along the directions, from central differences of float64 gradients.

    And how far it may be off. None: the gradients bend too much within a step for differences to tell.
    """
    y = x.in_float64()

    def gradients(step: float) -> Tensor:
        leaves = {}
        for name, leaf in y.leaves.items():
            moved = leaf.detach() + (step * along[name].double() if name in x.wanted else 0)
            leaves[name] = moved.requires_grad_(name == of)
        return torch.autograd.grad(y.total(y(leaves)), leaves[of])[0]

    want, again = ((gradients(step) - gradients(-step)) / (2 * step) for step in (2.0**-17, 2.0**-19))
    norm = torch.linalg.vector_norm
    allowed = TOLERANCE[x.leaves[of].dtype] * (norm(want) + norm(gradients(0.0)))
    return None if norm(want - again) > 0.1 * allowed else (want, allowed + x.noise(along, 2) + 1e-12)


def _agree(found: Tensor, want: Tensor, allowed: Tensor, what: str) -> None:
    """Raise unless they do; what is NaN is NaN in both."""
    assert torch.equal(found.isnan(), want.isnan()), f"{what} is NaN where it should not be, or the reverse"
    found = found.detach().cpu()
    wrong = distance((found.float() if found.dtype == torch.bfloat16 else found).numpy(), want.cpu().numpy())
    assert not wrong > allowed, f"{what} is off by {wrong:.2g}, of which {float(allowed):.2g} is allowed"


def forward_mode(x: Bound) -> Found:
    """The tangent of the objective is the product of gradient and direction; or it is refused.

    PyTorch gives a tangent the strides of its number, and cannot where they are 0.
    """
    along = x.directions()
    primals = {name: y.detach() if all(y.stride()) else y.detach().clone() for name, y in x.leaves.items()}
    if x.drawn(2):
        moving, fixed = (
            {name: primals[name] for name in primals if (name in along) == wanted} for wanted in (True, False)
        )

        def function(moving: Named) -> Named:
            return x({name: {**fixed, **moving}[name] for name in primals})

        results, tangents = torch.func.jvp(function, (moving,), (along,))  # type: ignore[misc]
    else:
        with forward_ad.dual_level():
            duals = {name: forward_ad.make_dual(y, along[name]) if name in along else y for name, y in primals.items()}
            both = {name: forward_ad.unpack_dual(y) for name, y in x(duals).items()}
            results = {name: y.primal for name, y in both.items()}
            tangents = {name: y.tangent for name, y in both.items() if y.tangent is not None}
    reverse = x()
    missing = [name for name in x.cotangents if name not in tangents and reverse[name].requires_grad]
    assert not missing, f"no tangent of {missing}: dropped without an error"
    found = sum(
        (x.cotangents[name].double() * y.double()).sum() for name, y in tangents.items() if name in x.cotangents
    )
    gradients = x.gradients(reverse)
    if not any(y.isinf().any() for y in gradients.values()):  # else float16 does not hold them
        _agree(found, *_product(x, gradients, along), "the tangent")  # type: ignore[arg-type]
    return results, gradients


def inference_mode(x: Bound) -> Found:
    with torch.inference_mode():
        if x.drawn(2):  # tensors that were made in inference mode
            return x({name: y.clone() for name, y in x.leaves.items()}), {}
        return x(), {}


def no_grad(x: Bound) -> Found:
    with torch.no_grad():
        results = x()
    assert not any(y.requires_grad for y in results.values())
    return results, {}


def default_device(x: Bound) -> Found:
    """That has no memory: a tensor that is made without a device has no values."""
    torch.set_default_device("meta")
    try:
        with Nothing() if x.drawn(2) else nullcontext():
            return gradient(x) if x.wanted else value(x)
    finally:
        torch.set_default_device(None)


class Nothing(TorchDispatchMode):
    """A dispatch mode: the operators then run through PyTorch's dispatcher."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def default_dtype(x: Bound) -> Found:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return gradient(x) if x.wanted else value(x)
    finally:
        torch.set_default_dtype(before)


def offloaded(x: Bound) -> Found:
    """A hook moves what the graph saves to row-major memory of the CPU, and back."""
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        results = x()
    return results, x.gradients(results)


def autocast(x: Bound) -> Found:
    device = x.leaves["e"].device.type
    with torch.autocast(device, x.autocast_type):
        results = x()
    return results, x.gradients(results)


def in_place(x: Bound) -> Found:
    """Every result is changed in place; the objective is that of what they were."""
    results = x()
    for y in results.values():
        if y.is_floating_point():
            y.mul_(2)
        else:
            y.add_(1)
    restored = {name: y / 2 if y.is_floating_point() else y - 1 for name, y in results.items()}
    return restored, x.gradients(restored)


def side_thread(x: Bound) -> Found:
    """The forward pass in one thread, the backward pass in another."""
    results = _in_thread(x)
    return results, _in_thread(lambda: x.gradients(results))


def _in_thread(function: Callable[[], Named]) -> Named:
    done: list[Any] = []

    def call() -> None:
        try:
            done.append(function())
        except BaseException as error:  # raised again in the thread that waits
            done.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if isinstance(done[0], BaseException):
        raise done[0]
    return done[0]


def same_bits(x: Tensor, y: Tensor) -> bool:
    flat = (z.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for z in (x, y))
    return x.dtype == y.dtype and torch.equal(*flat)


@contextmanager
def untouched(x: Bound) -> Iterator[None]:
    """Raise if a call changed an input."""
    every = [y for z in (x.leaves, x.others) for y in z.values() if isinstance(y, Tensor)]
    before = [y._version for y in every if not y.is_inference()]
    yield
    assert before == [y._version for y in every if not y.is_inference()], "the call changed an input in place"


TRANSFORMATIONS: dict[str, Callable[[Bound], Found]] = {
    "value": value,
    "gradient": gradient,
    "second backward": second_backward,
    "batched cotangents": batched_cotangents,
    "checkpoint": checkpoint,
    "reentrant checkpoint": reentrant_checkpoint,
    "func.grad": func_grad,
    "vmap": vmap,
    "vmap of func.grad": vmap_of_func_grad,
    "compile": compile,
    "compile without gradient": compile_without_gradient,
    "second derivative": second_derivative,
    "forward mode": forward_mode,
    "inference mode": inference_mode,
    "no_grad": no_grad,
    "default device": default_device,
    "default dtype": default_dtype,
    "offloaded": offloaded,
    "autocast": autocast,
    "in place": in_place,
    "side thread": side_thread,
}

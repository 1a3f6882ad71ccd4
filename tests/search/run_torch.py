"""Runs a drawn call of cce_torch: its tensors, the public function in the form that was drawn, and its processes."""

import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import cce_torch
from cce_kernels.plan import choose
from cce_torch import functional
from cce_torch.on_jax import programs
from tests.call_torch import array, small_blocks, tensor
from tests.search import functions, torch_processes
from tests.search.calls import CROSS_ENTROPY, DIVERGENCE, LEAVES, LOG_PROBS, REFUSED_BY_MOST, TOKEN_LOSS, Call, Program
from tests.search.data import TYPES, Given, unrounded
from tests.search.logits import steepest
from tests.search.torch_bound import Bound, Named
from tests.search.torch_transformations import TRANSFORMATIONS, untouched


def run(call: Call, given: Given) -> dict[str, np.ndarray]:
    """The results and the gradients of a call, by name; c is (V, D) whatever the layout.

    Raises:
      AssertionError: two ways that must agree do not; see torch_transformations.py and torch_processes.py.
    """
    if call.program.processes == 1:
        return _run(call, bound(call, given))
    found = torch_processes.of_processes(call.program.processes).run(_in_process, call, given)
    return _joined(call.program, found)


@mock.patch.object(choose, "DEARER", inf)
def _run(call: Call, x: Bound) -> dict[str, np.ndarray]:
    """Every second program takes small calls for large ones, which a GPU alone has time for."""
    program = call.program
    at_once = programs.AT_ONCE * (zlib.crc32(repr(program).encode()) % 2)
    with untouched(x), mock.patch.object(programs, "AT_ONCE", at_once):
        results, gradients = TRANSFORMATIONS[program.transformation](x)
    assert tuple(results) == program.results, f"returned {tuple(results)}, not {program.results}"
    for name, y in gradients.items():
        kind, own = (y.shape, y.dtype), (x.leaves[name].shape, x.leaves[name].dtype)
        assert kind == own, f"the gradient of {name} is {kind}, not {own}"
    found = {name: array(y) for name, y in results.items()}
    found |= {name: array(y) for name, y in gradients.items()}
    if program.vocab_axis == 1 and "c" in found:
        found["c"] = found["c"].T
    if "e" in found:  # under autocast float32, rounded to the type
        found["e"] = found["e"].astype(TYPES[program.dtype])
    return found


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def bound(call: Call, given: Given) -> Bound:
    """The call with tensors of this process."""
    program = call.program
    tensors = {name: tensor(x, device()) for name, x in _arrays(program, given).items()}
    if program.transformation == "autocast":
        tensors["e"] = tensors["e"].float()
    tensors["e"] = strided(tensors["e"], program.strides_e)
    c = tensors["c"] if program.vocab_axis == 0 else tensors["c"].T.contiguous()
    tensors["c"] = strided(c, program.strides_c, vocab_axis=program.vocab_axis)
    if program.teacher_vocab_axis:
        tensors["teacher_c"] = tensors["teacher_c"].T.contiguous()
    for name in program.wanted:
        tensors[name].requires_grad_()
    plain = replace(program, form="function", impl="reference", gradient_tolerance=0.0)
    own = {name: tensors.pop(name) for name in ("class_weight",) if name in tensors}  # no argument of a module's call
    steep = 1.0
    if program.transformation in REFUSED_BY_MOST:  # the others compare nothing with derivatives along directions
        steep = steepest(program, given.e, given.c, given.optional.get("bias"), given.temperature)
    return Bound(
        function=function_of(call, **own),
        reference=function_of(Call(plain, call.data), **own),
        named=partial(_named, program),
        leaves={name: x for name, x in tensors.items() if name in LEAVES},
        others={name: x for name, x in tensors.items() if name not in LEAVES},
        wanted=program.wanted,
        cotangents={name: tensor(given.cotangents[name], device()) for name in program.objective},
        leading=program.leading,
        shift=program.shift,
        seed=call.data.seed,
        steepest=steep,
        autocast_type=getattr(torch, program.dtype),
        backend=program.backend,
        accumulates=program.function == CROSS_ENTROPY and program.form != "hf" and program.processes == 1,
    )


def _arrays(program: Program, given: Given) -> dict[str, np.ndarray]:
    """By the names of the arguments; those of fn are argument_0, argument_1."""
    every: dict[str, Any] = {"e": given.e, "c": given.c, "targets": given.targets, **given.optional}
    every |= {"ids": given.ids, "temperature": given.temperature}
    every |= {f"argument_{k}": x for k, x in enumerate(given.arguments)}
    every |= {f"teacher_{name}": x for name, x in given.teacher.items()}
    if program.function == DIVERGENCE or not program.targets:
        del every["targets"]
    return {name: unrounded(name, x, program) for name, x in every.items() if x is not None}


def strided(x: Tensor, how: str, vocab_axis: int = 0) -> Tensor:
    """The same numbers with the strides that a call has drawn. "expanded": all tokens, or all rows of c, are equal."""
    if how == "transposed" and x.dim() > 1:
        return x.mT.contiguous().mT
    if how == "sliced" and x.dim():
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if how == "expanded" and x.dim() > 1 and x.numel():
        one = x.narrow(1, 0, 1) if vocab_axis else x.reshape(-1, x.shape[-1])[0]
        return one.clone().expand(x.shape)
    return torch._neg_view(-x) if how == "negative" else x.clone()  # type: ignore[attr-defined]


def function_of(call: Call, **more: Any) -> Callable[..., Any]:
    """The public function in the form of the call, with its options, of tensors by name. more: other arguments."""
    program = call.program
    options: dict[str, Any] = program.options() | {"impl": program.impl} | more
    if options.get("num_items") is not None and call.data.seed % 2:
        wide = torch.float64 if call.program.dtype == "float64" else torch.float32
        options["num_items"] = torch.tensor(options["num_items"], dtype=wide, device=device())
    if program.function == TOKEN_LOSS:
        return partial(_token_loss, functions.function_of(program.fn, torch), options)  # type: ignore[arg-type]
    if program.form == "function":
        return partial(getattr(cce_torch, program.function), **options)
    if program.form == "functional":
        named = {name: options[name] for name in ("reduction", "ignore_index", "label_smoothing")}
        return partial(_functional, named | {"weight": options.get("class_weight")})
    of_call = {"num_items": options.pop("num_items")}
    if program.form == "module":
        return partial(cce_torch.LinearCrossEntropy(**options), **of_call)
    biased = "bias" in program.arrays
    if program.form == "head":
        del options["vocab_axis"]
        head = cce_torch.LinearCrossEntropyHead(program.width, program.vocabulary, biased, **options)
        return partial(_head, head, of_call)
    from tests.search.torch_model import loss_of, model_of

    model = model_of(program.width, program.vocabulary, biased, program.softcap, program.logit_scale)
    named = {name: options[name] for name in ("impl", "reduction", "precision", "memory_budget") if name in options}
    trains = program.differentiates or program.reduction != "mean" or bool(call.data.seed % 2)
    return loss_of(model, trains, **of_call, **named)


def _token_loss(fn: Callable, options: dict[str, Any], **given: Any) -> Any:
    positional = [given.pop(name) for name in ("e", "c", "targets")]
    arguments = [given.pop(name) for name in sorted(name for name in given if name.startswith("argument"))]
    return cce_torch.linear_token_loss(*positional, fn, *arguments, **(options | given))


def _head(
    head: cce_torch.LinearCrossEntropyHead,
    of_call: dict[str, Any],
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    **more: Any,
) -> Any:
    weights = {"weight": c} | ({} if bias is None else {"bias": bias})
    named = of_call | more
    return torch.func.functional_call(head, weights, (e, targets), named)


def _functional(
    options: dict[str, Any], e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None = None, **more: Any
) -> Tensor:
    return functional.linear_cross_entropy(e, c, targets, linear_bias=bias, **options, **more)


def _named(program: Program, found: Any) -> Named:
    """What the function returned, by the names of Program.results."""
    if program.function == LOG_PROBS:
        return {name: x for name, x in found._asdict().items() if x is not None}
    if len(program.results) == 1:
        return {"loss": found}
    loss, more = found
    if program.function == TOKEN_LOSS:
        return {"loss": loss} | {name: x for name, x in more._asdict().items() if x is not None}
    return {"loss": loss, "entropy" if program.function == DIVERGENCE else "lse": more}


# Several processes. Each has all arrays, and computes with its part of them.


def _in_process(group: Any, call: Call, given: Given) -> dict[str, np.ndarray]:
    """What a process of the group returns."""
    import torch.distributed as dist

    program, rank = call.program, dist.get_rank(group)
    x = bound(call, given)
    with small_blocks():
        if program.split != "tokens":
            return _run(call, _of_rows(call, x, group, rank))
        if program.function == CROSS_ENTROPY:
            return _run(call, _of_dtensors(call, x, group))
        return _run(call, _of_tokens(call, x, given, rank))


def _of_rows(call: Call, x: Bound, group: Any, rank: int) -> Bound:
    """The call in which this process gives the rows of c and bias that it holds, some more than others.

    And where the sequence is split, its part of e, which has the size that torch.chunk would give it.
    """
    program = call.program
    rng = np.random.default_rng(call.data.seed)
    stops = [0, *sorted(rng.integers(0, program.vocabulary + 1, program.processes - 1).tolist()), program.vocabulary]
    start, rows = stops[rank], stops[rank + 1] - stops[rank]
    sequence = 0 if program.split == "sequence" else None
    shard = cce_torch.VocabParallel(group, start, start + rows, sequence_axis=sequence)
    whole = partial(x.function, vocab_parallel=shard)
    tokens, size = program.leading[0], -(-program.leading[0] // program.processes)

    def function(e: Tensor, c: Tensor, bias: Tensor | None = None, **given: Any) -> Any:
        if sequence is not None:
            first = min(rank * size, tokens)
            e = e.narrow(0, first, min(size, tokens - first))
        of_bias = {} if bias is None else {"bias": bias.narrow(0, start, rows)}
        return whole(e=e, c=c.narrow(program.vocab_axis, start, rows), **of_bias, **given)

    return replace(x, function=function)


def _of_dtensors(call: Call, x: Bound, group: Any) -> Bound:
    """The call with DTensors whose tokens are split."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = DeviceMesh.from_group(group, "cpu")

    def function(**given: Any) -> Any:
        for name, y in given.items():
            of_tokens = isinstance(y, Tensor) and x.is_of_tokens(name, y)
            if of_tokens:
                y = y.chunk(call.program.processes)[mesh.get_local_rank()]
            if isinstance(y, Tensor):
                given[name] = DTensor.from_local(y, mesh, [Shard(0) if of_tokens else Replicate()])
        found = x.function(**given)
        return tuple(y.full_tensor() for y in found) if isinstance(found, tuple) else found.full_tensor()

    return replace(x, function=function)


def _of_tokens(call: Call, x: Bound, given: Given, rank: int) -> Bound:
    """The call of some tokens: as data parallelism splits a batch. With a shift the parts of one row overlap."""
    program = call.program
    whole, options = program.leading[0], dict[str, Any]()
    overlap = program.shift if len(program.leading) == 1 else 0
    start, stop = ((whole - overlap) * k // program.processes for k in (rank, rank + 1))
    if program.function != LOG_PROBS and program.reduction == "mean":
        options["num_items"] = program.num_items if program.num_items is not None else _items(program, given)

    def of_part(function: Callable, **given: Any) -> Any:
        for name, y in given.items():
            if x.is_of_tokens(name, y):
                given[name] = y[start : stop if name.startswith("argument") else stop + overlap]
        return partial(function, **options)(**given)

    parts = {name: y[start:stop] if y.dim() else y for name, y in x.cotangents.items()}
    both = {name: partial(of_part, getattr(x, name)) for name in ("function", "reference")}
    return replace(x, **both, cotangents=parts)


def _items(program: Program, given: Given) -> float:
    """The number by which the mean of all tokens divides."""
    if program.function == DIVERGENCE:
        weight = given.optional.get("token_weight")
        return float(program.tokens if weight is None else weight.sum(dtype=np.float64))
    return float((given.targets[..., program.shift :] != program.ignore_index).sum())


def _joined(program: Program, found: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The results and gradients of all tokens and of the whole vocabulary."""
    data_parallel = program.split == "tokens" and program.function != CROSS_ENTROPY
    result: dict[str, np.ndarray] = {}
    for name in found[0]:
        parts = [x[name] for x in found]
        held = {"vocabulary": ("c", "bias"), "sequence": ("e", "c", "bias"), "tokens": ("e", "token_weight")}
        split = name in held[program.split]
        if data_parallel and name not in LEAVES and parts[0].ndim:
            result[name] = np.concatenate(parts)
        elif split or data_parallel:  # each process has 0 for what the others hold
            total = sum(x.astype(np.float64) for x in parts)
            result[name] = np.asarray(total).astype(parts[0].dtype)
        else:
            differ = [k for k, x in enumerate(parts) if x.tobytes() != parts[0].tobytes()]
            assert not differ, f"{name} of the processes {differ} is not that of process 0"
            result[name] = parts[0]
    return result

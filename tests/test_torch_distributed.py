"""cce_torch in several processes: data parallelism, a split vocabulary, DTensors. The results are those of one."""

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cce_torch import LinearCrossEntropy, LinearCrossEntropyHead, VocabParallel, linear_cross_entropy, linear_log_probs
from tests import gloo
from tests.call_torch import array, run, tensor
from tests.cases import CASES, Case, Inputs, inputs
from tests.gloo import Collectives, fsdp1, gathered, in_processes, rows_of, shard_of, whole_gradients
from tests.tolerance import assert_close, assert_rounded
from tests.truth import truth

pytestmark = gloo.needed

IMPLS = ("torch_compile", "reference", "chunked")

# A model whose batch is split over the processes.

N, D, V = 12, 8, 37  # tokens of one process
IGNORED = -100


class Model(nn.Module):
    """An embedding, a layer, a norm and the head."""

    def __init__(self, head: nn.Linear, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.body, self.norm, self.head = nn.Embedding(V, D), nn.Linear(D, D), nn.LayerNorm(D), head
        if tied:
            self.embedding.weight = head.weight

    def hidden(self, tokens):
        return self.norm(torch.tanh(self.body(self.embedding(tokens))))

    def forward(self, tokens, targets, **options):
        return self.head(self.hidden(tokens), targets, **options)


class Plain(nn.Linear):
    """A head with the same signature that holds the logits."""

    def forward(self, h, targets, num_items):  # type: ignore[override]
        z = super().forward(h).to(torch.promote_types(h.dtype, torch.float32))
        return nn.functional.cross_entropy(z, targets, ignore_index=IGNORED, reduction="sum") / num_items


def batch(processes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, (processes, N). The processes ignore different numbers of targets, the last one all."""
    generator = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(V, (2, processes, N), generator=generator)
    targets[0, ::3] = IGNORED
    targets[-1] = IGNORED
    return tokens, targets


def model(head: Callable, *, bias: bool = True, tied: bool = False, frozen: bool = False, dtype=torch.float32) -> Model:
    """The same weights at each call, standing well away from 0."""
    torch.manual_seed(0)
    made = Model(head(D, V, bias), tied)
    with torch.no_grad():
        made.head.weight *= 3
    made.head.requires_grad_(not frozen)
    return made.to(dtype)


@functools.cache
def expected(processes: int, dtype=torch.float64, **options) -> dict[str, np.ndarray]:
    """The loss of all tokens in one process, with full logits, and the gradients by the names of parameters."""
    whole = model(Plain, dtype=dtype, **options)
    tokens, targets = batch(processes)
    loss = whole(tokens.flatten(), targets.flatten(), num_items=int((targets != IGNORED).sum()))
    loss.backward()
    return {k: array(x) for k, x in {"loss": loss, **whole_gradients(whole)}.items()}


def assert_step(wrapped: Any, what: str, low=torch.float32, group=None, given: Any = None, **options: Any) -> None:
    """The loss of this process' tokens, differentiated, of which every wrapper takes the mean.

    low: the type that the model computes in; group: the processes among which the batch is split; given: arguments.
    """
    processes, rank = dist.get_world_size(group), dist.get_rank(group)
    tokens, targets = batch(processes)
    count = (targets != IGNORED).sum() / processes  # of all processes, over the number of processes
    loss = wrapped(tokens[rank], targets[rank], num_items=count.item(), **(given or {}))
    loss.backward()
    whole = (expected(processes, dtype, **options) for dtype in (torch.float64, low))
    gloo.assert_as_one_process(what, loss, wrapped, *whole, low=low != torch.float32)


def wrap(how: str, module: Any, mesh=None, **policy: Any) -> Any:
    """how: DDP, FSDP1 or FSDP2, and what of the module is a unit of its own besides the body and the whole."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if how == "DDP":
        return nn.parallel.DistributedDataParallel(module)
    if how.startswith("FSDP1"):
        if how.endswith("the head by itself"):
            module.head = fsdp1(module.head)
        return fsdp1(module)
    options: dict = {"mesh": mesh or init_device_mesh("cpu", (dist.get_world_size(),))}
    if policy:
        options["mp_policy"] = MixedPrecisionPolicy(**policy)
    if how == "the head by itself":
        fully_shard(module.head, **options)
    elif how == "the head with the norm":
        fully_shard([module.norm, module.head], **options)
    fully_shard(module.body, **options)
    return fully_shard(module, **options)


FSDP2 = "the head in the root", "the head by itself", "the head with the norm"


def check_data_parallel() -> None:
    tied, biasless, frozen = {"tied": True}, {"bias": False}, {"frozen": True}
    ways: list[tuple[str, dict]] = [("DDP", x) for x in ({}, tied, biasless, frozen)]
    ways += [(FSDP2[0], tied), (FSDP2[0], frozen), (FSDP2[1], {}), (FSDP2[1], biasless), (FSDP2[2], {})]
    ways += [(FSDP2[2], frozen), ("FSDP1, the head by itself", {}), *(("FSDP1", x) for x in ({}, frozen, tied))]
    for (how, options), impl in zip(ways, itertools.cycle(IMPLS), strict=False):
        head = functools.partial(LinearCrossEntropyHead, impl=impl)
        assert_step(wrap(how, model(head, **options)), f"{how}, {impl}, {options}", **options)


def check_mixed_precision() -> None:
    tokens, targets = (x[dist.get_rank()] for x in batch(dist.get_world_size()))
    for how in FSDP2:
        policy = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        wrapped = wrap(how, model(LinearCrossEntropyHead), **policy)
        assert_step(wrapped, f"bfloat16, {how}", low=torch.bfloat16)
        one = wrapped(tokens, targets, num_items=1)
        for count in (12345, torch.tensor(12345), 12345.0):
            loss = wrapped(tokens, targets, num_items=count)
            torch.testing.assert_close(loss * 12345, one, rtol=1e-6, atol=0)  # 12352 would be 6e-4 off
        if how == FSDP2[1]:  # else the root casts num_items before the head is called
            h = wrapped.hidden(tokens)
            loss = wrapped.head(h, targets, num_items=torch.tensor(12345.0))
            torch.testing.assert_close(loss * 12345, wrapped.head(h, targets, num_items=1), rtol=1e-6, atol=0)
        with pytest.raises(TypeError, match=r"num_items is a bfloat16.*a tensor of integers"):
            wrapped(tokens, targets, num_items=torch.tensor(12345.0))


class Checkpointed(Model):
    def forward(self, tokens, targets, *, reentrant, **options):
        from torch.utils.checkpoint import checkpoint

        call = functools.partial(self.head, **options)
        return checkpoint(call, self.hidden(tokens), targets, use_reentrant=reentrant)


def check_checkpoints_and_compile() -> None:
    ways = itertools.product((False, True), ("DDP", FSDP2[0]))
    for (reentrant, how), impl in zip(ways, (*IMPLS[:2], *IMPLS[1::-1]), strict=True):
        made = model(functools.partial(LinearCrossEntropyHead, impl=impl))
        made.__class__ = Checkpointed
        assert_step(wrap(how, made), f"checkpoint, {impl}, {reentrant=}, {how}", given={"reentrant": reentrant})
    for how, impl in zip((FSDP2[1], "DDP"), IMPLS[:2], strict=True):
        made = model(functools.partial(LinearCrossEntropyHead, impl=impl))
        made.head.compile(backend="aot_eager", fullgraph=True)
        assert_step(wrap(how, made), f"compiled, {how}")


def check_two_axes() -> None:
    """Sharded over one axis of the mesh; over the other replicated, or parallel in the vocabulary."""
    from torch.distributed.tensor.parallel import parallelize_module

    from cce_torch import VocabParallelStyle

    for how in FSDP2[:2]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        assert_step(wrap(how, model(LinearCrossEntropyHead), mesh), f"HSDP, {how}")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for how, impl in zip(FSDP2, IMPLS, strict=True):
        made = model(functools.partial(LinearCrossEntropyHead, impl=impl))
        made = parallelize_module(made, mesh["tensor"], {"head": VocabParallelStyle()})
        wrapped = wrap(how, made, mesh["data"])
        assert_step(wrapped, f"tensor parallelism, {how}", group=mesh.get_group("data"))
        with pytest.raises(TypeError, match=r"forward of the module that FSDP wraps"):
            linear_cross_entropy(torch.rand(2, D), made.head.weight, torch.arange(2), impl=impl)


# The vocabulary split over the processes. Its numbers: tests/search.

SHARDS = {2: (111, 203), 4: (40, 111, 111, 203)}  # of four processes the third holds no column


def split(given: Inputs, stops: tuple[int, ...] = (), dtype=torch.float32) -> tuple:
    """e, this process' rows of c, targets, and the VocabParallel, as leaves."""
    shard = shard_of(stops or SHARDS[dist.get_world_size()])
    e, c = (tensor(x).to(dtype).requires_grad_() for x in (given.e, given.c[rows_of(shard)]))
    return e, c, torch.tensor(given.targets).long(), shard


def check_accumulated_rows() -> None:
    """Each process adds the gradient of its rows to its own buffer."""
    from torch.distributed.tensor import DTensor, Replicate

    for reduction in ("mean", "none"):
        e, c, targets, shard = split(inputs(Case("buffers", (37,)), "bfloat16"), (70, 203), torch.bfloat16)
        call = functools.partial(linear_cross_entropy, e, c, targets, reduction=reduction, vocab_parallel=shard)
        (want,) = torch.autograd.grad(call().sum(), c)
        buffer = torch.ones(c.shape)
        call(accumulate_into=buffer).sum().backward()
        assert c.grad is None
        torch.testing.assert_close(buffer, 1 + want.float())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    split_e, split_c = (DTensor.from_local(x.detach(), mesh, [Replicate()]) for x in (e, c))
    with pytest.raises(NotImplementedError, match="accumulate_into does not work with DTensors"):
        linear_cross_entropy(split_e, split_c, targets, accumulate_into=buffer)


def check_largest_logits_of_split() -> None:
    """As of one process, where some hold fewer columns than are asked for, and many logits are equal or -inf."""
    generator = torch.Generator().manual_seed(0)
    e, c = (torch.randint(-1, 2, (n, 4), generator=generator).float().requires_grad_() for n in (9, 20))
    bias, targets = torch.where(torch.arange(20) % 3 == 0, -torch.inf, 0), torch.tensor([*range(7), IGNORED, 19])
    shard, asked = shard_of((2, 2, 7, 20)), {"predicted": True, "top_k": 17, "mean_logit": True}
    own = rows_of(shard)

    def numbers(*inputs: Any, **options: Any) -> tuple[Any, ...]:
        found = linear_log_probs(*inputs, **asked, **options)
        weighted = torch.where(found.log_probs.isfinite(), found.log_probs, 0) * torch.arange(9)
        return found, torch.autograd.grad(weighted.sum(), inputs[:2])

    want, (of_e, of_c) = numbers(e, c, targets, bias, impl="reference")
    for impl in IMPLS:
        part = c[own].detach().requires_grad_()
        found, gradients = numbers(e, part, targets, bias[own], vocab_parallel=shard, impl=impl)
        assert torch.equal(found.predicted, want.predicted), impl
        assert torch.equal(found.top_ids, want.top_ids), impl
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradients, (of_e, of_c[own]), rtol=1e-5, atol=1e-6)


def check_dropped_strides() -> None:
    """A hook on saved tensors drops the strides of c.T: the program is still that of the forward pass."""
    from cce_torch.on_jax import kinds

    before = kinds.EXACT
    kinds._kinds.clear()
    kinds.EXACT = 1
    found = []
    for tokens, hooks in ((7, False), (37, False), (37, True)):  # 7 tokens are not padded, 37 are
        e, c, targets, shard = split(inputs(Case("strides", (tokens,), 8, 40), "bfloat16"), (16, 40), torch.bfloat16)
        c = c.detach().T.contiguous().requires_grad_()
        options: Any = {"vocab_axis": 1, "impl": "cce", "memory_budget": "all", "vocab_parallel": shard}
        with torch.autograd.graph.save_on_cpu(pin_memory=True) if hooks else contextlib.nullcontext():
            loss = linear_cross_entropy(e, c, targets, **options)
        found.append((torch.autograd.grad(loss, (e, c), retain_graph=True), loss))
    kinds.EXACT = before
    assert all(map(torch.equal, found[1][0], found[2][0]))


def check_gradients_of_split_e() -> None:
    """de is summed in float32 and rounded once. With reduce_e_grad=False each process has its part."""
    given = inputs(CASES[0], "bfloat16")
    exact, reference = truth(given, {})[2]["e"], run(given, {}, "reference")[2]["e"]
    for impl in ("torch_compile", "chunked"):
        e, c, targets, shard = split(given, dtype=torch.bfloat16)
        (de,) = torch.autograd.grad(
            linear_cross_entropy(e, c, targets, impl=impl, vocab_parallel=shard) * tensor(given.of_loss), e
        )
        assert_rounded(array(de), exact, reference, f"{impl}: de", roundings=2)
        e, c = e.detach().float().requires_grad_(), c.detach().float()
        own, whole = (
            torch.autograd.grad(linear_cross_entropy(e, c, targets, impl=impl, vocab_parallel=x), e)[0]
            for x in (dataclasses.replace(shard, reduce_e_grad=False), shard)
        )
        dist.all_reduce(own)
        torch.testing.assert_close(own, whole, rtol=1e-5, atol=1e-7)


@dataclasses.dataclass
class OfCutCrossEntropy:
    """With the fields of cut_cross_entropy's VocabParallelOptions."""

    start: int
    stop: int
    group: Any = None
    reduce_e_grad: bool = True


def check_options_of_split() -> None:
    """What is asked of the loss in one process is asked here too."""
    given = inputs(CASES[0])
    for impl in ("torch_compile", "chunked"):
        e, c, targets, shard = split(given)
        call = functools.partial(linear_cross_entropy, targets=targets, impl=impl, vocab_parallel=shard)
        loss = call(e, c)
        want = torch.autograd.grad(loss, (e, c), retain_graph=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # which is for the forward pass alone
            assert all(map(torch.equal, torch.autograd.grad(loss, (e, c)), want))
            assert torch.equal(call(e, c), call(e.detach().bfloat16(), c.detach().bfloat16()))
        of_theirs = OfCutCrossEntropy(shard.start, shard.stop)
        other = linear_cross_entropy(e, c, targets, impl=impl, vocab_parallel_options=of_theirs)
        assert all(map(torch.equal, torch.autograd.grad(other, (e, c)), want))
        head = LinearCrossEntropyHead(*reversed(c.shape), bias=False, impl=impl, vocab_parallel=shard)
        head.weight = torch.nn.Parameter(c.detach())
        assert all(map(torch.equal, torch.autograd.grad(head(e, targets), (e, head.weight)), want))
        module = LinearCrossEntropy(impl=impl, vocab_parallel=shard)
        assert torch.equal(copy.deepcopy(module)(e, c, targets), loss)
        with pytest.raises(NotImplementedError, match=r"vocab_parallel does not work with torch\.func.*loss\.backward"):
            torch.func.grad(lambda e, c=c, call=call: call(e, c))(e)
        tolerant = functools.partial(call, gradient_tolerance=2**-7)
        assert all(map(torch.equal, torch.autograd.grad(tolerant(e, c), (e, c)), want))
        if impl == "chunked":
            compiled = torch.compile(tolerant, backend="aot_eager", fullgraph=True)
            found = torch.autograd.grad(compiled(e, c), (e, c))
            torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-7)
        targets[3] = 203
        with pytest.raises(ValueError, match=r"targets\[3\] = 203 is outside \[0, 203\)"):
            call(e, c, check_targets=True)


def check_collectives() -> None:
    given = inputs(CASES[0])
    of_numbers, of_e = ["all_gather_into_tensor (3, 37) float32"], ["all_reduce (37, 20) float32"]
    for impl in (*IMPLS, "cce"):
        e, c, targets, shard = split(given, dtype=torch.bfloat16)
        call = functools.partial(linear_cross_entropy, targets=targets, impl=impl, vocab_parallel=shard)
        with Collectives() as forward:
            loss = call(e, c)
        of_targets = ["all_reduce (37,) float32"] if impl == "cce" else []  # whose sums take a reference
        formed = impl == "chunked"  # in the forward pass
        assert forward.seen == of_targets + of_numbers + of_e * formed, forward.seen
        with Collectives() as backward:
            loss.backward()
        assert backward.seen == of_e * (not formed), backward.seen
        if impl != "cce":  # whose interpreter is slow
            with Collectives() as frozen:
                call(e.detach(), c).backward()
            assert frozen.seen == of_numbers, frozen.seen


def check_errors_of_split() -> None:
    e, c, t = torch.rand(4, 8), torch.rand(5, 8), torch.arange(4)
    rank = dist.get_rank()
    shard = VocabParallel(None, 5 * rank, 5 * rank + 5)
    assert shard.vocabulary == 20
    call = functools.partial(linear_cross_entropy, targets=t)
    for given, error_, message in (
        (dict(c=c[:4]), ValueError, r"c must hold the 5 rows \["),
        (dict(bias=c[:4, 0]), ValueError, r"bias must hold the same rows.*\(5,\), got bias \(4,\)"),
        (dict(class_weight=c[:, 0]), ValueError, r"class_weight must have shape \(V,\) = \(20,\)"),
        (dict(e=e[:, :7]), ValueError, r"e must have shape \(..., D\) with D = 8"),
        (dict(vocab_parallel=dataclasses.replace(shard, sequence_axis=0)), ValueError, "e must hold 1 of the 4 tokens"),
        (dict(vocab_parallel=dataclasses.replace(shard, sequence_axis=1)), ValueError, "sequence_axis=1 must be an ax"),
        (dict(vocab_parallel_options=shard), ValueError, "give one of them"),
        (dict(vocab_parallel=3), TypeError, r"must be a cce_torch.VocabParallel, got int"),
        (dict(vocab_parallel=None, vocab_parallel_options=3), TypeError, r"VocabParallelOptions, got int"),
    ):
        with pytest.raises(error_, match=message):
            call(**{**dict(e=e, c=c, vocab_parallel=shard), **given})
    apart = "must follow one another from 0 on, each held once, got"
    for rows, message in (
        *(((5 * rank + a, 5 * rank + b), apart) for a, b in ((0, 6), (1, 5))),
        ((6 * rank, 6 * rank + 5), apart),
        ((5, 4), "0 <= start <= stop"),
        ((0, 5, True, 4), "at most vocabulary=4"),
    ):
        with pytest.raises(ValueError, match=message):
            VocabParallel(None, *rows)
    losses = call(e.requires_grad_(), c, vocab_parallel=shard, reduction="none")
    with pytest.raises(NotImplementedError, match="is_grads_batched=True does not work where processes share"):
        torch.autograd.grad(losses, e, torch.ones(2, *losses.shape), is_grads_batched=True)


# DTensors.


def assert_dtensors(case: Case, mesh, placements: dict[str, list], impl: str, **more) -> None:
    """The loss of distributed inputs and its gradients against one process, and the placements of the gradients."""
    from torch.distributed.tensor import distribute_tensor

    what = f"{case}, {impl}, {placements}, {more}"
    given = inputs(case)
    leaves: dict[str, Any] = {"e": given.e, "c": given.c, "targets": given.targets, **given.optional}
    for name, x in leaves.items():
        x = tensor(x).long() if name == "targets" else tensor(x)
        leaves[name] = distribute_tensor(x, mesh, placements[name]) if name in placements else x
        leaves[name].requires_grad_(name in given.differentiable())
    loss, lse = linear_cross_entropy(**leaves, impl=impl, **{**case.options, **more, "return_lse": True})
    objective = (loss.full_tensor() * tensor(given.of_loss)).sum()
    if case.options.get("return_lse"):
        objective = objective + (lse.full_tensor() * tensor(given.of_lse)).sum()
    names = list(given.differentiable())
    found = dict(zip(names, torch.autograd.grad(objective, [leaves[k] for k in names]), strict=True))
    for name, x in found.items():
        if name in placements:
            assert x.placements == leaves[name].placements, f"{what}: d{name} has placements {x.placements}"
    found |= {"loss": loss, "lse": lse}
    exact, reference = (
        {"loss": x[0], "lse": x[1], **x[2]} for x in (truth(given, case.options), run(given, case.options, "reference"))
    )
    for name, x in found.items():
        x = x.full_tensor() if hasattr(x, "full_tensor") else x
        assert_close(array(x), exact[name], reference[name], f"{what}: {name}")


def check_dtensors() -> None:
    from torch.distributed.tensor import Replicate, Shard

    rng = np.random.default_rng(0)
    meshes = [init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)]) for shape in ((4,), (2, 2))]
    everywhere = [Replicate(), Shard(0), Shard(1)]
    ways = {
        "e": [*everywhere, Shard(2)],
        "c": [Replicate(), Shard(0), Shard(0), Shard(1)],
        "targets": everywhere,
        "token_weight": everywhere,
        "bias": everywhere[:2],
        "class_weight": everywhere[:2],
    }
    cases = [x for x in CASES if int(x.options.get("shift", 0)) <= 1]
    for draw in range(14):
        leading, vocabulary = ((5, 7), (2, 9), (1, 3))[draw % 3], int(rng.choice((203, 37, 5)))
        case = dataclasses.replace(cases[draw % len(cases)], leading=leading, vocabulary=vocabulary)
        mesh = meshes[rng.integers(2)]
        names = ["e", "c", "targets", *case.arrays]
        placements = {k: [ways[k][rng.integers(len(ways[k]))] for _ in range(mesh.ndim)] for k in names}
        if case.options.get("shift"):
            placements["e"] = [Replicate() if p == Shard(1) else p for p in placements["e"]]
        impl = "chunked" if draw % 5 == 4 else IMPLS[draw % 2]
        assert_dtensors(case, mesh, placements, impl, gradient_tolerance=draw / 20)


def check_errors_of_dtensors() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, other = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    e, c, t = torch.rand(6, 8), torch.rand(11, 8), torch.arange(6)

    def placed(x: torch.Tensor, *placements: Any) -> torch.Tensor:
        return distribute_tensor(x, mesh if len(placements) == 1 else other, list(placements))

    split_c, split_e, whole_e = placed(c, Shard(0)), placed(e, Shard(0)), placed(e, Replicate())
    whole_c, wrong = placed(c, Replicate()), t.clone()
    wrong[0] = c.shape[0]  # which one process has: all raise, and none waits for the others
    for given, error_, message in (
        (dict(e=e, c=split_c), TypeError, r"^e is a plain tensor and c a DTensor.*FSDP wraps.*VocabParallelStyle"),
        (dict(e=split_e, c=c), TypeError, r"^c is a plain tensor and e a DTensor.*DTensor.from_local\(c, e.device_m"),
        (dict(e=split_e, c=whole_c), TypeError, r"^targets is a plain tensor, and e is split.*distribute_tensor"),
        (dict(e=whole_e, c=split_c, bias=c[:, 0]), TypeError, r"^bias is a plain tensor, and c is split"),
        (dict(e=whole_e, c=split_c, vocab_parallel=3), TypeError, r"^vocab_parallel is for plain tensors, and e, c is"),
        (dict(e=whole_e, c=placed(c, Shard(0), Replicate())), ValueError, r"^all DTensors must be on one mesh"),
        (
            dict(e=split_e, c=whole_c, targets=placed(t, Shard(0)), shift=1),
            ValueError,
            r"^shift=1 needs targets of the next process",
        ),
        (dict(e=split_e, c=whole_c, targets=placed(wrong, Shard(0)), check_targets=True), ValueError, r"targets\[0\]"),
    ):
        with pytest.raises(error_, match=message):
            linear_cross_entropy(**{"targets": t, **given})
    with pytest.raises(TypeError, match="c must be a DTensor, got Tensor"):
        VocabParallel.from_dtensor(c)
    with pytest.raises(ValueError, match="by one axis of its mesh and replicated over the others"):
        VocabParallel.from_dtensor(placed(c, Shard(0), Shard(0)))
    for of in (placed(c, Shard(0)), placed(c[:5], Shard(0)), placed(c, Replicate(), Shard(0))):
        made = VocabParallel.from_dtensor(of)
        assert made.vocabulary == of.shape[0]
        assert torch.equal(of.to_local(), c[: of.shape[0]][made.start : made.stop])


# Tensor parallelism of the head.


def check_tensor_parallel() -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    from cce_torch import VocabParallelStyle

    mesh = init_device_mesh("cpu", (2,))
    head = functools.partial(LinearCrossEntropyHead, impl="torch_compile")
    tokens, targets = batch(1)[0][0], batch(2)[1][0]
    count = int((targets != IGNORED).sum())

    def one_process(dtype, options):
        whole = model(Plain, dtype=dtype, **options)
        loss = whole(tokens, targets, num_items=count)
        loss.backward()
        logits = nn.functional.linear(whole.hidden(tokens), whole.head.weight, whole.head.bias)
        found = {"loss": loss, "logits": logits, **whole_gradients(whole)}
        return {k: array(x) for k, x in found.items()}

    for options in ({}, {"bias": False}, {"frozen": True}, {"tied": True}):
        made = model(head, **options)
        if options.get("tied"):
            made = parallelize_module(made, mesh, {"embedding": RowwiseParallel(input_layouts=Replicate())})
            made.head.weight = made.embedding.weight
        made = parallelize_module(made, mesh, {"head": VocabParallelStyle()})
        assert made.head.weight.placements == (Shard(0),)
        loss = made(tokens, targets)
        assert not loss._is_view()
        loss.backward()
        assert all(torch.equal(loss, x) for x in gathered(loss.detach()))
        part = made.head(made.hidden(tokens))
        logits = DTensor.from_local(part, mesh, [Shard(1)], shape=(N, V), stride=(V, 1)).full_tensor()
        found = {"loss": loss, "logits": logits, **whole_gradients(made)}
        exact, reference = (one_process(dtype, options) for dtype in (torch.float64, torch.float32))
        assert found.keys() == exact.keys()
        for name, x in found.items():
            assert_close(array(x), exact[name], reference[name], f"{options}: {name}")

    made = parallelize_module(model(head), mesh, {"head": VocabParallelStyle()})
    loss = torch.compile(made, backend="aot_eager")(tokens, targets)  # breaks the graph at the head
    torch.testing.assert_close(loss, made(tokens, targets), rtol=1e-6, atol=0)


def check_parts_of_a_sequence() -> None:
    """Of tokens that the processes do not divide, of which the last has fewer or none: the loss, the logits."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import parallelize_module

    from cce_torch import VocabParallelStyle

    mesh = init_device_mesh("cpu", (2,))
    head = functools.partial(LinearCrossEntropyHead, impl="torch_compile", class_weight=torch.arange(1.0, V + 1))
    generator = torch.Generator().manual_seed(4)

    def part_of(x: torch.Tensor, axis: int) -> torch.Tensor:
        return distribute_tensor(x, mesh, [Shard(axis)]).to_local()

    for shape, axis in (((11,), 0), ((1,), 0), ((2, 5), 1), ((2, 4), 1), ((2, 1), 1)):
        h, targets = torch.randn(*shape, D, generator=generator), torch.randint(V, shape, generator=generator)
        style = VocabParallelStyle(input_layouts=Shard(axis), output_layouts=Replicate())
        whole, made = model(head).head, parallelize_module(model(head), mesh, {"head": style}).head
        weights = torch.randn(*shape, V, generator=generator)
        of_whole, of_part = h.clone().requires_grad_(), part_of(h, axis).requires_grad_()
        for given, by in (((), weights), ((targets,), torch.ones(()))):
            exact, found = whole(of_whole, *given), made(of_part, *given)
            torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)
            want = torch.autograd.grad((exact * by).sum(), (of_whole, *whole.parameters()))
            part, *others = torch.autograd.grad((found * by).sum(), (of_part, *made.parameters()))
            pairs = [(part, part_of(want[0], axis)), *zip((x.full_tensor() for x in others), want[1:], strict=True)]
            for x, y in pairs:
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    made = parallelize_module(model(head), mesh, {"head": VocabParallelStyle(input_layouts=Shard(1))}).head
    with pytest.raises(ValueError, match=r"axis 1 .*parts of torch.chunk, of sizes \[3, 2\], got .*sizes \[2, 3\]"):
        made(torch.randn(2, 2 + dist.get_rank(), D))


def test_two_processes():
    in_processes(
        2,
        check_data_parallel,
        check_mixed_precision,
        check_checkpoints_and_compile,
        check_tensor_parallel,
        check_parts_of_a_sequence,
        check_options_of_split,
        check_accumulated_rows,
        check_dropped_strides,
    )


def test_four_processes():
    in_processes(
        4,
        check_two_axes,
        check_gradients_of_split_e,
        check_largest_logits_of_split,
        check_collectives,
        check_errors_of_split,
        check_dtensors,
        check_errors_of_dtensors,
    )

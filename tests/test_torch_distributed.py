"""cce_torch in several processes, which talk by gloo: the results are those of one process.

A process needs seconds to start. So each test starts its processes once, and they make many checks; and they are
forks of a process that has imported all modules and computed nothing.
"""

import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from cce_torch import LinearCrossEntropy, LinearCrossEntropyHead, VocabParallel, linear_cross_entropy
from cce_torch.in_torch import compiled
from tests.call_torch import array, run, tensor
from tests.cases import CASES, Case, Inputs, inputs
from tests.collector import keep_what_is_there
from tests.tolerance import assert_close, assert_rounded, bound, error
from tests.truth import truth

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")

TIMEOUT = timedelta(seconds=120)
IMPLS = ("torch_compile", "reference", "chunked")


def in_processes(count: int, *checks: Callable[[], None], gpus: bool = False) -> None:
    """Calls the checks in so many processes of one group. An error in one of them ends all and is raised here.

    gpus: each process sees one GPU, and talks about its tensors by nccl.
    """
    multiprocessing.set_forkserver_preload(
        [__name__, "cce_torch.on_jax.bridge", "torch._dynamo", "torch.distributed.fsdp"]
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = (count, f"{folder}/store", checks, gpus)
        torch.multiprocessing.start_processes(_process, arguments, nprocs=count, start_method="forkserver")


def _process(rank: int, count: int, file: str, checks: tuple[Callable[[], None], ...], gpus: bool) -> None:
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)  # CUDA has not started in this process
    else:
        keep_what_is_there()
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    compiled._uncompilable.add("cpu")  # "torch_compile" runs uncompiled: compiling takes most of a minute
    back_end = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    dist.init_process_group(back_end, init_method=f"file://{file}", rank=rank, world_size=count, timeout=TIMEOUT)
    for check in checks:
        check()
        dist.barrier()
    dist.destroy_process_group()  # not after an error: with nccl it would wait for the other processes


def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    """x of every process."""
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.contiguous())
    return found


def assert_same_everywhere(x: torch.Tensor, what: str) -> None:
    x = x.detach()
    assert all(torch.equal(x, y) for y in gathered(x)), f"{what} differs between the processes"


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
def expected(processes: int, dtype=torch.float64, **options) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The loss of all tokens in one process, with full logits, and the gradients by the names of parameters."""
    whole = model(Plain, dtype=dtype, **options)
    tokens, targets = batch(processes)
    loss = whole(tokens.flatten(), targets.flatten(), num_items=int((targets != IGNORED).sum()))
    loss.backward()
    return array(loss), {k: array(p.grad) for k, p in whole.named_parameters() if p.grad is not None}


def assert_gradients(
    found: dict[str, torch.Tensor], what: str, low=torch.float32, processes: int | None = None, **options
) -> None:
    """low: the type that the model computes in; processes: among how many the batch is split."""
    processes = processes or dist.get_world_size()
    truth, reference = (expected(processes, dtype, **options)[1] for dtype in (torch.float64, low))
    assert found.keys() == truth.keys(), f"{what}: gradients of {sorted(found)}, not {sorted(truth)}"
    for name, x in found.items():
        if low == torch.float32:
            assert_close(array(x), truth[name], reference[name], f"{what}: {name}")
        else:
            allowed = bound(reference[name], truth[name])
            assert error(array(x.float()), truth[name]) <= allowed, f"{what}: {name}"


def whole_gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """Of FSDP2's or plain parameters."""
    grads = {k: p.grad for k, p in module.named_parameters() if p.grad is not None}
    return {
        k.removeprefix("module."): g.full_tensor() if hasattr(g, "full_tensor") else g  # type: ignore[attr-defined]
        for k, g in grads.items()
    }


def step(wrapped: nn.Module, group=None, **options) -> torch.Tensor:
    """The loss of this process' tokens, differentiated. Every wrapper takes the mean of the gradients.

    group: the processes among which the batch is split.
    """
    processes, rank = dist.get_world_size(group), dist.get_rank(group)
    tokens, targets = batch(processes)
    count = (targets != IGNORED).sum() / processes  # of all processes, over the number of processes
    loss = wrapped(tokens[rank], targets[rank], num_items=count.item(), **options)
    loss.backward()
    return loss.detach()


def assert_loss(loss: torch.Tensor, what: str, **options) -> None:
    truth, reference = (
        expected(dist.get_world_size(), dtype, **options)[0] for dtype in (torch.float64, torch.float32)
    )
    mean = torch.stack(gathered(loss)).mean()
    assert_close(array(mean), truth, reference, f"{what}: loss")


def fsdp2(module: Any, how: str, mesh=None, **policy) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict = {"mesh": mesh or init_device_mesh("cpu", (dist.get_world_size(),))}
    if policy:
        options["mp_policy"] = MixedPrecisionPolicy(**policy)
    if how == "by itself":
        fully_shard(module.head, **options)
    elif how == "with the norm":
        fully_shard([module.norm, module.head], **options)
    fully_shard(module.body, **options)
    return fully_shard(module, **options)


def check_data_parallel() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    kinds: list[dict] = [{}, {"tied": True}, {"bias": False}, {"frozen": True}]
    heads = itertools.cycle((impl, functools.partial(LinearCrossEntropyHead, impl=impl)) for impl in IMPLS)
    for options, (impl, head) in zip(kinds, heads, strict=False):
        what = f"DDP, {impl}, {options}"
        wrapped = nn.parallel.DistributedDataParallel(model(head, **options))
        assert_loss(step(wrapped), what, **options)
        assert_gradients(whole_gradients(wrapped), what, **options)
    ways = [
        ("in the root", kinds[1]),
        ("in the root", kinds[3]),
        ("by itself", {}),
        ("by itself", kinds[2]),
        ("with the norm", {}),
        ("with the norm", kinds[3]),
    ]
    for (how, options), (impl, head) in zip(ways, heads, strict=False):
        what = f"FSDP2 {how}, {impl}, {options}"
        wrapped = fsdp2(model(head, **options), how)
        assert_loss(step(wrapped), what, **options)
        assert_gradients(whole_gradients(wrapped), what, **options)

    for whole, options in ((True, {}), (False, {}), (False, {"frozen": True}), (False, {"tied": True})):
        wrapped = model(LinearCrossEntropyHead, **options)
        what = f"FSDP1, {'by itself' if whole else 'in the root'}, {options}"
        if whole:
            wrapped.head = FullyShardedDataParallel(wrapped.head, use_orig_params=True, device_id="cpu")
        wrapped = FullyShardedDataParallel(wrapped, use_orig_params=True, device_id="cpu")
        assert_loss(step(wrapped), what, **options)
        with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
            named = {k.replace("_fsdp_wrapped_module.", ""): p for k, p in wrapped.named_parameters()}
            found = {k: p.grad.clone() for k, p in named.items() if p.requires_grad}
        assert_gradients(found, what, **options)


def check_mixed_precision_checkpoints_and_compile() -> None:
    from torch.utils.checkpoint import checkpoint

    rank = dist.get_rank()
    tokens, targets = (x[rank] for x in batch(dist.get_world_size()))
    for how in ("in the root", "by itself", "with the norm"):
        policy = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        wrapped = fsdp2(model(LinearCrossEntropyHead), how, **policy)
        step(wrapped)
        assert_gradients(whole_gradients(wrapped), f"bfloat16 {how}", low=torch.bfloat16)
        one = wrapped(tokens, targets, num_items=1)
        for count in (12345, torch.tensor(12345), 12345.0):
            loss = wrapped(tokens, targets, num_items=count)
            torch.testing.assert_close(loss * 12345, one, rtol=1e-6, atol=0)  # 12352 would be 6e-4 off
        if how == "by itself":  # else the root casts num_items before the head is called
            h = wrapped.hidden(tokens)
            loss = wrapped.head(h, targets, num_items=torch.tensor(12345.0))
            torch.testing.assert_close(loss * 12345, wrapped.head(h, targets, num_items=1), rtol=1e-6, atol=0)
        with pytest.raises(TypeError, match=r"num_items is a bfloat16.*a tensor of integers"):
            wrapped(tokens, targets, num_items=torch.tensor(12345.0))

    class Checkpointed(Model):
        def forward(self, tokens, targets, *, reentrant, **options):
            return checkpoint(
                functools.partial(self.head, **options), self.hidden(tokens), targets, use_reentrant=reentrant
            )

    root = functools.partial(fsdp2, how="in the root")
    wraps = nn.parallel.DistributedDataParallel, root
    for (reentrant, wrap), impl in zip(
        itertools.product((False, True), wraps), (*IMPLS[:2], *IMPLS[1::-1]), strict=True
    ):
        made = model(functools.partial(LinearCrossEntropyHead, impl=impl))
        made.__class__ = Checkpointed
        wrapped = wrap(made)
        what = f"checkpoint, {impl}, {reentrant=}, {type(wrapped).__name__}"
        assert_loss(step(wrapped, reentrant=reentrant), what)
        assert_gradients(whole_gradients(wrapped), what)
    for how, impl in zip(("in the root", "by itself", "DDP"), (*IMPLS[:2], IMPLS[0]), strict=True):
        made = model(functools.partial(LinearCrossEntropyHead, impl=impl))
        made.head.compile(backend="aot_eager", fullgraph=True)
        wrapped = nn.parallel.DistributedDataParallel(made) if how == "DDP" else fsdp2(made, how)
        assert_loss(step(wrapped), f"compiled {how}")
        assert_gradients(whole_gradients(wrapped), f"compiled {how}")


def check_hybrid() -> None:
    """HSDP: sharded over one axis of the mesh, replicated over the other."""
    for how in ("in the root", "by itself"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        wrapped = fsdp2(model(LinearCrossEntropyHead), how, mesh)
        assert_loss(step(wrapped), f"HSDP {how}")
        assert_gradients(whole_gradients(wrapped), f"HSDP {how}")


# The vocabulary split over the processes.


def held_by(rank: int, stops: tuple[int, ...]) -> tuple[int, int]:
    """The rows of the process: from the stop of the one before it to its own."""
    return (0, *stops)[rank], stops[rank]


def run_split(given: Inputs, options: dict, stops: tuple[int, ...], impl: str, device: str = "cpu", **more) -> tuple:
    """tests.call_torch.run, where each process holds some rows of c and bias. The gradients are gathered."""
    rank = dist.get_rank()
    start, stop = held_by(rank, stops)
    own = dict(given.optional)
    if "bias" in own:
        own["bias"] = own["bias"][start:stop]
    local = dataclasses.replace(given, c=given.c[start:stop], optional=own)
    shard = VocabParallel(None, start, stop)
    loss, lse, gradients = run(local, options, impl, device, vocab_parallel=shard, **more)
    for name in ("c", "bias"):
        if name in gradients:
            parts: list = [None] * dist.get_world_size()
            dist.all_gather_object(parts, gradients[name])
            gradients[name] = np.concatenate(parts)
    return loss, lse, gradients


def check_freed_programs() -> None:
    """A graph remembers to which size its tokens were padded when its programs are freed."""
    from cce_torch.on_jax import kinds, programs

    before = kinds.EXACT, kinds.SMALLEST
    kinds._kinds.clear()
    kinds.EXACT, kinds.SMALLEST = 0, 16
    given = inputs(Case("padded", (37,)), "bfloat16")
    e, c, targets, shard = split(given, (70, 203), torch.bfloat16)
    loss = linear_cross_entropy(e, c, targets, impl="cce", memory_budget="all", vocab_parallel=shard)
    assert loss.grad_fn is not None
    expected_ = torch.autograd.grad(loss, (e, c), retain_graph=True)
    programs.handover_of.cache_clear()
    for program in ("_target_program", "_loss_program", "_gradients_program"):
        getattr(programs, program).cache_clear()
    gc.collect()
    kinds.EXACT, kinds.SMALLEST = before
    for x, y in zip(torch.autograd.grad(loss, (e, c)), expected_, strict=True):
        assert torch.equal(x, y)


def check_accumulated_rows() -> None:
    """Each process adds the gradient of its rows to its own buffer."""
    from torch.distributed.tensor import DTensor, Replicate

    for reduction in ("mean", "none"):
        e, c, targets, shard = split(inputs(Case("buffers", (37,)), "bfloat16"), (70, 203), torch.bfloat16)

        def loss(**options):
            found = linear_cross_entropy(e, c, targets, reduction=reduction, vocab_parallel=shard, **options)  # noqa: B023
            return found.sum()

        (want,) = torch.autograd.grad(loss(), c)
        buffer = torch.ones(c.shape)
        loss(accumulate_into=buffer).backward()
        assert c.grad is None
        torch.testing.assert_close(buffer, 1 + want.float())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    split_e, split_c = (DTensor.from_local(x.detach(), mesh, [Replicate()]) for x in (e, c))
    with pytest.raises(NotImplementedError, match="accumulate_into does not work with DTensors"):
        linear_cross_entropy(split_e, split_c, targets, accumulate_into=buffer)


def check_dropped_strides() -> None:
    """A hook on saved tensors drops the strides of c.T: the program is still that of the forward pass."""
    from cce_torch.on_jax import kinds

    before = kinds.EXACT
    kinds._kinds.clear()
    kinds.EXACT = 1
    alive = []
    for tokens, hooks in ((7, False), (37, False), (37, True)):  # 7 tokens are not padded, 37 are
        e, c, targets, shard = split(inputs(Case("strides", (tokens,), 8, 40), "bfloat16"), (16, 40), torch.bfloat16)
        c = c.detach().T.contiguous().requires_grad_()
        with torch.autograd.graph.save_on_cpu(pin_memory=True) if hooks else contextlib.nullcontext():
            loss = linear_cross_entropy(
                e, c, targets, vocab_axis=1, impl="cce", memory_budget="all", vocab_parallel=shard
            )
        alive.append((loss, torch.autograd.grad(loss, (e, c), retain_graph=True)))
    kinds.EXACT = before
    for x, y in zip(alive[1][1], alive[2][1], strict=True):
        assert torch.equal(x, y)


SHARDS = {2: (111, 203), 4: (40, 111, 111, 203)}  # of four processes the third holds no column


def split(given: Inputs, stops: tuple[int, ...] = (), dtype=torch.float32) -> tuple:
    """e, this process' rows of c, targets, and the VocabParallel, as leaves."""
    start, stop = held_by(dist.get_rank(), stops or SHARDS[dist.get_world_size()])
    e, c = (tensor(x).to(dtype).requires_grad_() for x in (given.e, given.c[start:stop]))
    return e, c, torch.tensor(given.targets).long(), VocabParallel(None, start, stop)


def check_gradients_of_split_e() -> None:
    """de is summed in float32 and rounded once. With reduce_e_grad=False each process has its part."""
    given = inputs(CASES[0], "bfloat16")
    exact, reference = truth(given, {})[2]["e"], run(given, {}, "reference")[2]["e"]
    for impl in ("torch_compile", "chunked"):
        e, c, targets, shard = split(given, dtype=torch.bfloat16)
        options = dict(impl=impl)
        loss = linear_cross_entropy(e, c, targets, vocab_parallel=shard, **options)
        (de,) = torch.autograd.grad(loss * tensor(given.of_loss), e)
        assert_rounded(array(de), exact, reference, f"{impl}: de", roundings=2)
        part = dataclasses.replace(shard, reduce_e_grad=False)
        e, c = e.detach().float().requires_grad_(), c.detach().float()
        (own,) = torch.autograd.grad(linear_cross_entropy(e, c, targets, vocab_parallel=part, **options), e)
        (whole,) = torch.autograd.grad(linear_cross_entropy(e, c, targets, vocab_parallel=shard, **options), e)
        dist.all_reduce(own)
        torch.testing.assert_close(own, whole, rtol=1e-5, atol=1e-7)


def check_options_of_split() -> None:
    """What is asked of the loss in one process is asked here too."""
    from torch.utils.checkpoint import checkpoint

    @dataclasses.dataclass
    class VocabParallelOptions:  # has the fields of cut_cross_entropy's
        start: int
        stop: int
        group: Any = None
        reduce_e_grad: bool = True

    given = inputs(CASES[0])
    for impl in ("torch_compile", "chunked"):
        e, c, targets, shard = split(given)
        call = functools.partial(linear_cross_entropy, targets=targets, impl=impl, vocab_parallel=shard)
        expected_ = torch.autograd.grad(call(e, c), (e, c))

        def assert_same(found: Any, what: str, expected_=expected_, impl=impl) -> None:
            for x, y in zip(found, expected_, strict=True):
                assert x is None or torch.equal(x, y), f"{impl}: {what}"

        loss = call(e, c)
        for reentrant in (False, True):
            again = checkpoint(call, e, c, use_reentrant=reentrant)
            again.backward()
            assert_same([e.grad, c.grad], "checkpoint")
            e.grad = c.grad = None
        with torch.no_grad():
            assert torch.equal(call(e, c), loss)
        options = VocabParallelOptions(shard.start, shard.stop)
        for _ in range(2):
            other = linear_cross_entropy(e, c, targets, impl=impl, vocab_parallel_options=options)
            assert_same(torch.autograd.grad(other, (e, c)), "cut_cross_entropy's options")
        head = LinearCrossEntropyHead(*reversed(c.shape), bias=False, impl=impl, vocab_parallel=shard)
        head.weight = torch.nn.Parameter(c.detach())
        head(e, targets).backward()
        assert_same([e.grad, head.weight.grad], "the head")
        e.grad = None
        module = LinearCrossEntropy(impl=impl, vocab_parallel=shard)
        assert torch.equal(copy.deepcopy(module)(e, c, targets), loss)
        with pytest.raises(NotImplementedError, match=r"vocab_parallel does not work with torch\.func.*loss\.backward"):
            torch.func.grad(lambda e, c=c, call=call: call(e, c))(e)
        tolerant = functools.partial(call, gradient_tolerance=2**-7)
        assert_same(torch.autograd.grad(tolerant(e, c), (e, c)), "a tolerance")
        compiled = torch.compile(tolerant, backend="aot_eager", fullgraph=True)
        for x, y in zip(torch.autograd.grad(compiled(e, c), (e, c)), expected_, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)
        none = call(e[:0], c, targets=targets[:0])
        assert none == 0
        assert not any(x.any() for x in torch.autograd.grad(none, (e, c)))
        targets[3] = 203
        assert torch.autograd.grad(call(e, c, reduction="sum"), e)[0].isnan().any(1).nonzero().flatten().tolist() == [3]
        with pytest.raises(ValueError, match=r"targets\[3\] = 203 is outside \[0, 203\)"):
            call(e, c, check_targets=True)
        e16, c16 = e.detach().bfloat16(), c.detach().bfloat16()
        targets[3] = 0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(call(e, c), call(e16, c16))
        loss = call(e, c)
        outside = torch.autograd.grad(loss, (e, c), retain_graph=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # which is for the forward pass alone
            inside = torch.autograd.grad(loss, (e, c))
        assert all(torch.equal(x, y) for x, y in zip(inside, outside, strict=True)), f"{impl}: backward under autocast"


class Collectives(TorchDispatchMode):
    """The names of the collectives that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        namespace, name = function._schema.name.split("::")
        if namespace == "_c10d_functional" and name != "wait_tensor":
            self.seen.append(f"{name.removesuffix('_')} {tuple(args[0].shape)} {str(args[0].dtype)[6:]}")
        return function(*args, **(kwargs or {}))


def check_collectives() -> None:
    given = inputs(CASES[0])
    for impl in (*IMPLS, "cce"):
        e, c, targets, shard = split(given, dtype=torch.bfloat16)
        with Collectives() as forward:
            loss = linear_cross_entropy(e, c, targets, impl=impl, vocab_parallel=shard)
        of_targets = ["all_reduce (37,) float32"] if impl == "cce" else []  # whose sums take a reference
        of_numbers, of_e = ["all_gather_into_tensor (3, 37) float32"], ["all_reduce (37, 20) float32"]
        formed = impl == "chunked"  # in the forward pass
        assert forward.seen == of_targets + of_numbers + of_e * formed, forward.seen
        with Collectives() as backward:
            loss.backward()
        assert backward.seen == of_e * (not formed), backward.seen
        with Collectives() as frozen:
            linear_cross_entropy(e.detach(), c, targets, impl=impl, vocab_parallel=shard).backward()
        assert frozen.seen == of_targets + of_numbers, frozen.seen


def check_errors_of_split() -> None:
    e, c, t = torch.rand(4, 8), torch.rand(5, 8), torch.arange(4)
    rank = dist.get_rank()
    shard = VocabParallel(None, 5 * rank, 5 * rank + 5)
    assert shard.vocabulary == 20
    call = functools.partial(linear_cross_entropy, e, c, t, vocab_parallel=shard)
    for given, message in (
        (dict(c=c[:4]), r"c must hold the 5 rows \["),
        (dict(bias=c[:4, 0]), r"bias must hold the same rows.*\(5,\), got bias \(4,\)"),
        (dict(class_weight=c[:, 0]), r"class_weight must have shape \(V,\) = \(20,\)"),
        (dict(e=e[:, :7]), r"e must have shape \(..., D\) with D = 8"),
        (dict(vocab_parallel=dataclasses.replace(shard, sequence_axis=0)), r"e must hold 1 of the 4 tokens"),
        (dict(vocab_parallel=dataclasses.replace(shard, sequence_axis=1)), r"sequence_axis=1 must be an axis"),
        (dict(vocab_parallel_options=shard), "give one of them"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_cross_entropy(**{**dict(e=e, c=c, targets=t, vocab_parallel=shard), **given})
    for given, message in (
        (dict(vocab_parallel=3), r"must be a cce_torch.VocabParallel, got int"),
        (dict(vocab_parallel=None, vocab_parallel_options=3), r"VocabParallelOptions, got int"),
    ):
        with pytest.raises(TypeError, match=message):
            call(**given)
    for rows in ((5 * rank, 5 * rank + 6), (5 * rank + 1, 5 * rank + 5), (6 * rank, 6 * rank + 5)):
        with pytest.raises(ValueError, match=r"must follow one another from 0 on, each held once, got \["):
            VocabParallel(None, *rows)
    for rows, message in (((5, 4), "0 <= start <= stop"), ((0, 5, True, 4), "at most vocabulary=4")):
        with pytest.raises(ValueError, match=message):
            VocabParallel(None, *rows)
    losses = linear_cross_entropy(e.requires_grad_(), c, t, vocab_parallel=shard, reduction="none")
    with pytest.raises(NotImplementedError, match="is_grads_batched=True does not work where processes share"):
        torch.autograd.grad(losses, e, torch.ones(2, *losses.shape), is_grads_batched=True)


# DTensors.


def assert_dtensors(case: Case, mesh, placements: dict[str, list], impl: str, **more) -> None:
    """The loss of distributed inputs and its gradients against one process, and the placements of the gradients."""
    from torch.distributed.tensor import distribute_tensor

    what = f"{case}, {impl}, {placements}, {more}"
    given = inputs(case)
    whole = {"e": given.e, "c": given.c, "targets": given.targets, **given.optional}
    leaves = {}
    for name, x in whole.items():
        x = tensor(x).long() if name == "targets" else tensor(x)
        leaves[name] = distribute_tensor(x, mesh, placements[name]) if name in placements else x
        leaves[name].requires_grad_(name in given.differentiable())
    loss, lse = linear_cross_entropy(**leaves, impl=impl, **{**case.options, **more, "return_lse": True})
    objective = (loss.full_tensor() * tensor(given.of_loss)).sum()
    if case.options.get("return_lse"):
        objective = objective + (lse.full_tensor() * tensor(given.of_lse)).sum()
    names = list(given.differentiable())
    gradients = dict(zip(names, torch.autograd.grad(objective, [leaves[k] for k in names]), strict=True))
    true_loss, true_lse, true_gradients = truth(given, case.options)
    reference_loss, reference_lse, reference = run(given, case.options, "reference")
    assert_close(array(loss.full_tensor()), true_loss, reference_loss, f"{what}: loss")
    assert_close(array(lse.full_tensor()), true_lse, reference_lse, f"{what}: lse")
    for name, x in gradients.items():
        if name in placements:
            assert x.placements == leaves[name].placements, f"{what}: d{name} has placements {x.placements}"
            x = x.full_tensor()
        assert_close(array(x), true_gradients[name], reference[name], f"{what}: d{name}")


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
        assert_dtensors(
            case, mesh, placements, "chunked" if draw % 5 == 4 else IMPLS[draw % 2], gradient_tolerance=draw / 20
        )


# Tensor parallelism of the head.


def check_tensor_parallel() -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
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
        return array(loss), {k: array(p.grad) for k, p in whole.named_parameters() if p.grad is not None}, array(logits)

    for options in ({}, {"bias": False}, {"frozen": True}, {"tied": True}):
        truth_, reference = (one_process(dtype, options) for dtype in (torch.float64, torch.float32))
        split = model(head, **options)
        if options.get("tied"):
            split = parallelize_module(split, mesh, {"embedding": RowwiseParallel(input_layouts=Replicate())})
            split.head.weight = split.embedding.weight
        split = parallelize_module(split, mesh, {"head": VocabParallelStyle()})
        assert split.head.weight.placements == (Shard(0),)
        loss = split(tokens, targets)
        assert not loss._is_view()
        loss.backward()
        assert_same_everywhere(loss, "loss")
        assert_close(array(loss), truth_[0], reference[0], f"{options}: loss")
        found = whole_gradients(split)
        assert found.keys() == truth_[1].keys()
        for name, x in found.items():
            assert_close(array(x), truth_[1][name], reference[1][name], f"{options}: {name}")
        part = split.head(split.hidden(tokens))
        assert_close(
            array(DTensor.from_local(part, mesh, [Shard(1)], shape=(N, V), stride=(V, 1)).full_tensor()),
            truth_[2],
            reference[2],
            "logits",
        )

    split = parallelize_module(model(head), mesh, {"head": VocabParallelStyle()})
    loss = torch.compile(split, backend="aot_eager")(tokens, targets)  # breaks the graph at the head
    torch.testing.assert_close(loss, split(tokens, targets), rtol=1e-6, atol=0)

    for tokens in (11, 4, 1):  # the last process has fewer, or none
        h, t = torch.randn(tokens, D, generator=torch.Generator().manual_seed(2)), targets[:tokens]
        whole, split = model(head), model(head)
        split = parallelize_module(split, mesh, {"head": VocabParallelStyle(input_layouts=Shard(0))})
        leaves = h.clone().requires_grad_(), DTensor.to_local(distribute_tensor(h, mesh, [Shard(0)])).requires_grad_()
        expected_, loss = whole.head(leaves[0], t), split.head(leaves[1], t)
        expected_.backward()
        loss.backward()
        pairs = [(loss, expected_), (leaves[1].grad, distribute_tensor(leaves[0].grad, mesh, [Shard(0)]).to_local())]
        parameters = zip(split.head.parameters(), whole.head.parameters(), strict=True)
        pairs += [(p.grad.full_tensor(), q.grad) for p, q in parameters]
        for actual, exact in pairs:
            torch.testing.assert_close(actual, exact, rtol=1e-5, atol=1e-6)


def check_parts_of_a_sequence() -> None:
    """Sequence parallelism of T tokens of (B, T, D) that the processes do not divide: the loss, the logits."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import parallelize_module

    from cce_torch import VocabParallelStyle

    mesh = init_device_mesh("cpu", (2,))
    head = functools.partial(LinearCrossEntropyHead, impl="torch_compile", class_weight=torch.arange(1.0, V + 1))
    generator = torch.Generator().manual_seed(4)
    for length in (5, 4, 1):
        h, targets = torch.randn(2, length, D, generator=generator), torch.randint(V, (2, length), generator=generator)
        whole = model(head).head
        style = VocabParallelStyle(input_layouts=Shard(1), output_layouts=Replicate())
        split = parallelize_module(model(head), mesh, {"head": style}).head
        weights = torch.randn(2, length, V, generator=generator)
        of_whole, of_part = h.clone().requires_grad_(), distribute_tensor(h, mesh, [Shard(1)]).to_local()
        of_part.requires_grad_()
        for given in ((), (targets,)):
            exact, found = whole(of_whole, *given), split(of_part, *given)
            torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)
            (of_h,) = torch.autograd.grad((exact * (weights if not given else 1)).sum(), of_whole)
            (part,) = torch.autograd.grad((found * (weights if not given else 1)).sum(), of_part)
            expected_ = distribute_tensor(of_h, mesh, [Shard(1)]).to_local()
            torch.testing.assert_close(part, expected_, rtol=1e-5, atol=1e-6)
    with pytest.raises(
        ValueError, match=r"axis 1 .*parts of torch.chunk, of sizes \[3, 2\], got parts of sizes \[2, 3\]"
    ):
        split(torch.randn(2, 2 + dist.get_rank(), D))


def check_fsdp_with_tensor_parallel() -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    from cce_torch import VocabParallelStyle

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for how, impl in zip(("in the root", "by itself", "with the norm"), IMPLS, strict=True):
        made = model(functools.partial(LinearCrossEntropyHead, impl=impl))
        made = parallelize_module(made, mesh["tensor"], {"head": VocabParallelStyle()})
        wrapped = fsdp2(made, how, mesh["data"])
        step(wrapped, mesh.get_group("data"))
        assert_gradients(whole_gradients(wrapped), f"FSDP2 {how} with tensor parallelism", processes=2)
        with pytest.raises(TypeError, match=r"forward of the module that FSDP wraps"):
            linear_cross_entropy(torch.rand(2, D), made.head.weight, torch.arange(2), impl=impl)


def check_gpus() -> None:
    """The kernels on GPUs: right, and the same bits again."""
    arrays = ("bias", "class_weight", "token_weight")
    cases = [
        Case("plain", (1000,), 256, 9001),
        Case("softcap", (777,), 192, 5000, options={"softcap": 10.0}),
        Case("everything", (4, 300), 128, 7000, arrays, options={"label_smoothing": 0.1, "z_loss": 0.01, "shift": 1}),
    ]
    count = dist.get_world_size()
    for case in cases:
        for dtype, budgets in (("bfloat16", (2**20, "all")), ("float32", (300 * 2**20,))):
            given = inputs(case, dtype)
            exact = truth(given, case.options)
            reference = run(given, case.options, "reference")
            equal = tuple(case.vocabulary * (i + 1) // count for i in range(count))
            for stops in (equal, (100, *[case.vocabulary] * (count - 1)))[: len(budgets)]:
                for budget in budgets:
                    what = f"{case}, {dtype}, {stops}, {budget}"
                    found, again = (
                        run_split(given, case.options, stops, "auto", "cuda", memory_budget=budget) for _ in range(2)
                    )
                    for x, y in zip((*found[:2], *found[2].values()), (*again[:2], *again[2].values()), strict=True):
                        assert np.array_equal(x, y), f"{what}: other bits"
                    assert_close(found[0], exact[0], reference[0], f"{what}: loss")
                    assert_close(found[1], exact[1], reference[1], f"{what}: lse")
                    for name, x in found[2].items():
                        assert_close(x, exact[2][name], reference[2][name], f"{what}: d{name}")


def check_errors_of_dtensors() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, other = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    e, c, t = torch.rand(6, 8), torch.rand(11, 8), torch.arange(6)

    def placed(x: torch.Tensor, *placements: Any) -> torch.Tensor:
        return distribute_tensor(x, mesh if len(placements) == 1 else other, list(placements))

    split_c, split_e, whole_e = placed(c, Shard(0)), placed(e, Shard(0)), placed(e, Replicate())
    for given, message in (
        (dict(e=e, c=split_c), r"^e is a plain tensor and c a DTensor.*module that FSDP wraps.*VocabParallelStyle"),
        (dict(e=split_e, c=c), r"^c is a plain tensor and e a DTensor.*DTensor.from_local\(c, e.device_mesh"),
        (dict(e=split_e, c=placed(c, Replicate())), r"^targets is a plain tensor, and e is split.*distribute_tensor"),
        (dict(e=whole_e, c=split_c, bias=c[:, 0]), r"^bias is a plain tensor, and c is split"),
        (dict(e=whole_e, c=split_c, vocab_parallel=3), r"^vocab_parallel is for plain tensors, and e, c is a DTensor"),
    ):
        with pytest.raises(TypeError, match=message):
            linear_cross_entropy(**{"targets": t, **given})
    with pytest.raises(ValueError, match=r"^all DTensors must be on one mesh"):
        linear_cross_entropy(whole_e, placed(c, Shard(0), Replicate()), t)
    with pytest.raises(ValueError, match=r"^shift=1 needs targets of the next process"):
        linear_cross_entropy(split_e, placed(c, Replicate()), placed(t, Shard(0)), shift=1)
    wrong = t.clone()
    wrong[0] = c.shape[0]  # which one process has: all raise, and none waits for the others
    with pytest.raises(ValueError, match=r"targets\[0\]"):
        linear_cross_entropy(split_e, placed(c, Replicate()), placed(wrong, Shard(0)), check_targets=True)
    with pytest.raises(TypeError, match="c must be a DTensor, got Tensor"):
        VocabParallel.from_dtensor(c)
    with pytest.raises(ValueError, match="by one axis of its mesh and replicated over the others"):
        VocabParallel.from_dtensor(placed(c, Shard(0), Shard(0)))
    for of in (placed(c, Shard(0)), placed(c[:5], Shard(0)), placed(c, Replicate(), Shard(0))):
        made = VocabParallel.from_dtensor(of)
        assert made.vocabulary == of.shape[0]
        assert torch.equal(of.to_local(), c[: of.shape[0]][made.start : made.stop])


def test_two_processes():
    in_processes(
        2,
        check_data_parallel,
        check_mixed_precision_checkpoints_and_compile,
        check_tensor_parallel,
        check_parts_of_a_sequence,
        check_options_of_split,
        check_freed_programs,
        check_accumulated_rows,
        check_dropped_strides,
    )


def test_four_processes():
    in_processes(
        4,
        check_hybrid,
        check_fsdp_with_tensor_parallel,
        check_gradients_of_split_e,
        check_collectives,
        check_errors_of_split,
        check_dtensors,
        check_errors_of_dtensors,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 4])
def test_vocab_parallel_on_gpus(count):
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    in_processes(count, check_gpus, gpus=True)

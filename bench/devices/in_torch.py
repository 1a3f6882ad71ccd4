"""cce_torch and torch's loss_parallel on one GPU of a group of processes: `python -m bench.devices` starts one a GPU.

The first process prints a row a line. A time is that of the slowest process.
"""

import json
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bench import memory
from bench.calls import Call, wait_for_torch
from bench.data import Shape, trained
from bench.devices.layouts import BUDGETS, LAYOUTS, MATMULS, collectives
from bench.measure import HEATING, WARM

ROUNDS = 10
Step = Callable[[], Tensor]


def milliseconds(call: Callable[[], object]) -> float:
    """The median of the slowest process' times, on GPUs as hot as such calls make them."""

    def slowest(count: int) -> Tensor:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = torch.zeros(count, device="cuda")
        for i in range(count):
            dist.barrier()
            torch.cuda.synchronize()
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times[i] = start.elapsed_time(end)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return times

    slowest(math.ceil(1e3 * HEATING / float(slowest(WARM)[1:].mean())))
    return float(slowest(ROUNDS).median())


def bare(layout: str, e: Tensor, c: Tensor, gpus: int) -> dict[str, float]:
    """e, c: a device's share. Milliseconds of each matmul and each collective of the layout."""
    z = e @ c.T
    wide, part = e.float(), c[: len(c) // gpus].contiguous()
    runs = {
        "z": lambda: torch.mm(e, c.T, out=z),
        "de": lambda: z @ c,
        "dc": lambda: z.T @ e,
        "all-reduce of dc": lambda: dist.all_reduce(c),
        "all-reduce of de in float32": lambda: dist.all_reduce(wide),
        "all-gather of c": lambda: dist.all_gather_into_tensor(c, part),
        "reduce-scatter of dc": lambda: dist.reduce_scatter_tensor(part, c),
    }
    return {name: milliseconds(runs[name]) for name in (*MATMULS, *sorted(set(collectives(layout, gpus))))}


def steps(layout: str, e: Tensor, c: Tensor, targets: Tensor, shape: Shape, gpus: int) -> dict[str, Step]:
    """The training step's share of each method. e, c, targets: a device's share."""
    from cce_torch import LinearCrossEntropyHead, VocabParallel, linear_cross_entropy

    e, c = e.requires_grad_(), torch.nn.Parameter(c)
    head = LinearCrossEntropyHead(*c.T.shape, bias=False, device="meta")
    shard = None
    if layout == "vocabulary" and gpus > 1:
        rank = dist.get_rank()
        shard = VocabParallel(None, rank * len(c), (rank + 1) * len(c))
    if layout == "fsdp":
        from torch.distributed.fsdp import fully_shard

        head.weight = c
        fully_shard(head, reshard_after_forward=True)

    def done(loss: Tensor) -> Tensor:
        loss.backward()
        if layout == "tokens" and gpus > 1:
            assert c.grad is not None
            dist.all_reduce(c.grad)
        e.grad = c.grad = None
        head.zero_grad()
        return loss

    def ours(name: str) -> Step:
        options = BUDGETS[name]

        def step() -> Tensor:
            if layout == "fsdp":
                head.loss.options |= options
                return done(head(e, targets, num_items=shape.tokens / gpus))  # FSDP takes the mean over processes
            return done(linear_cross_entropy(e, c, targets, num_items=shape.tokens, vocab_parallel=shard, **options))

        return step

    found = {name: ours(name) for name in BUDGETS}
    if shard is None:
        return found
    return found | {"loss_parallel of torch": _loss_parallel(e, c, targets)}


def _loss_parallel(e: Tensor, c: Tensor, targets: Tensor) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))

    def step() -> Tensor:
        whole = DTensor.from_local(e, mesh, [Replicate()], run_check=False)
        rows = DTensor.from_local(c, mesh, [Shard(0)], run_check=False)
        with loss_parallel():
            loss: Any = F.cross_entropy((whole @ rows.T).float(), targets)
            loss.backward()
        e.grad = c.grad = None
        return loss.to_local()

    return step


def main() -> None:
    shape = Shape(*map(int, sys.argv[1].split("x")))
    rank, gpus = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    e, c, targets = (torch.from_dlpack(x).clone() for x in trained(shape))

    def say(row: dict[str, Any]) -> None:
        if rank == 0:
            print("row", json.dumps(row), flush=True)

    def part(x: Tensor) -> Tensor:
        return x.chunk(gpus)[rank].clone()

    for layout in LAYOUTS if gpus > 1 else ("tokens",):
        split = layout == "vocabulary"
        own = (e.clone(), part(c), targets.long()) if split else (part(e), c.clone(), part(targets).long())
        row = {"package": "cce_torch", "gpus": gpus, "layout": layout, "shape": list(shape)}
        say(row | {"method": "bare", **bare(layout, own[0], own[1].clone(), gpus)})
        for name, step in steps(layout, *own, shape, gpus).items():
            loss = step().detach().float()
            if not split and gpus > 1:
                dist.all_reduce(loss)
                loss = loss / (gpus if layout == "fsdp" else 1)
            call = Call(step, wait_for_torch)
            held = (memory.of_torch(call) or 0) + (memory.of_jax(call) or 0)
            found = {"ms": milliseconds(step), "held_mb": held, "loss": float(loss)}
            say(row | {"method": name, **found})
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What calling the kernels from PyTorch costs: `python -m bench.bridge`, on an NVIDIA GPU.

Prints and writes as JSON: the time of forward and backward beside that of the same call from JAX, in one run; the peak
memory of both frameworks' pools and what JAX's keeps afterwards; the host's time for a call with a tiny problem; and
how long a call takes to return when the GPU is busy.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from bench.calls import Call, compiled, wait_for_torch
from bench.data import SHAPES, Shape, trained
from bench.losses_jax import full_logits, ours
from bench.measure import in_turns
from bench.report import environment
from cce_torch import bridge, linear_cross_entropy

MIB = 2**20
TINY = Shape(64, 64, 512)
Calls = dict[str, tuple[Callable[..., Any], Callable[[], tuple]]]
SLEEP_CYCLES = 2 * 10**9  # about a second


def tensors(shape: Shape) -> tuple[tuple[jax.Array, ...], tuple[torch.Tensor, ...]]:
    e, c, targets = arrays = trained(shape)
    leaves = [torch.from_dlpack(x).clone().requires_grad_() for x in (e, c)]
    return arrays, (*leaves, torch.from_dlpack(targets).long())


def gradients(e: torch.Tensor, c: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(linear_cross_entropy(e, c, targets), (e, c))


def speed(shape: Shape, rounds: int) -> dict[str, float]:
    """Medians of JAX's and torch's calls."""
    arrays, leaves = tensors(shape)
    call = compiled(jax.value_and_grad(ours("auto"), (0, 1)), *arrays)
    assert call.scratch is not None
    assert call.output is not None
    runs = {
        "jax_ms": call,
        "torch_ms": Call(lambda: gradients(*leaves), wait_for_torch),
        "jax_full_logits_ms": compiled(jax.value_and_grad(full_logits, (0, 1)), *arrays),
    }
    medians = in_turns(runs, rounds)
    return {**medians, "ratio": medians["torch_ms"] / medians["jax_ms"], "jax_scratch_mib": call.scratch / MIB,
            "jax_peak_mib": (call.scratch + call.output) / MIB}  # fmt: skip


def memory(shape: Shape) -> dict[str, float]:
    """Peaks of both pools during a call, beyond the inputs; run before anything else has filled JAX's pool."""
    generator = torch.Generator("cuda").manual_seed(0)
    e = torch.randn(shape.tokens, shape.width, device="cuda", generator=generator).to(torch.bfloat16).requires_grad_()
    c = torch.randn(shape.vocabulary, shape.width, device="cuda", generator=generator).to(torch.bfloat16)
    c.requires_grad_()
    targets = torch.randint(shape.vocabulary, (shape.tokens,), device="cuda", generator=generator)
    before = torch.cuda.memory_allocated()  # the inputs: whatever a first call leaves behind counts
    gradients(e, c, targets)  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    gradients(e, c, targets)
    torch.cuda.synchronize()
    torch_peak = torch.cuda.max_memory_allocated() - before
    stats = bridge.gpu(0).memory_stats()
    return {
        "torch_peak_mib": torch_peak / MIB,
        "jax_largest_allocation_mib": stats["largest_alloc_size"] / MIB,
        "jax_peak_with_compilation_mib": stats["peak_bytes_in_use"] / MIB,
        "jax_pool_held_mib": stats.get("pool_bytes", 0) / MIB,
        "jax_in_use_after_mib": stats["bytes_in_use"] / MIB,
    }


def host_microseconds(calls: Calls, rounds: int = 300) -> dict[str, dict[str, float]]:
    """Host time of each call until it returns, on an idle GPU: median, and what the fastest tenth took at most.

    A call comes with what makes its arguments. They take turns, as hosts are slow and fast for seconds at a time; each
    then finds the caches full of the others.
    """
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (call, arguments) in calls.items():
            given = arguments()
            torch.cuda.synchronize()
            start = time.perf_counter()
            call(*given)
            spent[name].append((time.perf_counter() - start) * 1e6)
    return {
        name: {"median": float(np.median(x)), "fastest_tenth": float(np.quantile(x, 0.1))} for name, x in spent.items()
    }


class Bare(torch.autograd.Function):
    """Whose backward pass runs a compiled JAX program on arrays that JAX has, and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, program: Callable[[], Any]) -> torch.Tensor:  # type: ignore[override]
        ctx.program = program
        return x.sum()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.program()
        return torch.empty(1, device="cuda"), None


def host() -> dict[str, dict[str, dict[str, float]]]:
    """Of calls with a tiny problem that take turns, and of each in a loop of its own."""
    arrays, (e, c, targets) = tensors(TINY)
    loss_program, program = jax.jit(ours("auto")), jax.jit(jax.grad(ours("auto"), (0, 1)))
    leaf = torch.ones(1, device="cuda", requires_grad=True)

    def eager() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(e @ c.T, targets)

    def forward() -> torch.Tensor:
        return linear_cross_entropy(e, c, targets)

    def backward(loss: torch.Tensor) -> None:
        torch.autograd.grad(loss, (e, c))

    def bare(run: Callable[[], Any]) -> tuple[Callable[..., Any], Callable[[], tuple]]:
        """After a forward call of ours, like a backward call of ours: how long autograd's thread sleeps matters."""
        return lambda loss: torch.autograd.grad(loss, leaf), lambda: (Bare.apply(leaf, run), forward())[:1]

    calls: Calls = {
        "empty_backward_us": bare(lambda: None),
        "bare_program_backward_us": bare(lambda: program(*arrays)),
        "bare_program_forward_us": (lambda: loss_program(*arrays), tuple),
        "forward_us": (forward, tuple),
        "backward_us": (backward, lambda: (forward(),)),
        "eager_full_logits_forward_us": (eager, tuple),
        "eager_full_logits_backward_us": (backward, lambda: (eager(),)),
    }  # fmt: skip
    alone = {name: host_microseconds({name: call})[name] for name, call in calls.items()}
    return {"in_turns": host_microseconds(calls), "alone": alone}


def busy(shape: Shape, rounds: int = 5) -> dict[str, float]:
    """How long a call takes to return with a second of other work queued before it: medians."""
    _, leaves = tensors(shape)
    gradients(*leaves)
    returned, finished = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.cuda._sleep(SLEEP_CYCLES)
        gradients(*leaves)
        returned.append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize()
        finished.append((time.perf_counter() - start) * 1e3)
    return {"returned_after_ms": float(np.median(returned)), "finished_after_ms": float(np.median(finished))}


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.bridge", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("out/bridge.json"))
    asked = parser.parse_args()
    shape = SHAPES["gemma2-2b"]
    figures = {"shape": list(shape), "memory": memory(shape), "host": host(), "busy": busy(shape)}
    figures["speed"] = speed(shape, asked.rounds)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**environment(), "torch": torch.__version__, **figures}, indent=1)
    asked.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()

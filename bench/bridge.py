"""What calling the kernels from PyTorch costs: `python -m bench.bridge`, on an NVIDIA GPU. Prints and writes JSON.

host     microseconds of the host for a small call, each in a loop of its own; the same of PyTorch's own loss
memory   the peaks of both frameworks' pools in a call, and what JAX's keeps afterwards
busy     milliseconds until a call returns, and until it is done, with a second of other work queued before it
speed    milliseconds of the same call from JAX and from PyTorch, in turns
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import torch
from torch import Tensor

from bench import report
from bench.calls import Call, compiled, tensors, wait_for_torch
from bench.data import SHAPES, Shape, trained
from bench.losses import ours
from bench.measure import in_turns
from bench.torch_losses import full_logits
from cce_torch import linear_cross_entropy
from cce_torch.on_jax import jax_devices

MIB = 2**20
TINY, SHAPE = Shape(64, 64, 512), SHAPES["gemma2-2b"]
SLEEP_CYCLES = 2 * 10**9  # about a second


def leaves(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    e, c, targets = tensors(*trained(shape))
    return e.clone().requires_grad_(), c.clone().requires_grad_(), targets.long()


def gradients(e: Tensor, c: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(linear_cross_entropy(e, c, targets), (e, c))


def host() -> dict[str, float]:
    """Medians of the time until a call returns, on an idle GPU."""
    e, c, targets = leaves(TINY)

    def microseconds(loss: Callable[[Tensor, Tensor, Tensor], Tensor], backward: bool, calls: int = 300) -> float:
        given = (e, c) if backward else (e.detach(), c.detach())
        times = []
        for _ in range(calls):
            torch.cuda.synchronize()
            start = time.perf_counter()
            value = loss(*given, targets)
            if backward:
                value.backward()
            times.append(time.perf_counter() - start)
            e.grad = c.grad = None
        return float(np.median(times[calls // 6 :])) * 1e6

    return {
        f"{name}_{'forward_and_backward' if backward else 'forward'}_us": microseconds(loss, backward)
        for name, loss in (("cce_torch", linear_cross_entropy), ("full_logits", full_logits))
        for backward in (False, True)
    }


def memory() -> dict[str, float]:
    """Peaks during a call, beyond the inputs; before anything else but a tiny call has filled JAX's pool."""
    generator = torch.Generator("cuda").manual_seed(0)
    e = torch.randn(SHAPE.tokens, SHAPE.width, device="cuda", generator=generator).to(torch.bfloat16).requires_grad_()
    c = torch.randn(SHAPE.vocabulary, SHAPE.width, device="cuda", generator=generator).to(torch.bfloat16)
    targets = torch.randint(SHAPE.vocabulary, (SHAPE.tokens,), device="cuda", generator=generator)
    before = torch.cuda.memory_allocated()  # the inputs: whatever a first call leaves behind counts
    for _ in range(2):  # the first compiles
        torch.cuda.reset_peak_memory_stats()
        gradients(e, c.requires_grad_(), targets)
        torch.cuda.synchronize()
    stats = jax_devices.gpu(0).memory_stats()
    return {
        "torch_peak_mib": (torch.cuda.max_memory_allocated() - before) / MIB,
        "jax_largest_allocation_mib": stats["largest_alloc_size"] / MIB,
        "jax_pool_held_mib": stats.get("pool_bytes", 0) / MIB,
        "jax_in_use_after_mib": stats["bytes_in_use"] / MIB,
    }


def busy(rounds: int = 5) -> dict[str, float]:
    given = leaves(SHAPE)
    gradients(*given)
    returned, finished = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.cuda._sleep(SLEEP_CYCLES)
        gradients(*given)
        returned.append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize()
        finished.append((time.perf_counter() - start) * 1e3)
    return {"returned_after_ms": float(np.median(returned)), "finished_after_ms": float(np.median(finished))}


def speed(rounds: int = 10) -> dict[str, float]:
    arrays, given = trained(SHAPE), leaves(SHAPE)
    from_jax = compiled(jax.value_and_grad(ours(), (0, 1)), *arrays)
    found = in_turns({"jax_ms": from_jax, "torch_ms": Call(lambda: gradients(*given), wait_for_torch)}, rounds)
    return {**found, "ratio": found["torch_ms"] / found["jax_ms"], "jax_scratch_mib": (from_jax.scratch or 0) / MIB}


PARTS = {part.__name__: part for part in (host, memory, busy, speed)}


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.bridge", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("out/bridge.json"))
    asked = parser.parse_args()
    jax_devices.start()  # before JAX's backend, which would leave PyTorch too little memory
    found: dict[str, dict[str, float]] = {}
    for part in asked.only:
        found[part] = PARTS[part]()
        print(part, json.dumps(found[part], indent=1), flush=True)
        report.write(asked.out, tiny=list(TINY), shape=list(SHAPE), **found)


if __name__ == "__main__":
    main()

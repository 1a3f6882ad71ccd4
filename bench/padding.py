"""What numbers of tokens that change at each step cost in PyTorch, as in TRL: `python -m bench.padding`. Writes JSON.

Programs are compiled for padded numbers of tokens. Padding is ignored tokens, which the kernels leave out. Reported for
log-probabilities with an entropy, without and with gradients: the time of a token at numbers drawn between half of the
largest and the largest, over that at the largest; how many sizes these calls share; the seconds of each first call.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench import report
from bench.calls import Call, tensors, wait_for_torch
from bench.data import Shape, trained
from bench.measure import in_turns
from cce_torch import linear_log_probs
from cce_torch.on_jax.kinds import Sizes

SHAPE, DRAWN = Shape(8192, 4096, 131072), 12


def forward(e: Tensor, c: Tensor, targets: Tensor) -> Tensor:
    with torch.no_grad():
        found = linear_log_probs(e, c, targets, entropy=True)
    assert found.log_probs is not None
    return found.log_probs


def step(e: Tensor, c: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    found = linear_log_probs(e, c, targets, entropy=True)
    assert found.log_probs is not None
    assert found.entropy is not None
    return torch.autograd.grad((found.log_probs + 0.01 * found.entropy).sum(), (e, c))


def measured(call: Callable[..., object], shape: Shape, numbers: list[int], rounds: int) -> report.Row:
    e, c, targets = tensors(*trained(shape))
    c = c.clone().requires_grad_()
    given = {n: (e[:n].clone().requires_grad_(), c, targets[:n].long()) for n in numbers}
    first, calls = [], {}
    for n, arrays in given.items():
        begin = time.perf_counter()
        wait_for_torch(call(*arrays))
        first.append(time.perf_counter() - begin)
        calls[str(n)] = Call(lambda arrays=arrays: call(*arrays), wait_for_torch)
    found = {int(n): milliseconds for n, milliseconds in in_turns(calls, rounds).items()}
    chosen = Sizes()  # as the kernels' programs choose them
    sizes = [chosen(n) for n in numbers]
    of_token = [found[n] / n / (found[shape.tokens] / shape.tokens) for n in numbers[1:]]
    return {
        "call": call.__name__,
        "sizes": len(set(sizes)),
        "padding": float(np.mean([size / n for size, n in zip(sizes[1:], numbers[1:], strict=True)])),
        "of_token": float(np.mean(of_token)),
        "of_token_most": max(of_token),
        "first_calls_s": sorted(round(x, 2) for x in first),
        "runtime_ms": {str(n): found[n] for n in numbers},
    }


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.padding", description=__doc__)
    parser.add_argument("--shape", type=Shape.parse, default=SHAPE)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out/padding.json"))
    asked = parser.parse_args()
    most = asked.shape.tokens
    drawn = np.random.default_rng(0).integers(most // 2, most, DRAWN)
    numbers = [most, *sorted({int(n) for n in drawn} - {most})]
    rows = [measured(call, asked.shape, numbers, asked.rounds) for call in (forward, step)]
    report.write(asked.out, rows=rows)
    columns = {"call": "", "sizes": "", "padding": ".3f", "of_token": ".3f", "of_token_most": ".3f"}
    print(report.table(rows, **columns), flush=True)


if __name__ == "__main__":
    main()

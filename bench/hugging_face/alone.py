"""Training steps of one method, in this process: `python -m bench.hugging_face` starts it. Prints a row.

A step is the forward pass, the backward pass, and AdamW, on a batch of its own.
"""

import argparse
import json
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, set_seed

from bench import memory
from bench.calls import Call
from bench.fitting import Memory, searched
from bench.hugging_face.methods import LLAMA, METHODS, OURS, TINY, Size

GIB = 2**30
MOST = 16  # times the usual batch: the largest batch is not sought beyond it


def new_model(size: Size, device: str) -> Any:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=size.context,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
    return model


def batches(size: Size) -> Tensor:
    """(steps, batch, context): token k is drawn with a probability proportional to 1 / (k + 1)."""
    cumulative = np.cumsum(1 / np.arange(1, size.vocabulary + 1))
    drawn = np.random.default_rng(0).uniform(0, cumulative[-1], (size.warm + size.steps, size.batch, size.context))
    return torch.from_numpy(np.searchsorted(cumulative, drawn))


def measure(method: str, size: Size, device: str) -> dict[str, Any]:
    model, on_gpu = new_model(size, device), device == "cuda"
    METHODS[method](model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def step(tokens: Tensor) -> Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    given, losses, times = batches(size).to(device), [], []
    for i, tokens in enumerate(given):
        if on_gpu and i == size.warm:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = step(tokens)
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        losses.append(float(loss))
    seconds = float(np.median(times[size.warm :]))
    row = {"method": method, "ms": 1e3 * seconds, "tokens_per_second": size.batch * size.context / seconds}
    row |= {"first_loss": losses[0], "last_loss": losses[-1]}
    if on_gpu:
        again = Call(partial(step, given[-1]), lambda _: torch.cuda.synchronize())
        row |= held(again, with_jax=method in OURS)
    return row


def largest(method: str, size: Size, device: str, limit_gib: float) -> dict[str, Any]:
    """The most sequences of a step with AdamW, forward and backward, whose peak in both pools is within the limit."""
    model, tried = new_model(size, device), {}
    METHODS[method](model)
    optimizer, kept, most = torch.optim.AdamW(model.parameters(), 1e-4, fused=True), Memory(), MOST * size.batch

    def run(sequences: int, steps: int) -> float:
        """Seconds of so many steps."""
        tokens = batches(size._replace(batch=sequences, warm=0, steps=1)).to(device)[0]
        since = time.perf_counter()
        for _ in range(steps):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - since

    def fits(sequences: int) -> bool:
        optimizer.zero_grad()
        memory.release()
        kept.restart()
        try:
            run(sequences, 2)  # the first step makes the optimizer's state
        except RuntimeError as error:
            if "out of memory" not in str(error).lower():
                raise
            tried[sequences] = None
            return False
        tried[sequences] = kept.gib()
        return not (tried[sequences] or 0) > limit_gib

    found = searched(fits, tried, limit_gib, most, first=size.batch, finest=1)
    row = {"method": method, "limit_gib": limit_gib, "optimizer": "AdamW", "sequences": found, "tried_gib": tried}
    if found:
        optimizer.zero_grad()
        memory.release()
        run(found, size.warm)
        row["tokens_per_second"] = size.steps * found * size.context / run(found, size.steps)
    return row


def held(step: Call, with_jax: bool) -> dict[str, float]:
    """GiB: the peak of the steps before in PyTorch's pool, that of a step in JAX's, and what the pools have reserved.

    `peak_gib` is the sum of the two peaks. If they come at different times, less is in use at once.
    """
    of_torch, of_jax, reserved = torch.cuda.max_memory_allocated(), 0.0, torch.cuda.max_memory_reserved()
    if with_jax:
        import jax

        reserved += (jax.devices()[0].memory_stats() or {}).get("pool_bytes", 0)
        of_jax = (memory.of_jax(step) or 0) * memory.MIB
    sizes = {"peak": of_torch + of_jax, "torch": of_torch, "jax": of_jax, "reserved": reserved}
    return {f"{name}_gib": size / GIB for name, size in sizes.items()}


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.hugging_face.alone", description=__doc__)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--largest", type=float, metavar="GIB")
    asked = parser.parse_args()
    size, device = (TINY, "cpu") if asked.tiny else (LLAMA, "cuda")
    try:
        found = largest(asked.method, size, device, asked.largest) if asked.largest else None
        row = found or measure(asked.method, size, device)
    except ImportError as error:
        row = {"method": asked.method, "missing": str(error)}
    print("row", json.dumps(row))


if __name__ == "__main__":
    main()

"""Train a small language model with linear cross-entropy, in JAX and in PyTorch, and with full logits, and compare.

All runs start from the same weights and see the same batches, byte-pair tokens of the Python standard library's
sources. Only the loss differs: `cce_jax.linear_cross_entropy`, or Optax's cross-entropy of the float32 logits
`hidden @ embedding.T`, or, in the same model written in PyTorch, `cce_torch.linear_cross_entropy`.
The script prints a table, draws the curves and exits with an error if they part.

    pip install ".[examples]"              # for a GPU: ".[cuda13,examples]" or ".[cuda12,examples]"
    python examples/compare_losses.py      # about three minutes on two CPU cores; with a GPU it trains a larger model
    python examples/compare_losses.py --mesh data=2,tensor=2      # and once more on four devices, in JAX
    torchrun --nproc-per-node 4 examples/compare_losses.py --mesh data=2,tensor=2      # in PyTorch: on one, and on four

train_lm.py trains a model of your own with the same parts (lm/).
"""

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

# Read when PyTorch is imported. By default its threads wait for work at full speed, on the cores on which JAX computes
# the loss: on two cores, which other work used too, a step then took two to three times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.distributed as dist
from lm import jax_trainer, picture, processes, torch_trainer
from lm.jax_model import full_logits_loss, linear_loss
from lm.settings import Settings
from lm.text import Text, standard_library
from tqdm import trange

from cce_torch import linear_cross_entropy

LEAST_FALL = 1.5  # nats between the first loss and the final one, the mean of the last 10 steps

# With a GPU, and without one.
LARGE = Settings(768, 8, 1024, 32768, batch=16, steps=300, learning_rate=6e-4, dtype="bfloat16")
SMALL = Settings(128, 2, 128, 16384, batch=16, steps=120, learning_rate=2e-3)
TEXT_BYTES = {LARGE: 32_000_000, SMALL: 4_000_000}
# Nats by which a curve may differ from that of full logits at any step. All losses are exact up to rounding, so the
# curves part only as far as training amplifies rounding. Measured at SMALL's width and depth: 2e-6, two units in the
# last place of the loss, with no growth over 1200 steps; at a learning rate of 3e-3, which is less stable, 2e-4 over
# 120 steps and 9e-4 over 1200. In bfloat16: 4e-4 over 300 steps at LARGE's learning rate, 3e-2 at 3e-3. Within a factor
# of 4, that is also how far two runs of the full logits part whose initial weights differ by one unit in the last
# place. PyTorch's SMALL parts by 2.5e-5, mostly because Optax computes Adam's bias correction in float32. LARGE on an
# H200: 5e-3, PyTorch 6e-3. The bounds leave room for larger models and other matmuls, and still show a wrong gradient:
# without the probabilities below 2^-12 the curves part by 0.9 nats within 50 steps.
TOLERANCE = {LARGE: 0.05, SMALL: 1e-3}


def train(trainer: Any, text: Text, name: str) -> tuple[np.ndarray, float]:
    """The loss at each step, and tokens per second without the first step, which compiles."""
    settings, losses, times = trainer.settings, [], []
    for step in (progress := trange(settings.steps, desc=name, unit="step", disable=not processes.is_first())):
        losses.append(float(trainer.step(text.batch(settings, step))))
        times.append(time.perf_counter())
        progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    tokens = (settings.steps - 1) * settings.batch * settings.context
    return np.array(losses), tokens / max(times[-1] - times[0], 1e-9)


def jax_mib(settings: Settings, vocabulary: int) -> float:
    """Memory that the loss and its gradients take besides their inputs and outputs, by XLA's count."""
    hidden = jax.ShapeDtypeStruct((settings.batch, settings.context, settings.width), settings.dtype)
    embedding = jax.ShapeDtypeStruct((vocabulary, settings.width), jnp.float32)
    tokens = jax.ShapeDtypeStruct((settings.batch, settings.context), jnp.int32)
    loss = {"cce": linear_loss, "full": full_logits_loss}[settings.loss]

    def of(hidden: jax.Array, embedding: jax.Array, tokens: jax.Array) -> jax.Array:
        return loss(hidden, embedding, tokens, num_items=settings.targets)

    compiled = jax.jit(jax.value_and_grad(of, (0, 1))).lower(hidden, embedding, tokens).compile()
    memory = compiled.memory_analysis()
    return memory.temp_size_in_bytes / 2**20 if memory else np.nan


def torch_mib(trainer: torch_trainer.Trainer, tokens: np.ndarray) -> float:
    """The same of PyTorch; NaN where it cannot tell.

    The kernels' own memory is XLA's, where PyTorch does not see it: that of the same programs called from JAX is added.
    """
    if trainer.device.type == "cpu":
        return np.nan
    hidden, embedding = (torch.from_numpy(x).cuda() for x in trainer.head_inputs(tokens))
    hidden, embedding = hidden.to(trainer.model.dtype).requires_grad_(), embedding.requires_grad_()
    targets = torch.from_numpy(tokens).to("cuda", torch.int64)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(hidden, embedding, targets, shift=1).backward()
    own = torch.cuda.max_memory_allocated() - before - hidden.nbytes - embedding.nbytes
    return own / 2**20 + jax_mib(trainer.settings, len(embedding))


def first_params(settings: Settings, vocabulary: int) -> Any:
    return jax.device_get(jax_trainer.Trainer(settings, vocabulary).state["params"])


def check(curves: dict[str, np.ndarray], label: str, settings: Settings, steps: int, out: Path) -> None:
    """Draws the curves, and ends the program with an error if they part from that named `label`, or do not fall."""
    reference = curves.pop(label)
    picture.of_comparison(curves, reference, label, out)
    difference, tolerance = np.max([np.abs(curve - reference) for curve in curves.values()]), TOLERANCE[settings]
    print(f"largest difference of the curves: {difference:.1e} nats (bound {tolerance}), see {out}")
    fall = reference[0] - reference[-10:].mean()
    if not difference <= tolerance:  # so that NaN fails too
        sys.exit(f"FAILED: the curves part by {difference:.1e} nats, more than {tolerance}")
    if steps < 50:
        print("fewer than 50 steps: not checked that the loss falls")
    elif not fall >= LEAST_FALL:
        sys.exit(f"FAILED: the loss fell by {fall:.2f} nats, less than {LEAST_FALL}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help=f"optimizer steps of each run ({SMALL.steps}; GPU: {LARGE.steps})")
    parser.add_argument("--out", type=Path, default=Path("out/compare_losses.png"), help="the figure (%(default)s)")
    parser.add_argument("--mesh", metavar="AXES", help="train on several devices too, such as data=2,tensor=2")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the batches (%(default)s)")
    args = parser.parse_args()
    # By default JAX takes three quarters of a GPU's memory at once; PyTorch trains on the same GPU.
    jax.config.update("jax_pjrt_client_create_options", {"preallocate": False})
    group = processes.start(args.mesh)
    chosen = LARGE if jax.default_backend() == "gpu" else SMALL
    settings = replace(chosen, steps=args.steps or chosen.steps, seed=args.seed)
    text = Text.prepare(standard_library(), settings.vocabulary, TEXT_BYTES[chosen])
    params = first_params(settings, text.vocabulary)

    runs, label = {}, "full logits"
    if group is not None:  # in each process that torchrun started: on its own device alone, then on all
        label, mesh = "PyTorch, one device", f"PyTorch, {args.mesh or 'all devices'}"
        for name, over in {label: None, mesh: group}.items():
            trainer = torch_trainer.Trainer(settings, text.vocabulary, over, params)
            runs[name] = *train(trainer, text, name), np.nan
    else:
        full = replace(settings, loss="full")
        trainings = [("linear cross-entropy", settings, None), ("full logits", full, None)]
        trainings += [(f"the same, {args.mesh}", settings, args.mesh)] if args.mesh else []
        for name, of, mesh in trainings:
            trainer = jax_trainer.Trainer(of, text.vocabulary, mesh, params)
            runs[name] = *train(trainer, text, name), np.nan if mesh else jax_mib(of, text.vocabulary)
        trainer, name = torch_trainer.Trainer(settings, text.vocabulary, None, params), "linear cross-entropy, PyTorch"
        runs[name] = *train(trainer, text, name), torch_mib(trainer, text.batch(settings, 0)[0])

    if processes.is_first():
        print(f"{'':30} {'final loss':>12} {'tokens/s':>12} {'loss memory':>15}")
        for name, (curve, speed, mib) in runs.items():
            memory = f"{mib:,.1f} MiB" if np.isfinite(mib) else "–"
            print(f"{name:30} {curve[-10:].mean():12.6f} {speed:12,.0f} {memory:>15}")
        check({name: curve for name, (curve, _, _) in runs.items()}, label, chosen, settings.steps, args.out)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

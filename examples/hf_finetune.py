"""Train a Hugging Face model with and without `cce_patch`, by transformers' Trainer, and compare.

    pip install ".[hf,examples]" accelerate      # for a GPU: ".[cuda13,hf,examples]" or ".[cuda12,hf,examples]"
    python examples/hf_finetune.py               # about two minutes on two CPU cores; a larger model on a GPU

Both runs start from the same weights and see the same batches, tokens of the Python standard library's sources. The
script prints a table, draws the two curves of the loss, and exits with an error if they part. The weights are random,
so that nothing is downloaded: to fine-tune a model, load it with `AutoModelForCausalLM.from_pretrained`.

What to take from it into a training script of your own is one line, `cce_patch(model)`, before the Trainer is made.
The patched model computes the same loss without the logits: while it trains, its output has `logits=None`. Evaluation
and generate() have their logits as before.
"""

import argparse
import gc
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from matplotlib.figure import Figure  # without pyplot it draws with the Agg backend, which needs no display
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from cce_torch.transformers import cce_patch


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    vocabulary: int
    text_bytes: int
    context: int
    batch: int
    steps: int
    learning_rate: float
    tolerance: float  # nats by which the two curves may differ at any step


# Both losses are exact up to rounding, so the curves part only as far as training amplifies rounding. Measured: SMALL's
# part by 7e-6 over 120 steps. At twice the batch, gradients of the hidden states that are 10 % too small part them by
# 2e-2 within 50 steps.
# LARGE multiplies in bfloat16, and the unpatched model rounds its logits to it, so the curves part by more.
SMALL = Size(128, 2, 16384, 4_000_000, 128, 8, steps=120, learning_rate=2e-3, tolerance=1e-3)
LARGE = Size(768, 12, 32768, 32_000_000, 1024, 16, steps=300, learning_rate=6e-4, tolerance=0.05)


def texts(size: Size) -> list[str]:
    root, skipped = Path(sysconfig.get_path("stdlib")), {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    paths = [path for path in sorted(root.rglob("*.py")) if not skipped.intersection(path.relative_to(root).parts)]
    paths = paths[: np.searchsorted(np.cumsum([path.stat().st_size for path in paths]), size.text_bytes)]
    return [path.read_text(encoding="utf-8", errors="ignore") for path in paths]


def new_tokenizer(texts: list[str], size: Size) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    options = {"special_tokens": ["<end>"], "initial_alphabet": ByteLevel.alphabet(), "show_progress": False}
    tokenizer.train_from_iterator(texts, BpeTrainer(vocab_size=size.vocabulary, **options))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def examples(texts: list[str], tokenizer: PreTrainedTokenizerFast, size: Size) -> list[dict[str, torch.Tensor]]:
    """The text in pieces of `context` tokens. Labels are the tokens themselves: the model shifts them."""
    ids = [i for text in tokenizer(texts)["input_ids"] for i in (*text, tokenizer.eos_token_id)]
    pieces = torch.tensor(ids[: len(ids) // size.context * size.context]).view(-1, size.context)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def new_model(vocabulary: int, size: Size) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.width // 64,
        max_position_embeddings=size.context,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config)


class Curve(TrainerCallback):
    """Keeps the loss of each step, and shows it beside a progress bar, where Trainer's own prints a line a step."""

    def __init__(self, steps: int, name: str) -> None:
        self.losses, self.times = [], []
        self.bar = tqdm(total=steps, desc=name, unit="step")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:  # not the summary at the end
            self.losses.append(logs["loss"])
            self.times.append(time.perf_counter())
            self.bar.set_postfix(loss=f"{logs['loss']:.3f}", refresh=False)
            self.bar.update()

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


def train(model: PreTrainedModel, data: list, size: Size, steps: int, seed: int, name: str) -> tuple[np.ndarray, float]:
    """The loss at each step, and tokens per second without the first step, which compiles the kernels."""
    curve = Curve(steps, name)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=size.batch,
            learning_rate=size.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=steps // 10 + 1,
            weight_decay=0.1,
            bf16=torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            seed=seed,
        )
        rows: Any = data  # Trainer takes a list too, which its types do not say
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(curve)
        trainer.train()
    seconds = curve.times[-1] - curve.times[0]
    return np.array(curve.losses), (steps - 1) * size.batch * size.context / max(seconds, 1e-9)


def peak_gib(patched: bool) -> float:
    """The most memory that was in use, in PyTorch's pool and, where the loss ran in it, in JAX's; NaN on a CPU."""
    if not torch.cuda.is_available():
        return np.nan
    of_jax = jax.local_devices()[0].memory_stats()["peak_bytes_in_use"] if patched else 0
    return (torch.cuda.max_memory_allocated() + of_jax) / 2**30


def plot(curves: dict[str, np.ndarray], out: Path) -> None:
    figure = Figure(figsize=(8, 6), layout="constrained")
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    losses.plot(curves["unpatched"], color="tab:blue", linewidth=6, alpha=0.4, label="unpatched")
    losses.plot(curves["cce_patch"], color="black", label="cce_patch")
    losses.set(ylabel="loss (nats per token)", title="The same training with and without cce_patch")
    losses.legend()
    differences.plot(curves["cce_patch"] - curves["unpatched"], color="black", linewidth=1)
    differences.set(xlabel="step", ylabel="difference (nats)")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)


def main() -> None:
    size = LARGE if torch.cuda.is_available() else SMALL
    parser = argparse.ArgumentParser(description="Train a Hugging Face model with and without cce_patch, and compare.")
    parser.add_argument("--steps", type=int, default=size.steps, help="optimizer steps of each run (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/hf_finetune.png"), help="the figure (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (%(default)s)")
    args = parser.parse_args()

    text = texts(size)
    tokenizer = new_tokenizer(text, size)
    data = examples(text, tokenizer, size)
    runs = {}
    for name in ("unpatched", "cce_patch"):
        set_seed(args.seed)
        model = new_model(len(tokenizer), size)
        if name == "cce_patch":
            cce_patch(model)
        figures = train(model, data, size, args.steps, args.seed, name)
        runs[name] = *figures, peak_gib(patched=name == "cce_patch")
        del model
        gc.collect()  # a Trainer and its model refer to each other
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    print(f"{'':12} {'final loss':>12} {'tokens/s':>12} {'peak memory':>12}")
    for name, (curve, speed, gib) in runs.items():
        memory = f"{gib:,.1f} GiB" if np.isfinite(gib) else "–"
        print(f"{name:12} {curve[-10:].mean():12.6f} {speed:12,.0f} {memory:>12}")
    curves = {name: curve for name, (curve, _, _) in runs.items()}
    plot(curves, args.out)
    difference = np.abs(curves["cce_patch"] - curves["unpatched"]).max()
    print(f"largest difference of the curves: {difference:.1e} nats (bound {size.tolerance}), see {args.out}")
    if not difference <= size.tolerance:  # so that NaN fails too
        sys.exit(f"FAILED: the curves part by {difference:.1e} nats, more than {size.tolerance}")


if __name__ == "__main__":
    main()

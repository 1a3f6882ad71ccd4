"""Train a small language model with linear cross-entropy, in JAX and in PyTorch, and with full logits, and compare.

All runs start from the same weights and see the same batches, byte-pair tokens of the Python standard library's
sources. Only the loss differs: `cce_jax.linear_cross_entropy`, or Optax's cross-entropy of the float32 logits
`hidden @ embedding.T`, or, in the same model written in PyTorch (torch_lm.py), `cce_torch.linear_cross_entropy`.
The script prints a table, draws the curves and exits with an error if they part.

    pip install ".[examples]"        # for a GPU: ".[cuda13,examples]" or ".[cuda12,examples]"
    python examples/train_lm.py      # about three minutes on two CPU cores; with a GPU it trains a larger model
    python examples/train_lm.py --mesh data=2,tensor=2      # and once more on four devices, in JAX
    torchrun --nproc-per-node 4 examples/train_lm.py --mesh data=2,tensor=2      # in PyTorch: on one, and on four

What to take from it into a training script of your own (torch_lm.py says the same of PyTorch):
  1. The model returns hidden states, not logits (`LanguageModel`).
  2. The loss takes them and the head's (V, D) matrix, here the token embedding (`linear_loss`).
  3. With shift=1 position i predicts token i + 1: the tokens are their own targets, and `hidden` is not sliced.
  4. On several devices the loss is told how its arrays lie (`Devices`): sequences over the mesh axis "data", rows of
     the embedding over "tensor".
"""

import argparse
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch_lm
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from matplotlib.figure import Figure  # without pyplot it draws with the Agg backend, which needs no display
from tokenizers import ByteLevelBPETokenizer
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

from cce_jax import linear_cross_entropy

Loss = Callable[..., jax.Array]  # of hidden states (B, T, D), embedding (V, D) and tokens (B, T)
LEAST_FALL = 1.5  # nats between the first loss and the final one, the mean of the last 10 steps


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    context: int
    batch: int
    vocabulary: int
    text_bytes: int
    steps: int
    learning_rate: float
    dtype: DTypeLike  # of the matmuls and the head; parameters and residual stream are float32
    tolerance: float  # nats by which a curve may differ from that of full logits at any step


# All losses are exact up to rounding, so the curves part only as far as training amplifies rounding. Measured at
# SMALL's width and depth: 2e-6, two units in the last place of the loss, with no growth over 1200 steps; at a learning
# rate of 3e-3, which is less stable, 2e-4 over 120 steps and 9e-4 over 1200. In bfloat16: 4e-4 over 300 steps at
# LARGE's learning rate, 3e-2 at 3e-3. Within a factor of 4, that is also how far two runs of the full logits part whose
# initial weights differ by one unit in the last place. PyTorch's SMALL parts by 1.4e-5, mostly because Optax computes
# Adam's bias correction in float32. LARGE on an H200: 5e-3, PyTorch 6e-3. The bounds leave room for larger models and
# other matmuls, and still show a wrong gradient: without the probabilities below 2^-12 the curves part by 0.9 nats
# within 50 steps.
SMALL = Size(128, 2, 128, 16, 16384, 4_000_000, steps=120, learning_rate=2e-3, dtype=jnp.float32, tolerance=1e-3)
LARGE = Size(768, 8, 1024, 16, 32768, 32_000_000, steps=300, learning_rate=6e-4, dtype=jnp.bfloat16, tolerance=0.05)


def make_batches(size: Size, steps: int, seed: int) -> tuple[np.ndarray, int]:
    """Random windows of the text as tokens, (steps, batch, context) int32, and the vocabulary's size."""
    root, skipped = Path(sysconfig.get_path("stdlib")), {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    paths = [path for path in sorted(root.rglob("*.py")) if not skipped.intersection(path.relative_to(root).parts)]
    paths = paths[: np.searchsorted(np.cumsum([path.stat().st_size for path in paths]), size.text_bytes)]
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in paths]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=size.vocabulary, show_progress=False)
    stream = np.concatenate([np.array(encoding.ids, np.int32) for encoding in tokenizer.encode_batch(texts)])
    starts = np.random.default_rng(seed).integers(0, stream.size - size.context, (steps, size.batch, 1))
    return stream[starts + np.arange(size.context)], tokenizer.get_vocab_size()


class LanguageModel(nn.Module):
    """A pre-norm decoder, from tokens (B, T) to hidden states (B, T, D): the head's matmul is left to the loss.

    It has no biases but LayerNorm's: Flax rounds a bfloat16 product before it adds one, and the sum again, PyTorch the
    sum alone, and that parts the curves of LARGE by 0.05 nats.
    """

    size: Size
    vocabulary: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        width, dtype = self.size.width, self.size.dtype
        embed = partial(nn.Embed, features=width, embedding_init=nn.initializers.normal(0.02))
        x = embed(self.vocabulary, name="tokens")(tokens)
        x += embed(self.size.context, name="positions")(jnp.arange(tokens.shape[-1]))
        dense = partial(nn.Dense, use_bias=False, dtype=dtype)
        attend = partial(nn.MultiHeadDotProductAttention, use_bias=False, dtype=dtype, force_fp32_for_softmax=True)
        for _ in range(self.size.layers):
            x += attend(width // 64)(nn.LayerNorm(dtype=dtype)(x), mask=nn.make_causal_mask(tokens))
            y = dense(4 * width)(nn.LayerNorm(dtype=dtype)(x))
            x += dense(width)(nn.gelu(y))
        return nn.LayerNorm(dtype=dtype)(x)


def linear_loss(hidden: jax.Array, embedding: jax.Array, tokens: jax.Array) -> jax.Array:
    return linear_cross_entropy(hidden, embedding, tokens, shift=1)


def full_logits_loss(hidden: jax.Array, embedding: jax.Array, tokens: jax.Array) -> jax.Array:
    logits = jnp.matmul(hidden[:, :-1], embedding.T, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


class Devices:
    """A mesh of devices: the axis "data" splits the batch, "tensor" the vocabulary. Either may be missing."""

    def __init__(self, text: str) -> None:
        """text: such as "data=2,tensor=2"."""
        sizes = {name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))}
        if not sizes.keys() <= {"data", "tensor"}:
            raise ValueError(f"--mesh {text}: its axes are data and tensor")
        self.mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))
        self.of_batch, self.of_embedding = (P(name if name in sizes else None) for name in ("data", "tensor"))

    def shardings(self, tree: Any) -> Any:
        """How each array of the parameters, or of the optimizer's state, lies."""

        def of(path: tuple, _: jax.Array) -> NamedSharding:
            is_embedding = "tokens" in [getattr(key, "key", None) for key in path]
            return NamedSharding(self.mesh, self.of_embedding if is_embedding else P())

        return jax.tree_util.tree_map_with_path(of, tree)

    def batch(self, tokens: np.ndarray) -> jax.Array:
        return jax.device_put(tokens, NamedSharding(self.mesh, self.of_batch))

    def loss(self, hidden: jax.Array, embedding: jax.Array, tokens: jax.Array) -> jax.Array:
        sharding = self.of_batch, self.of_embedding  # of hidden (B, T, D) and of embedding (V, D)
        return linear_cross_entropy(hidden, embedding, tokens, shift=1, sharding=sharding)


def train(
    model: LanguageModel, params: dict, batches: np.ndarray, loss: Loss, name: str, devices: Devices | None = None
) -> tuple:
    """The trained parameters, the loss at each step, and tokens per second without the time to compile."""
    schedule = optax.warmup_cosine_decay_schedule(0, model.size.learning_rate, len(batches) // 10 + 1, len(batches) + 1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))

    def loss_of_params(params: dict, tokens: jax.Array) -> jax.Array:
        hidden = model.apply({"params": params}, tokens)
        return loss(hidden, params["tokens"]["embedding"].astype(model.size.dtype), tokens)

    def step(params: dict, state: optax.OptState, tokens: jax.Array) -> tuple:
        value, gradient = jax.value_and_grad(loss_of_params)(params, tokens)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state, on_devices, out = optimizer.init(params), jnp.asarray, None
    if devices:
        jax.set_mesh(devices.mesh)
        on_devices, out = devices.batch, (devices.shardings(params), devices.shardings(state), None)
        params, state = jax.device_put((params, state), out[:2])
    compiled = jax.jit(step, out_shardings=out).lower(params, state, on_devices(batches[0])).compile()
    losses, start = [], time.perf_counter()
    for tokens in (progress := tqdm(batches, desc=name, unit="step")):
        params, state, value = compiled(params, state, on_devices(tokens))
        losses.append(float(value))
        progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    return params, np.array(losses), batches.size / (time.perf_counter() - start)


def save_hidden(path: Path, model: LanguageModel, params: dict, tokens: np.ndarray) -> None:
    """What the loss is given on a batch, for `python -m bench --data hidden`: e (N, D), c (V, D) and targets (N,).

    As float32, which holds every bfloat16: numpy's files have no bfloat16.
    """
    hidden = np.asarray(model.apply({"params": params}, tokens), np.float32)
    e = hidden[:, :-1].reshape(-1, model.size.width)
    c = np.asarray(params["tokens"]["embedding"].astype(model.size.dtype), np.float32)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, e=e, c=c, targets=tokens[:, 1:].ravel())


def temporary_mib(size: Size, vocabulary: int, loss: Loss) -> float:
    """Memory that the loss and its gradients take besides their inputs and outputs, by XLA's count."""
    hidden = jax.ShapeDtypeStruct((size.batch, size.context, size.width), size.dtype)
    embedding = jax.ShapeDtypeStruct((vocabulary, size.width), size.dtype)
    tokens = jax.ShapeDtypeStruct((size.batch, size.context), jnp.int32)
    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(hidden, embedding, tokens).compile()
    memory = compiled.memory_analysis()
    return memory.temp_size_in_bytes / 2**20 if memory else np.nan


def train_torch(size: Size, vocabulary: int, params: dict, batches: np.ndarray, name: str) -> tuple:
    """The same in PyTorch: the loss at each step, tokens per second, and the loss's memory or NaN."""
    device, dtype = "cuda" if jax.default_backend() == "gpu" else "cpu", getattr(torch, jnp.dtype(size.dtype).name)
    model = torch_lm.LanguageModel(vocabulary, size.width, size.layers, size.context, dtype).to(device)
    torch_lm.load_flax(model, jax.device_get(params))
    tokens = torch.from_numpy(batches).to(device, torch.int64)
    # The kernels' own memory is XLA's, where PyTorch does not see it: that of the same programs called from JAX.
    memory = torch_lm.temporary_mib(model, tokens[0]) + temporary_mib(size, vocabulary, linear_loss)
    return *torch_lm.train(model, tokens, size.learning_rate, name), memory


def train_torch_on_devices(size: Size, steps: int, seed: int, mesh: str, out: Path) -> None:
    """In each process that torchrun started: trains on its own device alone, then on all devices, and compares."""
    on_gpu = jax.default_backend() == "gpu"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    sizes = {name: int(n) for name, _, n in (part.partition("=") for part in mesh.split(","))}
    devices = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    batches, vocabulary = make_batches(size, steps, seed)
    params = jax.jit(LanguageModel(size, vocabulary).init)(jax.random.key(seed), batches[0])["params"]
    tokens, dtype = torch.from_numpy(batches).to(device, torch.int64), getattr(torch, jnp.dtype(size.dtype).name)
    curves, speeds = {}, {}
    for name, over in {"one device": None, mesh: devices}.items():
        model = torch_lm.LanguageModel(vocabulary, size.width, size.layers, size.context, dtype).to(device)
        torch_lm.load_flax(model, jax.device_get(params))
        if over:
            torch_lm.split(model, over)
        curves[name], speeds[name] = torch_lm.train(model, tokens, size.learning_rate, name, over)
    difference = np.abs(curves[mesh] - curves["one device"]).max()
    if torch.distributed.get_rank() == 0:
        plot({f"PyTorch, {mesh}": curves[mesh]}, curves["one device"], out, "PyTorch, one device")
        for name, curve in curves.items():
            print(f"{name:30} {curve[-10:].mean():12.6f} {speeds[name]:12,.0f} tokens/s")
        print(f"largest difference of the curves: {difference:.1e} nats (bound {size.tolerance}), see {out}")
    torch.distributed.destroy_process_group()
    if not difference <= size.tolerance:
        sys.exit(f"FAILED: the curves part by {difference:.1e} nats, more than {size.tolerance}")


def plot(curves: dict[str, np.ndarray], full: np.ndarray, out: Path, label: str = "full logits") -> None:
    figure = Figure(figsize=(8, 6), layout="constrained")
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    losses.plot(full, color="tab:blue", linewidth=6, alpha=0.4, label=label)
    for (name, curve), color, style in zip(curves.items(), ("black", "tab:orange", "tab:green"), "-:-", strict=False):
        losses.plot(curve, color=color, linestyle=style, label=name)
        differences.plot(curve - full, color=color, linewidth=1)
    losses.set(ylabel="loss (nats per token)", title=f"The same training with linear cross-entropy and {label}")
    losses.legend()
    differences.set(xlabel="step", ylabel="difference (nats)")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)


def main() -> None:
    if "LOCAL_RANK" in os.environ:  # started by torchrun: each process sees its own GPU alone
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        rank = int(os.environ["LOCAL_RANK"])
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[rank] if len(visible) > rank else str(rank)
    # By default JAX takes three quarters of a GPU's memory at once; PyTorch trains on the same GPU.
    jax.config.update("jax_pjrt_client_create_options", {"preallocate": False})
    size = LARGE if jax.default_backend() == "gpu" else SMALL
    parser = argparse.ArgumentParser(description="Train a language model with linear cross-entropy and full logits.")
    parser.add_argument("--steps", type=int, default=size.steps, help="optimizer steps of each run (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/train_lm.png"), help="the figure (%(default)s)")
    parser.add_argument("--save-hidden", type=Path, metavar="NPZ", help="where to save the last batch's hidden states")
    parser.add_argument("--mesh", metavar="AXES", help="train on several devices too, such as data=2,tensor=2")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (%(default)s)")
    args = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        mesh = args.mesh or f"data={os.environ['WORLD_SIZE']}"
        return train_torch_on_devices(size, args.steps, args.seed, mesh, args.out)

    batches, vocabulary = make_batches(size, args.steps, args.seed)
    model = LanguageModel(size, vocabulary)
    params = jax.jit(model.init)(jax.random.key(args.seed), batches[0])["params"]

    runs = {}
    for name, loss in {"linear cross-entropy": linear_loss, "full logits": full_logits_loss}.items():
        trained, *figures = train(model, params, batches, loss, name)
        runs[name] = *figures, temporary_mib(size, vocabulary, loss)
        if args.save_hidden and loss is linear_loss:
            save_hidden(args.save_hidden, model, trained, batches[-1])
    if args.mesh:
        devices, name = Devices(args.mesh), f"the same, {args.mesh}"
        runs[name] = *train(model, params, batches, devices.loss, name, devices)[1:], np.nan
    name = "linear cross-entropy, PyTorch"
    runs[name] = train_torch(size, vocabulary, params, batches, name)

    print(f"{'':30} {'final loss':>12} {'tokens/s':>12} {'loss memory':>15}")
    for name, (curve, speed, mib) in runs.items():
        memory = f"{mib:,.1f} MiB" if np.isfinite(mib) else "–"
        print(f"{name:30} {curve[-10:].mean():12.6f} {speed:12,.0f} {memory:>15}")
    curves = {name: curve for name, (curve, _, _) in runs.items()}
    full = curves.pop("full logits")
    plot(curves, full, args.out)

    difference = np.max([np.abs(curve - full) for curve in curves.values()])  # NaN if any is
    fall = full[0] - full[-10:].mean()
    print(f"largest difference of the curves: {difference:.1e} nats (bound {size.tolerance}), see {args.out}")
    if not difference <= size.tolerance:  # so that NaN fails too
        sys.exit(f"FAILED: the curves part by {difference:.1e} nats, more than {size.tolerance}")
    if args.steps < 50:
        print("fewer than 50 steps: not checked that the loss falls")
    elif not fall >= LEAST_FALL:
        sys.exit(f"FAILED: the loss fell by {fall:.2f} nats, less than {LEAST_FALL}")


if __name__ == "__main__":
    main()

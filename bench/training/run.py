"""One job, in a process that has one GPU."""

import gc
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.memory import release
from bench.training.jobs import REFERENCE_IN_JAX, REFERENCES, Job
from examples.lm.settings import Settings
from examples.lm.text import Text

WARM = 20  # steps that are not timed: compiling, and the GPU's clock
QUARTERS = 4  # how often the validation loss is computed
THINNED = 10  # steps whose mean loss is one point of a curve


def run(
    job: Job, settings: Settings, folder: Path, limit_gib: float, most: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The row of a job, and where it was measured. folder: has the text, and gets the final weights of trainings."""
    if job.kind == "train":
        found = train(job, replace(settings, seed=job.seed), Text.load(folder / "text"), folder)
    else:
        from bench.training.largest import largest

        found = largest(job, settings, limit_gib, most)
    release()
    from bench.report import environment

    return {**asdict(job), "label": job.label, **found}, environment()


class InTorch:
    """A training in PyTorch."""

    def __init__(self, job: Job, settings: Settings, vocabulary: int) -> None:
        import torch

        from bench.training.losses import model_type
        from examples.lm import torch_model, torch_trainer

        self.torch, self.full_logits_loss = torch, torch_model.full_logits_loss
        self.trainer = torch_trainer.Trainer(settings, vocabulary, model_type=model_type(job.loss))
        if job.variant == "nudged":
            with torch.no_grad():
                for x in self.trainer.model.parameters():
                    x.copy_(torch.nextafter(x, torch.full_like(x, torch.inf)))
        self.memory = Memory()

    def wait(self) -> None:
        if self.trainer.device.type == "cuda":
            self.torch.cuda.synchronize()

    def validate(self, batches: list[np.ndarray]) -> float:
        """The loss of float32 logits, whatever loss the model is trained with."""
        model, device = self.trainer.model, self.trainer.device
        found = []
        for batch in batches:
            tokens = self.torch.from_numpy(batch).to(device, self.torch.int64)
            with self.torch.no_grad(), self.torch.autocast(device.type, model.dtype):
                found.append(self.full_logits_loss(model.hidden(tokens), model.head.weight, tokens, None).item())
        return float(np.mean(found))

    def weights(self) -> np.ndarray:
        return self.torch.cat([x.detach().flatten() for x in self.trainer.model.parameters()]).cpu().numpy()


class InJax:
    """A training in JAX. Its compiled step holds all memory."""

    def __init__(self, job: Job, settings: Settings, vocabulary: int) -> None:
        import jax

        from examples.lm import jax_model, jax_trainer

        full = "full" if job.loss == REFERENCE_IN_JAX else "cce"
        self.jax, self.trainer = jax, jax_trainer.Trainer(replace(settings, loss=full), vocabulary)

        def yardstick(params: Any, tokens: Any) -> Any:
            hidden: Any = self.trainer.model.apply({"params": params}, tokens)
            targets = tokens[:, 1:].size
            return jax_model.full_logits_loss(hidden, params["tokens"]["embedding"], tokens, targets)

        self.yardstick = jax.jit(yardstick)
        self.memory = Memory()

    def wait(self) -> None:
        self.jax.block_until_ready(self.trainer.state)

    def validate(self, batches: list[np.ndarray]) -> float:
        return float(np.mean([float(self.yardstick(self.trainer.state["params"], x)) for x in batches]))

    def weights(self) -> np.ndarray:
        arrays = self.jax.tree.leaves(self.jax.device_get(self.trainer.state["params"]))
        return np.concatenate([np.ravel(x) for x in arrays])


class Memory:
    """The peak of both frameworks' pools since it was made.

    JAX's counter cannot be set back, so that of a process is taken. It counts if anything was allocated there: the
    scratch of our kernels, which the process keeps.
    """

    def __init__(self) -> None:
        import jax
        import torch

        self.torch = torch if torch.cuda.is_available() else None
        self.device = jax.devices()[0]
        self.restart()

    def restart(self) -> None:
        if self.torch is not None:
            self.torch.cuda.reset_peak_memory_stats()
            self.allocations = self.device.memory_stats()["num_allocs"]

    def gib(self) -> float | None:
        """None on a CPU."""
        if self.torch is None:
            return None
        stats = self.device.memory_stats()
        in_jax = stats["peak_bytes_in_use"] if stats["num_allocs"] > self.allocations else 0
        return (self.torch.cuda.max_memory_allocated() + in_jax) / 2**30


def train(job: Job, settings: Settings, text: Text, folder: Path) -> dict[str, Any]:
    began = time.perf_counter()
    training = {"torch": InTorch, "jax": InJax}[job.package](job, settings, text.vocabulary)
    start, order = training.weights(), replace(settings, seed=0)  # all trainings see the same batches
    held_out, losses, validation, seconds = text.validation(settings), [], {}, 0.0
    peak, warm, since = None, min(WARM, settings.steps // 2), time.perf_counter()
    for step in range(settings.steps):
        if step == warm:
            training.wait()
            since, seconds = time.perf_counter(), 0.0
        losses.append(training.trainer.step(text.batch(order, step)))
        if (step + 1) * QUARTERS // settings.steps > step * QUARTERS // settings.steps:
            training.wait()
            seconds += time.perf_counter() - since
            peak = peak or training.memory.gib()  # before validation, which takes more than a loss without logits
            validation[step + 1] = training.validate(held_out)
            training.wait()
            since = time.perf_counter()
    curve = np.array([float(x) for x in losses])
    end = training.weights()
    np.save(folder / f"{job.file}.npy", end)
    if job.loss == REFERENCES[job.package] and not job.variant:
        np.save(folder / f"{job.file}-start.npy", start)
    del training
    gc.collect()
    return {
        "validation": validation,
        "curve": curve[: len(curve) // THINNED * THINNED].reshape(-1, THINNED).mean(1).round(6).tolist(),
        "first_losses": curve[:5].tolist(),
        "tokens_per_second": (settings.steps - warm) * settings.batch * settings.context / seconds,
        "peak_gib": peak,
        "parameters": len(end),
        "job_seconds": time.perf_counter() - began,
    }

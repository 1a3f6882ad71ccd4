"""One job, in a process of its own: `python -m bench.training` starts it. Prints a row."""

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from bench.fitting import Memory, searched
from bench.memory import release
from bench.report import Row
from bench.training.jobs import REFERENCE_IN_JAX, REFERENCES, Job
from bench.training.models import model_type
from examples.lm import jax_model, jax_trainer, torch_model, torch_trainer
from examples.lm.settings import Settings
from examples.lm.text import Text

WARM = 20  # steps that are not timed: compiling, and the GPU's clock
QUARTERS = 4  # how often the validation loss is computed
THINNED = 10  # steps whose mean loss is one point of a curve
FIRST = 128  # sequences of the first batch that is tried
FINEST = 8  # sequences to which the result is right
TIMED = 6  # steps


class InTorch:
    """A training in PyTorch."""

    def __init__(self, job: Job, settings: Settings, vocabulary: int) -> None:
        self.trainer = torch_trainer.Trainer(settings, vocabulary, model_type=model_type(job.loss))
        if job.variant == "nudged":
            with torch.no_grad():
                for x in self.trainer.model.parameters():
                    x.copy_(torch.nextafter(x, torch.full_like(x, torch.inf)))
        self.memory = Memory()

    def wait(self) -> None:
        if self.trainer.device.type == "cuda":
            torch.cuda.synchronize()

    def validate(self, batches: list[np.ndarray]) -> float:
        """The loss of float32 logits, whatever loss the model is trained with."""
        model, device = self.trainer.model, self.trainer.device
        found = []
        for batch in batches:
            tokens = torch.from_numpy(batch).to(device, torch.int64)
            with torch.no_grad(), torch.autocast(device.type, model.dtype):
                found.append(torch_model.full_logits_loss(model.hidden(tokens), model.head.weight, tokens, None).item())
        return float(np.mean(found))

    def weights(self) -> np.ndarray:
        return torch.cat([x.detach().flatten() for x in self.trainer.model.parameters()]).cpu().numpy()


class InJax:
    """A training in JAX. Its compiled step holds all memory."""

    def __init__(self, job: Job, settings: Settings, vocabulary: int) -> None:
        full = "full" if job.loss == REFERENCE_IN_JAX else "cce"
        self.trainer = jax_trainer.Trainer(replace(settings, loss=full), vocabulary)

        def yardstick(params: Any, tokens: Any) -> Any:
            hidden: Any = self.trainer.model.apply({"params": params}, tokens)
            targets = tokens[:, 1:].size
            return jax_model.full_logits_loss(hidden, params["tokens"]["embedding"], tokens, targets)

        self.yardstick = jax.jit(yardstick)
        self.memory = Memory()

    def wait(self) -> None:
        jax.block_until_ready(self.trainer.state)

    def validate(self, batches: list[np.ndarray]) -> float:
        return float(np.mean([float(self.yardstick(self.trainer.state["params"], x)) for x in batches]))

    def weights(self) -> np.ndarray:
        arrays = jax.tree.leaves(jax.device_get(self.trainer.state["params"]))
        return np.concatenate([np.ravel(x) for x in arrays])


def train(job: Job, settings: Settings, text: Text, folder: Path) -> Row:
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
    return {
        "validation": validation,
        "curve": curve[: len(curve) // THINNED * THINNED].reshape(-1, THINNED).mean(1).round(6).tolist(),
        "first_losses": curve[:5].tolist(),
        "tokens_per_second": (settings.steps - warm) * settings.batch * settings.context / seconds,
        "peak_gib": peak,
        "parameters": len(end),
    }


def largest(job: Job, settings: Settings, limit_gib: float, most: int) -> Row:
    """The largest batch of a training step that fits into so much memory.

    Doubles the batch while it fits, up to `most` sequences, then tries sizes between the last two. It fits if the
    peak of what both frameworks' pools have given out is at most limit_gib.
    """
    random = np.random.default_rng(0)
    training, tried = InTorch(job, replace(settings, batch=FIRST), settings.vocabulary), {}

    def batch(sequences: int) -> np.ndarray:
        return random.integers(0, settings.vocabulary, (1, sequences, settings.context), np.int32)

    def fits(sequences: int) -> bool:
        training.trainer.optimizer.zero_grad()
        release()
        training.memory.restart()
        try:
            for _ in range(2):  # the first step makes the optimizer's state
                training.trainer.step(batch(sequences))
            training.wait()
        except RuntimeError as error:
            if "out of memory" not in str(error).lower():
                raise
            tried[sequences] = None
            return False
        tried[sequences] = training.memory.gib()
        return not (tried[sequences] or 0) > limit_gib

    fitting = searched(fits, tried, limit_gib, most, FIRST, FINEST)
    found: Row = {"limit_gib": limit_gib, "sequences": fitting, "tokens": fitting * settings.context}
    if fitting:
        release()
        training.trainer.step(batch(fitting))
        training.wait()
        since = time.perf_counter()
        for _ in range(TIMED):
            training.trainer.step(batch(fitting))
        training.wait()
        found["tokens_per_second"] = TIMED * found["tokens"] / (time.perf_counter() - since)
    return {**found, "tried_gib": tried}


def main() -> None:
    """The arguments: the job, the settings, the folder that has the text and gets the final weights, limit and most."""
    job, settings = Job(**json.loads(sys.argv[1])), Settings(**json.loads(sys.argv[2]))
    folder, limit_gib, most = Path(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
    try:
        if job.kind == "train":
            row = train(job, replace(settings, seed=job.seed), Text.load(folder / "text"), folder)
        else:
            row = largest(job, settings, limit_gib, most)
    except ImportError as error:
        row = {"missing": str(error)}
    print("row", json.dumps({**asdict(job), "label": job.label, **row}))


if __name__ == "__main__":
    main()

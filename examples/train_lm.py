"""Train a small language model on your own text, in JAX or in PyTorch, with linear cross-entropy.

    pip install ".[examples]"                            # for a GPU: ".[cuda13,examples]" or ".[cuda12,examples]"
    python examples/train_lm.py                          # the Python sources of the standard library, in JAX
    python examples/train_lm.py --framework torch --text notes/ novel.txt
    python examples/train_lm.py --resume                 # goes on from the last checkpoint in out/lm

    # about 100 million parameters, for a GPU:
    python examples/train_lm.py --dtype bfloat16 --width 768 --layers 10 --context 1024 --vocabulary 32768 \\
        --batch 64 --accumulation 2 --steps 5000
    python examples/train_lm.py --mesh data=2,tensor=2   # four devices, in JAX
    torchrun --nproc-per-node 4 examples/train_lm.py --framework torch --mesh data=2,tensor=2

The folder --out gets the tokenizer and the tokens, checkpoints, the losses (log.jsonl) and a picture of them
(training.png). compare_losses.py trains with several losses, and shows that they train the same.

The loss is in lm/jax_model.py and in lm/torch_model.py, whose first lines say what to take from them; lm/jax_trainer.py
and lm/torch_trainer.py have the training steps.
"""

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from lm import picture, processes
from lm.settings import Settings
from lm.text import Text, files_in, standard_library
from tqdm import tqdm

LOGGED = 10  # steps whose mean loss is one line of the log


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=("jax", "torch"), default="jax")
    parser.add_argument("--text", type=Path, nargs="+", help="files and folders (default: Python's standard library)")
    parser.add_argument("--text-bytes", type=float, default=100e6, help="read at most so much (%(default).0e)")
    parser.add_argument("--out", type=Path, default=Path("out/lm"), help="the folder for all results (%(default)s)")
    parser.add_argument(
        "--resume", action="store_true", help="go on in --out, with the options that the run began with"
    )
    parser.add_argument("--mesh", metavar="AXES", help="several devices, such as data=2,tensor=2")
    parser.add_argument("--evaluate", type=int, default=100, metavar="STEPS", help="steps between validations")
    parser.add_argument("--save", type=int, default=500, metavar="STEPS", help="steps between checkpoints")
    choices = {"dtype": ("float32", "bfloat16"), "loss": ("cce", "full")}
    for field in dataclasses.fields(Settings):
        kind, help = type(field.default), f"{field.metadata['help']} (%(default)s)"
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=kind, default=field.default, choices=choices.get(field.name), help=help)
    asked = parser.parse_args(given)
    if asked.resume:
        parser.set_defaults(**json.loads((asked.out / "options.json").read_text()))
        asked = parser.parse_args(given)
    elif (asked.out / "checkpoints").exists():
        parser.error(f"{asked.out} has the checkpoints of a training: go on with --resume, or choose another --out")
    return asked


def prepare_text(asked: argparse.Namespace) -> Text:
    """The text in --out, which the first process prepares unless a run is resumed."""
    folder = asked.out / "text"
    if processes.is_first() and not (asked.resume and (folder / "tokens.npy").exists()):
        files = files_in(map(Path, asked.text)) if asked.text else standard_library()
        Text.prepare(files, asked.vocabulary, int(asked.text_bytes)).save(folder)
    if dist.is_initialized():
        dist.barrier()
    return Text.load(folder)


def make_trainer(framework: str, settings: Settings, vocabulary: int, mesh: str | None, group: Any) -> Any:
    """The trainer of either framework: they have the same methods."""
    if framework == "torch":
        from lm import torch_trainer

        return torch_trainer.Trainer(settings, vocabulary, group)
    from lm import jax_trainer

    return jax_trainer.Trainer(settings, vocabulary, mesh)


class Log:
    """The losses so far: in memory, and a line each in log.jsonl."""

    def __init__(self, path: Path, count: int) -> None:
        """count: the steps that were made; what the file has of later ones was lost with its process."""
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() and count else []
        self.path, self.rows = path, [row for row in rows if row["step"] <= count]
        if processes.is_first():
            path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    def add(self, **row: float) -> None:
        self.rows.append(row)
        if processes.is_first():
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def train(trainer: Any, text: Text, settings: Settings, asked: argparse.Namespace, log: Log) -> None:
    validation, losses, start = text.validation(settings), [], time.perf_counter()
    steps = range(trainer.count, settings.steps)
    progress = tqdm(
        steps, initial=trainer.count, total=settings.steps, unit="step", disable=None if processes.is_first() else True
    )
    for step in progress:
        losses.append(trainer.step(text.batch(settings, step)))
        done = step + 1
        if done % LOGGED == 0 or done == settings.steps:
            loss = float(np.mean([float(x) for x in losses]))  # waits for the device
            seconds = time.perf_counter() - start
            tokens = len(losses) * settings.batch * settings.context
            log.add(step=done, loss=loss, tokens_per_second=round(tokens / seconds))
            progress.set_postfix(loss=f"{loss:.3f}", refresh=False)
            losses, start = [], time.perf_counter()
        paused = time.perf_counter()
        if done % asked.evaluate == 0 or done == settings.steps:
            value = trainer.evaluate(validation)
            log.add(step=done, validation=value, perplexity=math.exp(value))
            if processes.is_first():
                progress.write(f"step {done}: validation loss {value:.4f}, perplexity {math.exp(value):.2f}")
        if done % asked.save == 0 or done == settings.steps:
            trainer.save(asked.out / "checkpoints")
        start += time.perf_counter() - paused


def main(given: list[str] | None = None) -> None:
    asked = arguments(given)
    group = processes.start(asked.mesh) if asked.framework == "torch" else None
    settings = Settings(**{field.name: getattr(asked, field.name) for field in dataclasses.fields(Settings)})
    text = prepare_text(asked)
    trainer = make_trainer(asked.framework, settings, text.vocabulary, asked.mesh, group)
    if asked.resume:
        trainer.restore(asked.out / "checkpoints")
    elif processes.is_first():
        kept = {key: value for key, value in vars(asked).items() if key not in ("resume", "out")}
        (asked.out / "options.json").write_text(json.dumps(kept, default=str, indent=1) + "\n")
    log = Log(asked.out / "log.jsonl", trainer.count)
    train(trainer, text, settings, asked, log)
    if processes.is_first():
        picture.of_training(log.rows, f"{asked.framework}, {text.vocabulary} tokens", asked.out / "training.png")
        print(f"{trainer.count} steps; the losses are in {asked.out}/log.jsonl and {asked.out}/training.png")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

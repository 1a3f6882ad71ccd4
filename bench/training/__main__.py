"""Train the same model with each loss and compare: `python -m bench.training`. Writes OUT.json and OUT.png.

The model and its training are those of examples/lm: bfloat16 matmuls, float32 weights. The text is the Python sources
of the installation, without repetition if there are enough. All trainings see the same batches in the same order; the
seed changes the first weights. The reference is torch.nn.functional.cross_entropy of float32 logits. Then the largest
batch is searched for that fits into --memory-limit.

Results are written after each job, so that a run that is cut off keeps them.
"""

import argparse
import json
import os
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench.training import compare, workers
from bench.training.jobs import Job, jobs
from bench.training.run import run
from examples.lm.settings import Settings
from examples.lm.text import Text

SETTINGS = Settings(512, 8, 512, 32768, batch=32, steps=1000, learning_rate=1e-3, dtype="bfloat16")
TINY = Settings(64, 1, 32, 1000, batch=8, steps=20, learning_rate=1e-3, dtype="bfloat16")
JOB_SECONDS, STEP_SECONDS = 60, 0.1  # a job that takes more, for itself and for each step, is given up


def python_sources() -> list[Path]:
    """All Python sources of the installation and of the packages in it."""
    here = Path.cwd().resolve()
    folders = {Path(x).resolve() for x in (*sys.path, *site.getsitepackages(), sysconfig.get_path("stdlib"))}
    folders -= {here, here / "kernels"}  # this project's own, which are on the path in a checkout
    return sorted({file for folder in folders for file in folder.rglob("*.py") if file.is_file()})


def prepare(settings: Settings, text_bytes: int, folder: Path) -> Text:
    """The text, prepared once: it is kept in the folder under the sizes that it depends on."""
    key = {"vocabulary": settings.vocabulary, "bytes": text_bytes}
    kept = folder / "text" / "key.json"
    if not kept.exists() or json.loads(kept.read_text()) != key:
        Text.prepare(python_sources(), settings.vocabulary, text_bytes).save(folder / "text")
        kept.write_text(json.dumps(key))
    return Text.load(folder / "text")


def gpus_here() -> int:
    try:
        return len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines())
    except FileNotFoundError:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.training", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int)
    parser.add_argument("--gpus", type=int, default=gpus_here(), help="jobs run on so many at a time (%(default)s)")
    parser.add_argument("--only", nargs="+", metavar="LOSS", help="the losses to train with, by name")
    parser.add_argument("--kind", nargs="+", choices=("train", "largest"), default=["train", "largest"])
    parser.add_argument("--minutes", type=float, default=60, help="after so many no job is started (%(default)s)")
    parser.add_argument("--text-bytes", type=float, default=90e6)
    parser.add_argument("--memory-limit", type=float, default=24, help="GiB for the largest batch (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a small model and few steps: a trial without a GPU")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "cce-training",
                        help="for the tokens and the final weights, hundreds of MB each (%(default)s)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("out/training"))
    asked = parser.parse_args()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # PyTorch shares the GPUs
    began, chosen = time.perf_counter(), TINY if asked.tiny else SETTINGS
    settings = Settings(**{**asdict(chosen), "steps": asked.steps or chosen.steps})
    text_bytes, most = (300_000, 256) if asked.tiny else (int(asked.text_bytes), 4096)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.folder.mkdir(parents=True, exist_ok=True)

    kept: dict[str, Any] = {"settings": asdict(settings), "gpus": asked.gpus}
    kept |= {"rows": [], "largest": [], "seeds": None, "missing": [], "failed": []}
    if "train" in asked.kind:
        text, seen = prepare(settings, text_bytes, asked.folder), settings.steps * settings.batch * settings.context
        kept["text"] = {"tokens": len(text.tokens), "tokens_seen": seen, "passes": seen / len(text.tokens)}
        print(f"{len(text.tokens):,} tokens of text, of which the trainings see {seen:,}; "
              f"{time.perf_counter() - began:.0f} s until here", flush=True)  # fmt: skip

    def done(job: Job, result: tuple | None, reason: str | None) -> None:
        row, measured = result or (None, {})
        kept.update(measured)
        if row is None:
            kind = "missing" if (reason or "").startswith("missing") else "failed"
            kept[kind].append({"job": f"{job.kind}: {job.label}", "reason": reason})
        else:
            kept["rows" if job.kind == "train" else "largest"].append(row)
            compare.compare(kept["rows"], asked.folder)
            kept["seeds"] = compare.spread(kept["rows"], asked.folder)
        kept["seconds"] = time.perf_counter() - began
        asked.out.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n")
        took = f"{row['job_seconds']:.0f} s" if row else reason
        print(f"{kept['seconds']:4.0f} s  {job.kind}: {job.label}: {took}", flush=True)

    asked_for = [job for job in jobs() if job.kind in asked.kind and (not asked.only or job.loss in asked.only)]
    call = partial(run, settings=settings, folder=asked.folder, limit_gib=asked.memory_limit, most=most)
    seconds = JOB_SECONDS + STEP_SECONDS * settings.steps
    workers.spread(asked_for, workers.visible(asked.gpus), seconds, began + 60 * asked.minutes, call, done)
    if kept["rows"]:
        compare.plot(kept["rows"], settings.steps, asked.out.with_suffix(".png"))
        print(compare.table(kept["rows"], kept["seeds"]))
    if kept["largest"]:
        print(f"within {asked.memory_limit:g} GiB:\n{compare.sizes_table(kept['largest'])}")


if __name__ == "__main__":
    main()

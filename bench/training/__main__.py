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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench import report
from bench.training import compare
from bench.training.jobs import Job, jobs
from examples.lm.settings import Settings
from examples.lm.text import Text

SETTINGS = Settings(512, 8, 512, 32768, batch=32, steps=1000, learning_rate=1e-3, dtype="bfloat16")
TINY = Settings(64, 1, 32, 1000, batch=8, steps=20, learning_rate=1e-3, dtype="bfloat16")
JOB_SECONDS, STEP_SECONDS = 120, 0.1  # a job that takes more, for itself and for each step, is given up


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


def row_of(job: Job, arguments: list[str], seconds: float) -> report.Row:
    """What a process of the job's own finds. One that ends, or hangs, costs its own row alone."""
    began, command = time.perf_counter(), [sys.executable, "-m", "bench.training.run", json.dumps(asdict(job))]
    try:
        done = subprocess.run([*command, *arguments], stdout=subprocess.PIPE, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"label": job.label, "failed": f"it took more than {seconds:.0f} s"}
    rows = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("row ")]
    row = rows[0] if rows else {"label": job.label, "failed": f"exit code {done.returncode}"}
    return row | {"job_seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.training", description=__doc__)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--only", nargs="+", metavar="LOSS", help="the losses to train with, by name")
    parser.add_argument("--kind", nargs="+", choices=("train", "largest"), default=["train", "largest"])
    parser.add_argument("--text-bytes", type=float, default=90e6)
    parser.add_argument("--memory-limit", type=float, default=24, help="GiB for the largest batch (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a small model and few steps: a trial without a GPU")
    folder = Path(tempfile.gettempdir()) / "cce-training"
    parser.add_argument("--folder", type=Path, default=folder, help="for the text and the final weights (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/training"))
    asked = parser.parse_args()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # PyTorch shares the GPU
    settings = replace(TINY if asked.tiny else SETTINGS)
    settings = replace(settings, steps=asked.steps or settings.steps)
    text_bytes, most = (300_000, 256) if asked.tiny else (int(asked.text_bytes), 4096)
    asked.folder.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Any] = {"settings": asdict(settings), "rows": [], "largest": [], "seeds": None, "without": []}
    if "train" in asked.kind:
        text, seen = prepare(settings, text_bytes, asked.folder), settings.steps * settings.batch * settings.context
        kept["text"] = {"tokens": len(text.tokens), "tokens_seen": seen, "passes": seen / len(text.tokens)}
    arguments = [json.dumps(asdict(settings)), *map(str, (asked.folder, asked.memory_limit, most))]
    for job in jobs():
        if job.kind in asked.kind and (not asked.only or job.loss in asked.only):
            row = row_of(job, arguments, JOB_SECONDS + STEP_SECONDS * settings.steps)
            found = "tokens_per_second" in row
            kept["without" if not found else "rows" if job.kind == "train" else "largest"].append(row)
            compare.compare(kept["rows"], asked.folder)
            kept["seeds"] = compare.spread(kept["rows"], asked.folder)
            report.write(asked.out, **kept)
            print(f"{job.kind}: {job.label}: {row.get('missing') or row.get('failed') or 'done'}", flush=True)
    if kept["rows"]:
        compare.plot(kept["rows"], settings.steps, asked.out.with_suffix(".png"))
        print(compare.table(kept["rows"]), f"between seeds of the reference: {kept['seeds']}", sep="\n")
    if kept["largest"]:
        columns = {"loss": "", "sequences": "", "tokens": ",", "tokens_per_second": ",.0f"}
        print(f"within {asked.memory_limit:g} GiB:", report.table(kept["largest"], **columns), sep="\n")


if __name__ == "__main__":
    main()

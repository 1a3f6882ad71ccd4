"""Time training steps of a patched Hugging Face model: `python -m bench.hugging_face`. Writes OUT.json, prints a table.

The model has the shape of Llama 3.2 1B and random bfloat16 weights; a batch is 8 × 2048 tokens, drawn with the
frequencies that words have in a text (Zipf's law). Each method runs in a process of its own, from the same weights and
on the same batches. See bench/hugging_face/methods.py for the methods and bench/hugging_face/alone.py for a step.
"""

import argparse
import json
import os
import sys
from importlib import metadata
from pathlib import Path
from subprocess import PIPE, run
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.hugging_face.methods import LLAMA, METHODS, ON_CPU, OURS, TINY, Size

Row = dict[str, Any]


def row_of(method: str, flags: list[str]) -> Row:
    """What a process of the method's own measures; or why there is nothing, as "missing" or "failed"."""
    command = [sys.executable, "-m", "bench.hugging_face.alone", method, *flags]
    done = run(command, stdout=PIPE, text=True)
    rows = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("row ")]
    return rows[0] if rows else {"method": method, "failed": f"exit code {done.returncode}"}


def differences(rows: list[Row]) -> list[str]:
    """A line for each method whose losses are not those of the first, up to rounding.

    The first loss: rounding to bfloat16 moves a logit z by up to 2⁻⁹·|z|, so it moves the log-sum-exp and the target's
    logit by up to 2⁻⁹·max|z| each. The log-sum-exp is at least max z, and in an untrained model it is about the loss,
    because the targets' logits are about 0 on average.

    The last loss, which shows wrong gradients: how far training amplifies rounding is not known. A model of width 512
    and 6 layers parted by a two-thousandth of what its loss had fallen. A fiftieth is allowed.
    """
    found = []
    for row in rows[1:]:
        first, last = (abs(row[x] - rows[0][x]) for x in ("first_loss", "last_loss"))
        if not first <= 2**-8 * rows[0]["first_loss"]:  # so that NaN counts too
            found.append(f"{row['method']}: the first losses differ by {first:.4f}")
        elif not last <= 0.02 * (rows[0]["first_loss"] - rows[0]["last_loss"]):
            found.append(f"{row['method']}: the last losses differ by {last:.4f}")
    return found


def table(rows: list[Row], size: Size) -> Table:
    logits = 2 * size.batch * size.context * size.vocabulary / 2**30
    caption = f"peak: of PyTorch's pool and JAX's together; the logits alone are {logits:.3g} GiB"
    titles = ("method", "tokens/s", "ms", "peak GiB", "first loss", "last loss")
    printed = Table(*titles, caption=caption, header_style="bold")
    for column in printed.columns[1:]:
        column.justify = "right"
    for row in rows:
        peak = f"{row['peak_gib']:.2f}" if "peak_gib" in row else "–"
        printed.add_row(row["method"], f"{row['tokens_per_second']:,.0f}", f"{row['ms']:.1f}", peak,
                        f"{row['first_loss']:.5f}", f"{row['last_loss']:.4f}")  # fmt: skip
    return printed


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.hugging_face", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU")
    parser.add_argument("--checkpointing", action="store_true", help="recompute the layers in the backward pass")
    parser.add_argument("--out", type=Path, default=Path("out/hugging-face"))
    asked = parser.parse_args()
    size, flags = TINY if asked.tiny else LLAMA, ["--tiny"] * asked.tiny + ["--checkpointing"] * asked.checkpointing

    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # so that JAX leaves the GPU's memory to PyTorch
    from bench.report import environment

    kept: dict[str, Any] = {**environment(), "size": size._asdict(), "flags": flags, "rows": [], "without": []}
    kept["packages"]["transformers"] = metadata.version("transformers")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    for method in track(asked.method, "methods"):
        needs_gpu = asked.tiny and method not in ON_CPU
        row = {"method": method, "missing": "it needs a GPU"} if needs_gpu else row_of(method, flags)
        kept["rows" if "ms" in row else "without"].append(row)
        asked.out.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n")

    console = Console(width=120)
    console.print(table(kept["rows"], size))
    for row in kept["without"]:
        console.print(*(f"{key}: {value}" for key, value in row.items()), sep="; ", markup=False, highlight=False)
    different = differences(kept["rows"])
    console.print(*different, sep="\n", markup=False, highlight=False)
    failed = [line for line in different if line.startswith(OURS)]
    failed += [f"{row['method']}: {row['failed']}" for row in kept["without"] if "failed" in row]
    if failed:
        sys.exit("FAILED\n" + "\n".join(failed))


if __name__ == "__main__":
    main()

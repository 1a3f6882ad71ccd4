"""Time training steps of a patched Hugging Face model: `python -m bench.hugging_face`. Writes OUT.json, prints a table.

The model has the shape of Llama 3.2 1B and random bfloat16 weights; a batch is 8 × 2048 tokens, drawn with the
frequencies that words have in a text (Zipf's law). Each method runs in a process of its own, from the same weights and
on the same batches. See bench/hugging_face/methods.py for the methods and bench/hugging_face/alone.py for a step.

With --largest GIB it seeks the largest batch whose step fits into so much memory: --largest 74.5 is that of 80 GB.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from subprocess import PIPE, run

from rich.console import Console
from rich.progress import track

from bench import report
from bench.hugging_face.methods import LLAMA, METHODS, ON_CPU, OURS, TINY
from bench.report import Row

COLUMNS = {"method": "", "tokens_per_second": ",.0f", "ms": ".1f", "peak_gib": ".2f"}
COLUMNS |= {"first_loss": ".5f", "last_loss": ".4f"}
COLUMNS_OF_LARGEST = {"method": "", "limit_gib": ".1f", "sequences": "", "tokens_per_second": ",.0f"}


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


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.hugging_face", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU")
    parser.add_argument("--largest", type=float, metavar="GIB", help="seek the largest batch within so much memory")
    parser.add_argument("--out", type=Path, default=Path("out/hugging-face"))
    asked = parser.parse_args()
    size, flags = TINY if asked.tiny else LLAMA, ["--tiny"] * asked.tiny
    flags += ["--largest", str(asked.largest)] if asked.largest else []

    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # so that JAX leaves the GPU's memory to PyTorch
    rows, without = [], []
    for method in track(asked.method, "methods", console=Console(stderr=True)):
        needs_gpu = asked.tiny and method not in ON_CPU
        row = {"method": method, "missing": "it needs a GPU"} if needs_gpu else row_of(method, flags)
        (rows if "ms" in row or "sequences" in row else without).append(row)
        report.write(asked.out, size=size._asdict(), rows=rows, without=without)
    print(report.table(rows, **COLUMNS_OF_LARGEST if asked.largest else COLUMNS), *without, sep="\n")
    different = [] if asked.largest else differences(rows)
    print(*different, sep="\n")
    failed = [line for line in different if line.startswith(OURS)]
    failed += [f"{row['method']}: {row['failed']}" for row in without if "failed" in row]
    if failed:
        sys.exit("FAILED\n" + "\n".join(failed))


if __name__ == "__main__":
    main()

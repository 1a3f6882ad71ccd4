"""Where the figures come from, and how they are printed and written."""

import json
import math
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from bench.peers import PACKAGES
from bench.run import Results, Row


def environment() -> dict[str, Any]:
    """Where the figures come from. CCE_GIT_TREE names the code where there is no git checkout."""
    tree = os.environ.get("CCE_GIT_TREE")
    if not tree:
        git = subprocess.run(["git", "rev-parse", "HEAD^{tree}"], capture_output=True, text=True)
        tree = git.stdout.strip() or "unknown"
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "git_tree": tree,
        "precision": jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def title(row: Row) -> str:
    return f"{'×'.join(map(str, row['shape']))} {row['dtype']} {row['test_data']}"


def table(rows: Sequence[Row]) -> Table:
    printed = Table(
        *("method", "runtime_ms", "/ floor", "op_mem_mb", "besides", "test_data", "loss err", "de err", "dc err"),
        title=title(rows[0]),
        header_style="bold",
        caption="floor: the three bare matmuls; besides: MiB besides the gradients; err: relative, against float64; "
        "!: more than rounding explains (bench/errors.py)",
    )
    for column in printed.columns:
        if column.header not in ("method", "test_data"):
            column.justify = "right"
    for row in rows:
        held = row["op_mem_mb"]
        printed.add_row(
            row["method"],
            *(f"{row[x]:.3f}" for x in ("runtime_ms", "ratio")),
            *(("-", "-") if math.isnan(held) else (f"{held:.1f}", f"{held - gradients(row):.1f}")),
            row["test_data"],
            *(f"{row[f'{x}_error']:.1e}" for x in ("loss", "de")),
            f"{row['dc_error']:.1e}{' !' if row['marked'] else ''}",
            style="bold" if row["method"].startswith("cce_") else None,
        )
    return printed


def gradients(row: Row) -> float:
    """MiB of the gradients of e and c, which every method returns."""
    (tokens, width, vocabulary), size = row["shape"], 4 if row["dtype"] == "float32" else 2
    return size * width * (tokens + vocabulary) / 2**20


def absences(results: Results) -> list[str]:
    """A line for each method that has no row, and why."""
    lines = [f"missing: {x['method']} ({x['reason']})" for x in results.missing]
    return lines + [f"failed: {x['method']} at {title(x)} ({x['reason']})" for x in results.failed]


def write(out: Path, results: Results) -> None:
    """OUT.json."""
    rows = [{key: _plain(value) for key, value in row.items()} for row in results.rows]
    kept = {**environment(), "rows": rows, "missing": results.missing, "failed": results.failed}
    out.with_suffix(".json").write_text(json.dumps(kept, indent=1, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    """JSON has no NaN: what could not be measured is null."""
    return None if isinstance(value, float) and math.isnan(value) else value

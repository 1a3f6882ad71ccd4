"""Where the figures come from, and how they are printed and written."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import pandas as pd

from bench.peers import PACKAGES

Row = dict[str, Any]


def environment() -> Row:
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
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def write(out: Path, **found: Any) -> None:
    """OUT.json: what was found, and where."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(environment() | found, indent=1, allow_nan=False) + "\n")


def table(rows: Sequence[Row], **formats: str) -> str:
    """The columns of these names, each number in its format; "" for text."""
    frame = pd.DataFrame(rows).reindex(columns=list(formats))
    for name, of in formats.items():
        cells = [f"{x:{of}}" if pd.notna(x) else "–" for x in frame[name]]
        frame[name] = cells if of else [cell.ljust(max(map(len, cells))) for cell in cells]
    return frame.to_string(index=False)


def size(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200] if text else ''}"

"""JAX's persistent cache of compiled programs, for tests on a CPU: a program is compiled once, and again if it changes.

The tests draw the same calls in each run. Most of their programs are those of the run before, and compiling them is
half of the time.
"""

import shutil
from pathlib import Path

MOST = 2**30  # bytes of programs of earlier runs, above which a run begins without any


def environment(folder: Path) -> dict[str, str]:
    """What tells a process to keep its programs in the folder: all, as small ones are compiled in many processes."""
    return {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def emptied(folder: Path) -> Path:
    """The folder, without what is in it where that is too much."""
    if folder.exists() and sum(file.stat().st_size for file in folder.iterdir()) > MOST:
        shutil.rmtree(folder)
    return folder

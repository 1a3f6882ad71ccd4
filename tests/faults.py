"""Plants one fault after another in a copy of the packages, and asks whether the tests that should see it fail.

    python -m tests.faults                       every fault that any JAX shows
    python -m tests.faults --jax11 --python P    those that JAX 0.11 alone shows, by an interpreter that has it
    python -m tests.faults --only 12 40          these, by number
    python -m tests.faults --sound               the same tests without any fault: all must pass

A fault that survives needs a test that sees it. The faults are in tests/planted.txt.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests import programs
from tests.search.processes import gpus

ROOT = Path(__file__).resolve().parent.parent
# Of a fault that names no test. Named calls come first: which ones are drawn changes with tests/search/calls.py.
CALLS = "test_calls.py", "test_search.py::test_calls_without_a_gpu"
PACKAGES = ("kernels", "cce_jax", "cce_torch")
COPIED = (*PACKAGES, "tests", "pyproject.toml")
SECONDS = 400  # a fault may make a kernel wait for ever
ANSWERS, NOTHING = {0: "survived", 1: "caught"}, "no test ran"  # by pytest's exit status


@dataclass
class Fault:
    file: str
    what: str
    tests: tuple[str, ...] = CALLS  # arguments of pytest, in the folder tests
    jax11: bool = False  # whether the test needs JAX 0.11: its GPU interpreter, or to compile for an absent GPU
    old: str = ""
    new: str = ""


def listed() -> list[Fault]:
    """The faults of tests/planted.txt."""
    file, found = "", []
    for line in (ROOT / "tests" / "planted.txt").read_text().splitlines():
        sign, text = line[4:5], line[5:]
        if not line or line.startswith("#"):
            continue
        if not line.startswith(" "):
            file = line
        elif not line.startswith("    "):
            found.append(Fault(file, line.strip()))
        elif sign == "@":
            needs, test = text.split(maxsplit=1) if text.startswith("jax11") else ("", text.strip())
            found[-1].tests, found[-1].jax11 = (test,), bool(needs)
        elif sign == "-":
            found[-1].old += "\n" * bool(found[-1].old) + text
        elif sign == "+":
            found[-1].new += "\n" * bool(found[-1].new) + text
        else:
            raise ValueError(f"tests/planted.txt: {line!r}")
    return found


FAULTS = listed()


@contextmanager
def planted(fault: Fault | None) -> Iterator[Path]:
    """A copy of the packages and the tests, with the fault, or sound."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, copy / name)
        if fault is not None:
            file = copy / fault.file
            text = file.read_text()
            assert text.count(fault.old) == 1, f"{fault.file} has {fault.old!r} {text.count(fault.old)} times"
            file.write_text(text.replace(fault.old, fault.new))
        yield copy


def answer(fault: Fault, sound: bool, python: str) -> tuple[str, str]:
    """What became of the fault; and the test that failed, with pytest's first line that says why."""
    with planted(None if sound else fault) as copy:
        command = [python, "-m", "pytest", "-x", "-p", "no:cacheprovider", *fault.tests]
        paths = f"{copy}{os.pathsep}{copy / 'kernels'}"
        environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {} if gpus() else programs.environment(ROOT / ".pytest_cache" / "d" / "programs")
        try:
            done = subprocess.run(
                command, cwd=copy / "tests", env=environment, timeout=SECONDS, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return "no end", f"after {SECONDS} s: the test must fail sooner, or be another"
    output = done.stdout.strip().splitlines()
    reasons = [line.removeprefix("E").strip() for line in output if line.startswith(("E  ", "ERROR"))]
    failed = [f"{line.split(' - ')[0].removeprefix('FAILED ')}:" for line in output if line.startswith("FAILED ")]
    ran = any(word in done.stdout for word in (" passed", " failed"))  # not only skipped
    status = ANSWERS.get(done.returncode, NOTHING) if ran else NOTHING
    return status, " ".join([*failed[:1], (reasons or output or [done.stderr.strip()])[0][:100]])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=int, nargs="+", metavar="K", help="numbers of faults")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that runs the tests")
    parser.add_argument("--jobs", type=int, default=1, help="how many run side by side")
    parser.add_argument("--sound", action="store_true", help="plant nothing: every test must pass")
    parser.add_argument("--jax11", action="store_true", help="the faults whose tests need JAX 0.11, and no others")
    asked = parser.parse_args()
    numbers = asked.only or [k for k, x in enumerate(FAULTS) if x.jax11 == asked.jax11]
    wanted = "survived" if asked.sound else "caught"

    def run(k: int) -> bool:
        begun = time.monotonic()
        found, why = answer(FAULTS[k], asked.sound, asked.python)
        seconds = time.monotonic() - begun
        print(f"{k:3} {found:11} {seconds:4.0f} s  {FAULTS[k].file}: {FAULTS[k].what}  [{why}]", flush=True)
        return found == wanted

    with ThreadPoolExecutor(asked.jobs) as pool:
        held = list(pool.map(run, numbers))
    print(f"{sum(held)} of {len(held)} {'sound' if asked.sound else 'caught'}")
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Several devices. The tests of tests/devices run in processes of their own, on 8 devices that XLA makes of the CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GROUPS = ("layouts", "options", "drawn", "errors")


@pytest.mark.parametrize("group", GROUPS)
def test_on_eight_devices(group):
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
               f"tests/devices/{group}.py"]  # fmt: skip
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert re.search(r"\d+ passed", run.stdout), run.stdout
    assert "skipped" not in run.stdout

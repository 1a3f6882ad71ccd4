"""What a package says of itself, and works without."""

import importlib.metadata
import importlib.resources
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cce_jax
import cce_torch
from cce_kernels import compat

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("package", [cce_jax, cce_torch])
def test_version(package, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{name} 1.2.3")
    assert package.__version__ == "cce-jax 1.2.3"

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert package.__version__ == "0+unknown"
    with pytest.raises(AttributeError, match="no attribute 'versoin'"):
        package.versoin  # noqa: B018


@pytest.mark.parametrize("package", ["cce_jax", "cce_torch", "cce_kernels"])
def test_the_types_are_there_for_others_to_check(package):
    assert importlib.resources.files(package).joinpath("py.typed").is_file()


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import cce_jax, jax._src.xla_bridge as bridge
assert not bridge._backends, bridge._backends
try:
    import cce_torch
except ModuleNotFoundError as error:
    assert error.name == "torch" and "pip install torch" in str(error), error
else:
    raise AssertionError("torch was not needed")
"""


def test_importing_starts_no_backend_and_without_torch_the_error_says_what_to_install():
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True, timeout=120)


WITHOUT_TRITON = """
import sys
sys.modules["jaxlib.mlir._mlir_libs._triton_ext"] = None  # what the wheels of jaxlib for Windows lack
import jax, jax.numpy as jnp
from cce_jax import linear_cross_entropy

e, c, targets = jnp.ones((300, 128), jnp.bfloat16), jnp.ones((256, 128), jnp.bfloat16), jnp.zeros(300, jnp.int32)
for impl in ("auto", "chunked", "reference"):
    gradient = jax.jit(jax.value_and_grad(lambda e, c: linear_cross_entropy(e, c, targets, impl=impl), (0, 1)))
    assert abs(gradient(e, c)[0] - jnp.log(256)) < 1e-5
    gradient.trace(e, c).lower(lowering_platforms=("cuda",))
try:
    linear_cross_entropy(e, c, targets, impl="cce")
except NotImplementedError as error:
    print(error)
"""


def test_without_triton_all_but_its_kernels_work():
    run = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "impl='cce' needs Triton, which this jaxlib lacks" in run.stdout
    assert "impl='chunked'" in run.stdout


IN_A_NEWER_JAX = """
import importlib, sys, warnings
import jax, jax.numpy as jnp, torch
jax.__version__, jax.__version_info__ = "0.13.1", (0, 13, 1)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import cce_jax, cce_torch
    from cce_kernels import compat
    assert not seen, seen[0]
    e, c = jnp.ones((3, 4)), jnp.ones((5, 4))
    def in_jax(n):
        return cce_jax.linear_cross_entropy(e[:n], c, jnp.zeros(n, jnp.int32))
    def in_torch(n):
        return cce_torch.linear_cross_entropy(torch.ones(n, 4), torch.ones(5, 4), torch.zeros(n).long(), impl="chunked")
    first, second = (in_jax, in_torch) if sys.argv[1] == "cce_jax" else (in_torch, in_jax)
    found = [first(3)]
    print(*(x.message for x in seen))
    found += [first(2), second(3), second(2)]
    assert len(seen) == 1, seen
    assert all(abs(float(x) - 1.6094) < 1e-3 for x in found), found
    jax.__version_info__ = (0, 12, 9)
    importlib.reload(compat).warn_if_untested()
    assert len(seen) == 1, seen
"""


@pytest.mark.parametrize("first", ["cce_jax", "cce_torch"])
def test_the_first_call_warns_of_a_jax_that_was_not_tested(first):
    """Once, at the call and not at the import; and the call works."""
    command = [sys.executable, "-c", IN_A_NEWER_JAX, first]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout == (
        "cce-jax was tested with JAX up to 0.12, and this is JAX 0.13.1: should a call fail or be slow, "
        "update cce-jax, or install 'jax<0.13'\n"
    )


def test_the_newest_jax_that_was_tested_is_the_newest_that_is_installed():
    bounds = re.findall(r"\bjax[\w\[\]-]*>=[\d.]+,<([\d.]+)", (ROOT / "pyproject.toml").read_text())
    major, minor = compat.NEWEST
    assert set(bounds) == {f"{major}.{minor + 1}"}
    assert len(bounds) >= 3

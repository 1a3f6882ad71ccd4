"""What a package says of itself, and works without."""

import importlib.metadata
import importlib.resources
import subprocess
import sys

import pytest

import cce_jax
import cce_torch


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
import cce_jax
try:
    import cce_torch
except ModuleNotFoundError as error:
    assert error.name == "torch" and "pip install torch" in str(error), error
else:
    raise AssertionError("torch was not needed")
"""


def test_without_torch_the_error_says_what_to_install():
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

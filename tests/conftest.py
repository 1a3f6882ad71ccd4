import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("all", deadline=None, derandomize=True)
hypothesis.settings.load_profile("all")


def pytest_collection_modifyitems(config, items):
    """Tests marked gpu need one; on a machine without, they are skipped by name, not silently absent."""
    if jax.default_backend() == "gpu":
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))

"""`make test-nightly` draws more at random than `make test` has time for, from the same, and compiles more kernels."""

import os

NIGHTLY = os.environ.get("CCE_TESTS") == "nightly"


def draws(usual: int, nightly: int) -> int:
    """How many to draw in this run."""
    return nightly if NIGHTLY else usual

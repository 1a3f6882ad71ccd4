"""The core's numbers as tests compare them: of the logits themselves, not relative to a reference."""

from typing import Any

import numpy as np

from cce_kernels.numbers import Statistics


def of_kept(numbers: Statistics, kept: np.ndarray, weights: Any = None, vocabulary: int = 0) -> dict[str, np.ndarray]:
    """lse, target, mean and ids of the kept tokens; and as `sum` that of w_v·(lse − z_v), which a loss is made of.

    weights: (V,), of the sum; None: 1 for each of V columns.
    """
    reference = np.float64(numbers.reference)
    weight = vocabulary if weights is None else np.sum(np.float64(weights))
    found = {"lse": reference + np.float64(numbers.log_mass), "target": np.float64(numbers.target)}
    found |= {} if numbers.sum is None else {"sum": weight * np.float64(numbers.log_mass) - np.float64(numbers.sum)}
    found |= {} if numbers.mean is None else {"mean": np.float64(numbers.mean) + reference}
    found |= {} if numbers.ids is None else {"ids": np.float64(numbers.ids)}
    return {name: np.float32(x)[kept] for name, x in found.items()}

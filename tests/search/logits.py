"""The logits of a drawn call in float64, what float32 may make of them, and their slope under the softcap."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.cases import Inputs
from tests.search.calls import Program

EPS = 2.0**-23
BLOCK = 2**25  # logits at a time


class Logits:
    """Of the kept tokens of a call, computed by xp (NumPy or PyTorch) a block of tokens at a time."""

    def __init__(self, given: Inputs, e: np.ndarray, targets: np.ndarray, program: Program, xp: Any, device: str):
        self.xp, self.device, self.program = xp, device, program
        self.e, self.c = self.put(e), self.put(given.c)
        bias = given.optional.get("bias")
        self.bias = None if bias is None else self.put(bias)
        weights = given.optional.get("class_weight")
        self.weights = self.put(np.ones(program.vocabulary) if weights is None else weights)
        self.valid = (targets >= 0) & (targets < program.vocabulary)
        self.targets = np.where(self.valid, targets, 0)
        self.scale = 1.0 if program.logit_scale is None else program.logit_scale
        self.norms = self.norm(self.e), self.norm(self.c)

    def put(self, x: np.ndarray) -> Any:
        x = np.asarray(x)
        if self.xp is np:
            return x.astype(np.float64)
        x = x.astype(np.float32) if x.dtype.itemsize == 2 else x  # exact, and half of what float64 takes to copy
        return self.xp.tensor(x, device=self.device).double()

    def get(self, x: Any) -> np.ndarray:
        return x if self.xp is np else x.cpu().numpy()

    def norm(self, x: Any) -> Any:
        return self.xp.sqrt((x * x).sum(1))

    def blocks(self) -> Iterator[slice]:
        rows = max(1, BLOCK // self.program.vocabulary)
        return (slice(i, i + rows) for i in range(0, self.targets.size, rows))

    def logits(self, rows: slice) -> tuple[Any, Any, Any]:
        """z, ∂z/∂y and δz of a block, each (rows, V)."""
        xp, scale, kappa = self.xp, self.scale, self.program.softcap
        y = self.e[rows] @ self.c.T
        reach = self.norms[0][rows][:, None] * self.norms[1]
        if self.bias is not None:
            y, reach = y + self.bias, reach + xp.abs(self.bias)
        y = scale * y
        # A tensor core adds 16 products at a time to the sum and cuts off what lies below the largest one's last digit,
        # always towards 0. A sum of products of one sign loses up to ε of itself at each step; bounds.F doubles what is
        # counted here. Of products of float16, which have 22 digits, also most digits of the small ones are cut off.
        steps = self.program.width / {"float32": 64, "bfloat16": 32, "float16": 16}[self.program.dtype]
        error = EPS * (abs(scale) * reach + (2 + steps) * xp.abs(y))
        if kappa is None:
            return y, xp.ones_like(y), error + 2 * EPS * xp.abs(y)
        z = kappa * xp.tanh(y / kappa)
        slope = 1 / xp.cosh(xp.clip(y / kappa, -300, 300)) ** 2
        return z, slope, slope * error + 2 * EPS * xp.abs(z)

    def at_targets(self, x: Any, rows: slice) -> np.ndarray:
        return self.get(x)[np.arange(x.shape[0]), self.targets[rows]]

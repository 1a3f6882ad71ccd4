"""One list of cases for every test: what is asked of linear_cross_entropy, and inputs to ask it with."""

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
ARRAYS = ("bias", "class_weight", "token_weight")


@dataclass(frozen=True)
class Case:
    """A call: shapes, static options, and which optional arrays it has."""

    name: str
    leading: tuple[int, ...] = (37,)
    width: int = 20
    vocabulary: int = 203
    arrays: tuple[str, ...] = ()
    ignored: float = 0.2  # share of the targets that are ignored
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


EVERY_OPTION = {"softcap": 5.0, "logit_scale": 1.3, "label_smoothing": 0.2, "z_loss": 0.02, "shift": 1}
CASES = [
    Case("plain"),
    Case("none ignored", ignored=0.0),
    Case("tiles exactly", leading=(32,), width=32, vocabulary=192),
    Case("one token", leading=(), ignored=0.0),
    Case("one of everything", leading=(1,), width=1, vocabulary=1, ignored=0.0),
    Case("three axes", leading=(2, 3, 5)),
    Case("bias", arrays=("bias",)),
    Case("softcap", options={"softcap": 3.0}),
    Case("scale", options={"logit_scale": 0.7}),
    Case("bias, scale and softcap", arrays=("bias",), options={"logit_scale": 1.7, "softcap": 4.0}),
    Case("none", options={"reduction": "none"}),
    Case("lse", options={"return_lse": True, "reduction": "none"}),
    Case("shift", leading=(3, 11), options={"shift": True}),
    Case("shift by 4, weights", leading=(2, 13), arrays=("token_weight",), options={"shift": 4, "reduction": "none"}),
    Case("label smoothing", options={"label_smoothing": 0.1}),
    Case("smoothing and class weights", arrays=("class_weight",), options={"label_smoothing": 0.3}),
    Case("num_items", options={"num_items": 12.5}),
    Case("everything", leading=(3, 9), arrays=ARRAYS, options=EVERY_OPTION | {"return_lse": True}),
]


@dataclass(frozen=True)
class Inputs:
    """NumPy arrays of one call, and the cotangents of its loss and lse."""

    e: np.ndarray
    c: np.ndarray
    targets: np.ndarray
    optional: dict[str, np.ndarray]
    of_loss: np.ndarray
    of_lse: np.ndarray

    def differentiable(self) -> dict[str, np.ndarray]:
        also = {k: v for k, v in self.optional.items() if k in ("bias", "token_weight")}
        return {"e": self.e, "c": self.c, **also}


def inputs(case: Case, dtype: str = "float32", seed: int = 0, ignore_index: int = -100) -> Inputs:
    """Logits of standard deviation about 3: peaked enough that no term of the loss is negligible."""
    rng = np.random.default_rng(seed)
    kind = DTYPES[dtype]

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    e = (normal(*case.leading, case.width) * 3 / np.sqrt(case.width)).astype(kind)
    c = normal(case.vocabulary, case.width).astype(kind)
    targets = np.asarray(rng.integers(0, case.vocabulary, case.leading), np.int32)
    targets = np.where(rng.uniform(size=case.leading) < case.ignored, ignore_index, targets).astype(np.int32)
    made = {
        "bias": normal(case.vocabulary).astype(kind),
        "class_weight": rng.uniform(0.2, 2.0, case.vocabulary).astype(np.float32),
        "token_weight": rng.uniform(0.0, 2.0, case.leading).astype(np.float32),
    }
    shift = int(case.options.get("shift", 0))
    result = (*case.leading[:-1], case.leading[-1] - shift) if shift else case.leading
    whole = case.options.get("reduction", "mean") == "none"
    of_loss, of_lse = normal(*(result if whole else ())), normal(*result)
    return Inputs(e, c, targets, {k: made[k] for k in case.arrays}, of_loss, of_lse)

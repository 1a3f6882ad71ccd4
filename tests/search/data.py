"""The arrays of a drawn call."""

import ml_dtypes
import numpy as np

from bench.data import CANDIDATES, DECAY, LARGEST_LOGIT, Shape, _zipf_rows
from cce_kernels.block_sparse import PART
from tests.cases import DTYPES, Inputs
from tests.search.calls import Call, Data, Program


def drawn_arrays(call: Call) -> Inputs:
    """NumPy arrays with e, c and bias rounded to e's type: the truth is that of the rounded numbers. c is (V, D)."""
    program, data = call.program, call.data
    rng = np.random.default_rng(data.seed)
    kind = DTYPES[program.dtype]
    vocabulary, leading = program.vocabulary, program.leading
    targets = rng.integers(0, vocabulary, leading)
    e, c, targets = _embeddings(rng, data, targets.reshape(-1), program.width, vocabulary)
    targets = targets.reshape(leading)

    ignored = _ignored(rng, data.ignored, program.tokens).reshape(leading)
    bad = rng.permutation(program.tokens)[: data.out_of_range]
    outside = np.array([vocabulary, 2**31 - 2, -2, -(2**31) + 1])
    targets.reshape(-1)[bad] = rng.choice(outside, len(bad))
    targets = np.where(ignored, program.ignore_index, targets)

    weights = rng.uniform(0.0, 2.0, leading).astype(np.float32)
    e = e.reshape(*leading, program.width)
    if data.poison:  # the shift leaves targets at the start unused, and embeddings at the end
        predicted = ignored
        if program.shift:
            predicted = np.zeros(leading, bool)
            predicted[..., : -program.shift] = ignored[..., program.shift :]
        e = np.where(predicted[..., None], float(data.poison), e)
        weights = np.where(ignored, float(data.poison), weights).astype(np.float32)
    made = {
        "bias": (rng.standard_normal(vocabulary) + data.bias).astype(kind),
        "class_weight": rng.uniform(0.2, 2.0, vocabulary).astype(np.float32),
        "token_weight": weights,
    }
    result = (*leading[:-1], leading[-1] - program.shift) if program.shift else leading
    of_loss, of_lse = (
        (data.cotangent * rng.standard_normal(shape)).astype(np.float32)
        for shape in (result if program.reduction == "none" else (), result)
    )
    if data.odd and program.reduction == "none":
        without_loss, without_lse, opposite = (rng.uniform(size=result) < share for share in (0.2, 0.2, 0.1))
        of_loss = np.where(without_loss, 0, of_loss).astype(np.float32)
        of_lse = np.where(opposite, -of_loss, np.where(without_lse, 0, of_lse)).astype(np.float32)
    return Inputs(
        e.astype(kind), c.astype(kind), targets.astype(np.int32), {k: made[k] for k in program.arrays}, of_loss, of_lse
    )


def unrounded(name: str, x: np.ndarray, program: Program) -> np.ndarray:
    """x; where the call has it in a wider type than e's, numbers of that type that are x when rounded to e's type."""
    wide = np.dtype(DTYPES[program.type_of(name)])
    if x.dtype == wide or name not in ("c", "bias"):
        return x
    most = float(ml_dtypes.finfo(x.dtype).eps) / 8  # half of what rounds to another number, at every place of x
    noise = np.random.default_rng(x.size).uniform(-most, most, x.shape).astype(np.float32)
    return (x.astype(np.float32) * (1 + noise)).astype(wide)


def _embeddings(
    rng: np.random.Generator, data: Data, targets: np.ndarray, width: int, vocabulary: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """e (N, D), c (V, D) with rows of about unit length, and targets (N,).

    flat: logits alike, targets unrelated to them. trained: a few likely tokens, Zipf distributed, the target one of
    them. confident: the target's logit far above the others, for one token in five far below. far: logits to ±1e4.
    together: likely columns stand side by side, the same ones for neighbouring tokens.
    """
    tokens = targets.size
    c = rng.standard_normal((vocabulary, width), np.float32) / np.float32(np.sqrt(width))
    if data.kind == "trained":
        likely = _likely(rng, tokens, vocabulary)
        ranks = np.arange(1, likely.shape[1] + 1)
        logits = (LARGEST_LOGIT - DECAY * np.log(ranks)).astype(np.float32)
        e = np.zeros((tokens, width), np.float32)
        for k, logit in enumerate(logits):
            e += logit * c[likely[:, k]]
        p = np.exp(logits - logits.max())
        return e, c, likely[np.arange(tokens), rng.choice(ranks.size, tokens, p=p / p.sum())]
    if data.kind == "together":
        group = np.arange(vocabulary) // PART
        c = 0.5 * c + rng.standard_normal((vocabulary, width), np.float32)[group] / np.float32(np.sqrt(width))
        first = np.repeat(rng.integers(vocabulary, size=tokens // PART + 1) // PART * PART, PART)[:tokens]
        targets = np.minimum(first + rng.integers(PART, size=tokens), vocabulary - 1)
        own = c[targets]
        return data.size * own / np.maximum(np.sum(own * own, axis=1, keepdims=True), 1e-3), c, targets
    if data.kind == "confident":
        own = c[targets]
        side = np.where(rng.uniform(size=(tokens, 1)) < 0.2, -1.0, 1.0)
        e = side * data.size * own / np.maximum(np.sum(own * own, axis=1, keepdims=True), 1e-3)
        return np.clip(e, -6e4, 6e4), c, targets
    return data.size * rng.standard_normal((tokens, width), np.float32), c, targets


def _likely(rng: np.random.Generator, tokens: int, vocabulary: int) -> np.ndarray:
    """(N, up to CANDIDATES) distinct tokens a row, Zipf distributed."""
    if vocabulary > 16 * CANDIDATES:
        return _zipf_rows(Shape(tokens, 0, vocabulary), rng)
    chances = rng.gumbel(size=(tokens, vocabulary)) - np.log(np.arange(1, vocabulary + 1))
    return np.argsort(-chances, axis=1)[:, :CANDIDATES]


def _ignored(rng: np.random.Generator, how: str, tokens: int) -> np.ndarray:
    """(N,) bool."""
    place, chance = np.arange(tokens), rng.uniform(size=tokens)
    chosen = rng.integers(tokens)
    run = max(2, int(rng.integers(2, 600)) % max(tokens, 3))
    return {
        "none": place < 0,
        "one": place == chosen,
        "few": chance < 0.1,
        "most": chance < 0.75,
        "runs": place % run < run * rng.uniform(0.3, 0.95),
        "all but one": place != chosen,
        "all": place >= 0,
    }[how]

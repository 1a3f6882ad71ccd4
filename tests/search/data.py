"""The arrays of a drawn call."""

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from bench.data import CANDIDATES, DECAY, LARGEST_LOGIT, Shape, _zipf_rows
from cce_kernels.block_sparse import PART
from tests.cases import DTYPES
from tests.search.calls import DIVERGENCE, Call, Data, Program
from tests.search.functions import ARGUMENTS

TYPES = DTYPES | {"float64": np.dtype(np.float64), "": np.dtype(np.float32)}


@dataclass(frozen=True)
class Given:
    """NumPy arrays of a call, in its types; e, c, bias and the teacher's are rounded to the narrower type of the call.

    c is (V, D) and the teacher's (V, D') whatever the layout.
    """

    e: np.ndarray
    c: np.ndarray
    targets: np.ndarray
    optional: dict[str, np.ndarray]  # bias, class_weight, token_weight
    cotangents: dict[str, np.ndarray]  # of the results that are differentiated
    temperature: np.ndarray | None = None  # one for each token of e
    ids: np.ndarray | None = None  # (..., K)
    arguments: tuple[np.ndarray, ...] = ()  # of fn, of the shape of targets after the shift
    teacher: dict[str, np.ndarray] = field(default_factory=dict)  # e, c, bias

    def differentiable(self) -> dict[str, np.ndarray]:
        also = {k: v for k, v in self.optional.items() if k in ("bias", "token_weight")}
        return {"e": self.e, "c": self.c, **also}


def drawn_arrays(call: Call) -> Given:
    """The truth is that of these numbers."""
    program, data = call.program, call.data
    rng = np.random.default_rng(data.seed)
    vocabulary, leading, width = program.vocabulary, program.leading, program.width
    masked = rng.permutation(vocabulary)[: data.masked]
    free = np.setdiff1d(np.arange(min(vocabulary, np.iinfo(program.index_dtype).max + 1)), masked)
    targets = free[rng.integers(0, free.size, leading)]
    e, c, targets = _embeddings(rng, data, targets.reshape(-1), width, vocabulary)
    targets = np.where(np.isin(targets, free), targets, free[targets % free.size]).reshape(leading)
    if data.offset:
        feature = rng.standard_normal(width, np.float32)
        feature /= max(float(np.linalg.norm(feature)), 1e-3)
        e, c = e + np.float32(data.offset) * feature, c + feature
    if program.strides_e == "expanded":
        e = np.broadcast_to(e[:1], e.shape)
    if program.strides_c == "expanded":
        c = np.broadcast_to(c[:1], c.shape)

    ignored = _ignored(rng, data.ignored, program.tokens).reshape(leading)
    held = np.iinfo(program.index_dtype)
    bad = rng.permutation(program.tokens)[: data.out_of_range]
    outside = [vocabulary, 2**31 - 2, -2, -(2**31) + 1, 2**32 + 1, -(2**32) + 1]
    outside = [x for x in outside if held.min <= x <= held.max and not 0 <= x < vocabulary]
    if outside:
        targets.reshape(-1)[bad] = rng.choice(np.array(outside), len(bad))
    targets = np.where(ignored & (program.function != DIVERGENCE), program.ignore_index, targets)

    weights = (data.weight * rng.uniform(0.0, 2.0, leading)).astype(np.float32)
    e = e.reshape(*leading, width)
    of_teacher = _teacher(rng, call, e, c, masked)
    if program.function == DIVERGENCE:
        weights = np.where(ignored, 0, weights + np.float32(0.1 * data.weight)).astype(np.float32)
    if data.poison:  # the shift leaves targets at the start unused, and embeddings at the end
        predicted = ignored
        if program.shift:
            predicted = np.zeros(leading, bool)
            predicted[..., : -program.shift] = ignored[..., program.shift :]
        e = np.where(predicted[..., None], float(data.poison), e)
        if program.function == DIVERGENCE:
            of_teacher["e"] = np.where(predicted[..., None], float(data.poison), of_teacher["e"])
        else:
            weights = np.where(ignored, float(data.poison), weights).astype(np.float32)
    bias = rng.standard_normal(vocabulary) + data.bias
    bias[masked] = -np.inf
    made = {"bias": bias, "class_weight": rng.uniform(0.2, 2.0, vocabulary).astype(np.float32), "token_weight": weights}
    kind = TYPES[program.dtype]
    made["bias"] = made["bias"].astype(kind)
    of_fn = program.predicting
    arguments = [rng.standard_normal(of_fn) - np.log(vocabulary) * (k == 0) for k in range(_arguments(program))]
    return Given(
        e.astype(kind),
        np.ascontiguousarray(c).astype(kind),
        targets.astype(program.index_dtype),
        {k: made[k] for k in program.arrays},
        _cotangents(rng, program, data),
        _temperatures(rng, program),
        _ids(rng, program, targets, free) if program.ids else None,
        tuple(np.asarray(data.weight * x, np.float32) for x in arguments),
        {name: x.astype(TYPES[program.teacher_dtype]) for name, x in of_teacher.items()},
    )


def _arguments(program: Program) -> int:
    return ARGUMENTS[program.fn] if program.fn else 0


def _cotangents(rng: np.random.Generator, program: Program, data: Data) -> dict[str, np.ndarray]:
    """Of each result that is differentiated."""
    result, whole = program.predicting, program.reduction == "none"
    shapes = {name: result for name in program.objective}
    shapes |= {"loss": result if whole else ()} if "loss" in shapes else {}
    shapes |= {"id_log_probs": (*result, program.ids)} if "id_log_probs" in shapes else {}
    made = {name: data.cotangent * rng.standard_normal(shape) for name, shape in shapes.items()}
    if data.odd and whole and "loss" in made:
        made["loss"] = np.where(rng.uniform(size=result) < 0.2, 0, made["loss"])
        if "lse" in made:
            opposite, without = (rng.uniform(size=result) < share for share in (0.1, 0.2))
            made["lse"] = np.where(opposite, -made["loss"], np.where(without, 0, made["lse"]))
    return {name: np.asarray(x, np.float32) for name, x in made.items()}


def _temperatures(rng: np.random.Generator, program: Program) -> np.ndarray | None:
    if not program.temperatures:
        return None
    return np.asarray(program.temperature * np.exp(rng.uniform(-1, 1, program.leading)), np.float32)


def _ids(rng: np.random.Generator, program: Program, targets: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Ids of each token: some equal to others and to the target, some outside of the vocabulary."""
    held, shape = np.iinfo(program.index_dtype), (*program.leading, program.ids)
    found = free[rng.integers(0, free.size, shape)]
    named = np.isin(targets, free)[..., None] & (rng.uniform(size=shape) < 0.2)
    found = np.where(named, targets[..., None], found)
    outside = np.array([x for x in (-100, -1, program.vocabulary, 2**32 + 1, -(2**32)) if held.min <= x <= held.max])
    if outside.size:
        outside = outside[(outside < 0) | (outside >= program.vocabulary)]
    if outside.size:
        found = np.where(rng.uniform(size=shape) < 0.15, rng.choice(outside, shape), found)
    if program.ids > 1:
        found[..., 1] = np.where(rng.uniform(size=program.leading) < 0.2, found[..., 0], found[..., 1])
    return found.astype(program.index_dtype)


def _teacher(
    rng: np.random.Generator, call: Call, e: np.ndarray, c: np.ndarray, masked: np.ndarray
) -> dict[str, np.ndarray]:
    program, data = call.program, call.data
    if program.function != DIVERGENCE:
        return {}
    width, vocabulary = program.teacher_width, program.vocabulary
    if data.teacher != "other" and width == program.width:
        noise = 1e-3 if data.teacher == "near" else 0.0
        made = {name: x * (1 + noise * rng.standard_normal(x.shape)) for name, x in (("e", e), ("c", c))}
    else:
        size = data.size if data.kind in ("flat", "far") else 3.0
        of_e = size * rng.standard_normal((*program.leading, width))
        made = {"e": of_e, "c": rng.standard_normal((vocabulary, width)) / np.sqrt(width)}
    if program.teacher_bias:
        made["bias"] = rng.standard_normal(vocabulary)
        made["bias"][masked] = -np.inf
    return made


def unrounded(name: str, x: np.ndarray, program: Program) -> np.ndarray:
    """x; where the call has it in a wider type than e's, numbers of that type that are x when rounded to e's type."""
    wide = np.dtype(TYPES[program.type_of(name)])
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

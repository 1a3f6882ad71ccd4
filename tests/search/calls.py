"""A call of linear_cross_entropy as the random search draws it: a program, which is compiled once, and its data."""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from cce_kernels.tokens import MANY

SHARED = 4  # calls of one program, which differ in their data
DTYPES = ("bfloat16", "float16", "float32")
OPTIONS = ("vocab_axis", "reduction", "softcap", "logit_scale", "label_smoothing", "z_loss", "num_items")
OPTIONS += ("shift", "ignore_index", "gradient_tolerance")
TOLERANCES = 0.0, 2.0**-9, 2.0**-7, 2.0**-5, 0.3
DEFAULT = -1  # the memory_budget of a call that gives none


class _Literal:
    """A dataclass whose repr leaves out what is at its default, so that a failure is a short literal for a test."""

    def __repr__(self) -> str:
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class Program(_Literal):
    """All that is static: shapes, types, options, and which gradients are wanted."""

    package: str = "jax"  # or "torch"
    impl: str = "cce"  # chunked, reference, and in torch torch_compile
    leading: tuple[int, ...] = (40,)
    width: int = 20
    vocabulary: int = 229
    dtype: str = "float32"
    mixed: bool = False  # c and bias are float32 beside an e of 16 bits
    vocab_axis: int = 0
    arrays: tuple[str, ...] = ()  # of bias, class_weight and token_weight
    wanted: tuple[str, ...] = ("e", "c")  # and bias, token_weight; none for an evaluation
    objective: str = "loss"  # what is differentiated: loss, lse, or both
    return_lse: bool = False
    reduction: str = "mean"
    softcap: float | None = None
    logit_scale: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    num_items: float | None = None
    shift: int = 0
    ignore_index: int = -100
    memory_budget: int | str = DEFAULT
    gradient_tolerance: float = 0.0
    offloaded: bool = False  # in torch: a hook moves what the graph saves to row-major memory of the CPU, and back

    @property
    def tokens(self) -> int:
        return int(np.prod(self.leading))

    @property
    def may_save(self) -> bool:
        """Whether the backward pass may use exponentials that were rounded to 16 bits."""
        return self.dtype == "bfloat16" and self.impl in ("auto", "cce") and self.memory_budget != 0

    @property
    def may_leave_out(self) -> bool:
        """Whether blocks of dz may be left out: by the kernels for Hopper, which take MANY tokens or more."""
        return self.gradient_tolerance > 0 and self.may_save and self.label_smoothing == 0 and self.tokens >= MANY

    def type_of(self, name: str) -> str:
        """The type of an array, and of its gradient."""
        return "float32" if name == "token_weight" or (self.mixed and name in ("c", "bias")) else self.dtype

    def options(self) -> dict[str, Any]:
        """The keyword arguments but for arrays and impl."""
        budget = self.memory_budget
        given = {name: getattr(self, name) for name in OPTIONS}
        return given | ({} if budget == DEFAULT else {"memory_budget": budget}) | {"precision": "highest"}


@dataclass(frozen=True, repr=False)
class Data(_Literal):
    """What the arrays hold."""

    seed: int = 0
    kind: str = "flat"  # trained, confident, far or together
    size: float = 1.0  # of the logits of flat and far, the standard deviation; of confident and together, the target's
    ignored: str = "none"  # one, few, most, runs, all but one, all
    poison: str = ""  # what ignored tokens' embeddings and weights hold: nan or inf
    out_of_range: int = 0  # of so many tokens the target is
    bias: float = 0.0  # the mean of the biases
    cotangent: float = 1.0  # the size of the cotangents
    odd: bool = False  # of "none": some tokens' loss or lse, or both, have no cotangent, or none in all


@dataclass(frozen=True)
class Call:
    program: Program
    data: Data


def draw(seed: int, number: int, where: str) -> Call:
    """The call of this number: where is "small" (an interpreter), "hopper" (that of Mosaic GPU) or "gpu"."""
    names = ["small", "hopper", "gpu"]
    rng = np.random.default_rng([seed, names.index(where), number // SHARED])
    program = _program(rng, where)
    return Call(program, _data(np.random.default_rng([seed, names.index(where), number, 1]), program))


def _chosen(rng: np.random.Generator, **weights: float) -> str:
    """A name, as often as its weight says."""
    shares = np.array(list(weights.values()))
    return str(rng.choice(list(weights), p=shares / shares.sum()))


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _size(rng: np.random.Generator, low: int, high: int, multiples: tuple[int, ...], aligned: float) -> int:
    """Log-uniform; with the probability `aligned`, the next multiple of one of those given."""
    found = round(_log_uniform(rng, low, high))
    if rng.uniform() < aligned:
        multiple = int(rng.choice(multiples))
        found = max(multiple, round(found / multiple) * multiple)
    return int(np.clip(found, low, high))


def _program(rng: np.random.Generator, where: str) -> Program:
    for_hopper = where == "hopper" or (where == "gpu" and rng.uniform() < 0.65)
    tokens, width, vocabulary = _shape(rng, where, for_hopper)
    leading, shift = _leading(rng, tokens, batches=where != "hopper")
    every = ("bias", "class_weight", "token_weight")
    arrays = tuple(x for x in every if rng.uniform() < 0.3 and not (for_hopper and x == "bias"))
    objective = _chosen(rng, loss=0.65, both=0.25, lse=0.1)
    reduction = _chosen(rng, mean=0.5, sum=0.2, none=0.3)
    num_items = None
    if reduction == "mean" and rng.uniform() < 0.2:
        num_items = 0.0 if rng.uniform() < 0.1 else round(_log_uniform(rng, 0.1, 1e4), 3)
    on_a_gpu, elsewhere = {"auto": 0.7, "cce": 0.2, "chunked": 0.1}, {"cce": 0.6, "chunked": 0.15, "plain": 0.25}
    impl = _chosen(rng, **(on_a_gpu if where == "gpu" else elsewhere))
    impl = "cce" if where == "hopper" else impl
    program = Program(
        package=_chosen(rng, jax=0.6, torch=0.4) if where != "hopper" else "jax",
        impl=impl,
        leading=leading,
        width=width,
        vocabulary=vocabulary,
        dtype=_chosen(rng, bfloat16=0.7, float16=0.3) if for_hopper else str(rng.choice(DTYPES, p=[0.5, 0.2, 0.3])),
        vocab_axis=int(rng.integers(2)),
        arrays=arrays,
        wanted=_wanted(rng, arrays, objective),
        objective=objective,
        return_lse=objective != "loss" or rng.uniform() < 0.4,
        reduction=reduction,
        softcap=_softcap(rng),
        logit_scale=None if rng.uniform() < 0.7 else round(float(rng.uniform(-2, 2)), 3) or None,
        label_smoothing=0.0 if for_hopper or rng.uniform() < 0.7 else float(rng.choice([0.01, 0.1, 0.5, 1.0])),
        z_loss=0.0 if rng.uniform() < 0.7 else round(_log_uniform(rng, 1e-5, 0.1), 6),
        num_items=num_items,
        shift=shift,
        ignore_index=int(rng.choice([-100, -1, 0, 2**31 - 1, -(2**31)], p=[0.6, 0.2, 0.1, 0.05, 0.05])),
    )
    more = np.random.default_rng(program.tokens * width)
    mixed = program.dtype != "float32" and bool(more.uniform() < 0.25)
    offloaded = program.package == "torch" and bool(more.uniform() < 0.2)
    if impl == "plain":  # without kernels
        impl = "torch_compile" if program.package == "torch" and more.uniform() < 0.6 else "reference"
        program = replace(program, impl=impl)
    if for_hopper and program.vocab_axis == 0 and more.uniform() < 0.3:  # (D, V) needs a multiple of 64
        program = replace(program, vocabulary=program.vocabulary + 8 * int(more.integers(1, 8)))
    if where == "small" and impl == "chunked" and more.uniform() < 0.5:  # several groups, of 1024 columns or more
        program = replace(program, vocabulary=program.vocabulary * 10)
    program = _with_budget(rng, replace(program, mixed=mixed, offloaded=offloaded), where)
    if where == "hopper" and objective != "loss":  # whose gradients take its interpreter twice as long
        return program
    return replace(program, gradient_tolerance=float(rng.choice(TOLERANCES, p=[0.4, 0.15, 0.15, 0.15, 0.15])))


def _shape(rng: np.random.Generator, where: str, for_hopper: bool) -> tuple[int, int, int]:
    """N, D and V, of which a GPU and the truth can hold what they need."""
    if where == "small":
        n, d, v = (_size(rng, 1, most, of, 0.3) for most, of in ((100, (8, 16)), (64, (16,)), (300, (8, 64))))
        return n, d, v
    if where == "hopper":
        tokens = 256 if rng.uniform() < 0.5 else 512 - int(rng.integers(8))
        return tokens, 64 * int(rng.integers(2, 6)), 64 * int(rng.integers(2, 12))
    if for_hopper:
        tokens = _size(rng, 256, 16384, (8, 64, 256), 0.6)
        width = int(rng.choice([128, 192, 256, 320, 512, 768, 896, 1152, 2048, 2304, 2560, 4096]))
        vocabulary = _size(rng, 128, 2**18, (64, 128, 256, 1024), 1.0)
        vocabulary = max(128, vocabulary // 64 * 64)
    else:
        tokens = _size(rng, 1, 4096, (8, 64, 256), 0.5)
        width = _size(rng, 1, 2304, (16, 64, 256), 0.5)
        vocabulary = _size(rng, 1, 2**17, (8, 64, 256), 0.5)
    large = rng.uniform() < 0.03  # what float64 takes long for
    while tokens * vocabulary > 2**30 or (tokens > 256 and tokens * vocabulary * width > (2**40 if large else 2**36)):
        tokens = max(256, tokens * 3 // 4)
    while vocabulary * width > (2**29 if large else 2**27):
        vocabulary = max(128, vocabulary // 128 * 64)
    return tokens, width, vocabulary


def _leading(rng: np.random.Generator, tokens: int, batches: bool) -> tuple[tuple[int, ...], int]:
    """Leading axes of so many tokens, in batches about so many, and a shift that the last of them allows."""
    if tokens == 1 and rng.uniform() < 0.5:
        return (), 0
    batch = int(rng.choice([1, 2, 3, 7])) if batches and tokens >= 7 and rng.uniform() < 0.4 else 0
    length = -(-tokens // batch) if batch else tokens
    shift = int(rng.choice([1, 1, 2, 5])) if rng.uniform() < 0.25 else 0
    return (batch, length) if batch else (tokens,), min(shift, length - 1)


def _wanted(rng: np.random.Generator, arrays: tuple[str, ...], objective: str) -> tuple[str, ...]:
    """Usually all; sometimes some are frozen, or it is an evaluation."""
    every = tuple(x for x in ("e", "c", "bias", "token_weight") if x in ("e", "c", *arrays))
    if objective == "lse":
        every = tuple(x for x in every if x != "token_weight")  # which no lse depends on
    how = _chosen(rng, all=0.7, some=0.22, none=0.08)
    if how == "some":
        return tuple(x for x in every if rng.uniform() < 0.5) or (str(rng.choice(every)),)
    return every if how == "all" else ()


def _softcap(rng: np.random.Generator) -> float | None:
    how = _chosen(rng, none=0.6, usual=0.07, small=0.2, any=0.13)
    low, high = {"small": (0.1, 2.0), "any": (2.0, 1e6)}.get(how, (30.0, 30.0))
    return None if how == "none" else round(_log_uniform(rng, low, high), 3)


def _with_budget(rng: np.random.Generator, program: Program, where: str) -> Program:
    """Budgets from 0 to everything; 0 more often on small shapes, where most others save everything."""
    tokens, vocabulary = program.tokens, program.vocabulary
    exactly = 2 * tokens * vocabulary
    budgets = {
        "zero": 0,
        "default": DEFAULT,
        "any": round(_log_uniform(rng, 2**20, 2**36)),
        "exponentials": exactly,
        "almost": exactly - 1,
        "more": exactly + 6 * tokens * program.width + 256 * tokens + 2**25,
        "part": round(exactly * float(rng.uniform(0.3, 1.0))) + 4 * tokens * program.width + 2**26,
        "everything": "all",
    }
    name = _chosen(rng, **(dict.fromkeys(budgets, 1.0) | {"zero": 1.0 if where == "gpu" else 3.0}))
    return replace(program, memory_budget=budgets[name])


def _data(rng: np.random.Generator, program: Program) -> Data:
    kind = _chosen(rng, flat=0.4, trained=0.25, confident=0.2, far=0.15)
    sizes = {"flat": (0.03, 10.0), "trained": (1.0, 1.0), "confident": (5.0, 80.0), "far": (30.0, 1e4)}[kind]
    shares = {"none": 0.3, "one": 0.1, "few": 0.2, "most": 0.12, "runs": 0.12, "all but one": 0.1, "all": 0.06}
    ignored = _chosen(rng, **shares)
    poison = str(rng.choice(["nan", "inf"])) if ignored != "none" and rng.uniform() < 0.4 else ""
    bad = 0
    defined = "class_weight" not in program.arrays or program.reduction != "mean" or program.num_items is not None
    if defined and rng.uniform() < (0.5 if program.objective == "lse" else 0.05):
        bad = int(rng.integers(1, 4))
    data = Data(
        seed=int(rng.integers(2**31)),
        kind=kind,
        size=round(_log_uniform(rng, *sizes), 3),
        ignored=ignored,
        poison=poison,
        out_of_range=bad,
        bias=0.0 if "bias" not in program.arrays or rng.uniform() < 0.6 else round(float(rng.uniform(-120, 120)), 1),
        cotangent=1.0 if rng.uniform() < 0.6 else round(_log_uniform(rng, 1e-4, 1e3), 6),
        odd=bool(rng.uniform() < 0.3),
    )
    if program.may_leave_out and rng.uniform() < 0.5:
        return replace(data, kind="together", size=round(_log_uniform(rng, 6.0, 25.0), 3))
    return data

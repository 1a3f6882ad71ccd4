"""A call as the random search draws it: a program, which is compiled once, and its data.

A program is one of the public functions with a package, an implementation, types, a layout, a transformation and
options. `draw` gives the call of a number. Each package's programs are drawn one after the other, so that every pair of
values of two DIMENSIONS that can occur together is drawn: of several random programs that one is taken which has most
pairs that the programs before it had too seldom.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from heapq import nsmallest
from itertools import accumulate, combinations, count
from typing import Any

import numpy as np

from cce_kernels.tokens import MANY

SHARED = 3  # calls of one program, which differ in their data
OPTIONS = ("vocab_axis", "reduction", "softcap", "logit_scale", "label_smoothing", "z_loss", "num_items")
OPTIONS += ("shift", "ignore_index", "gradient_tolerance")
TOLERANCES = 0.0, 2.0**-9, 2.0**-7, 2.0**-5, 0.3
DEFAULT = -1  # the memory_budget of a call that gives none

WHERE = ("jax", "torch", "sharded", "processes", "hopper", "gpu")  # where a call is run; see draw
FUNCTIONS = ("linear_cross_entropy", "linear_log_probs", "linear_token_loss", "linear_divergence")
CROSS_ENTROPY, LOG_PROBS, TOKEN_LOSS, DIVERGENCE = FUNCTIONS
FORMS = ("function", "module", "functional", "head", "hf")  # all but the first: linear_cross_entropy of cce_torch
INDEX_TYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
STRIDES = ("plain", "transposed", "sliced", "expanded", "negative")  # expanded: all rows are the same memory
SETTINGS = ("usual", "x64", "strict promotion", "rank promotion", "debug_nans", "disable_jit")  # of JAX
MODES = ("auto", "explicit", "checked", "unchecked", "partial")  # of JAX's meshes: tests/devices/meshes.py
SPLITS = (  # the layouts of tests/devices/meshes.py
    "tokens",
    "vocabulary",
    "tokens and vocabulary",
    "sequence",
    "c's width over data",
    "c's vocabulary over data",
    "width over fsdp, vocabulary over tensor",
    "width over tensor",
    "sequence and vocabulary over tensor",
    "vocabulary over two axes",
    "all replicated",
    "three axes",
)
IN_JAX = (
    "value",
    "gradient",  # jax.jit of jax.grad
    "eager gradient",
    "second backward",  # of one vjp
    "batched cotangents",  # vmap of a vjp
    "vmap",  # of the value, then a gradient of it
    "vmap of gradient",
    "scan",
    "checkpoint",
    "checkpoint policy",
    "second derivative",
    "forward mode",
)
IN_TORCH = (
    "value",
    "gradient",
    "second backward",
    "batched cotangents",
    "checkpoint",
    "reentrant checkpoint",
    "func.grad",
    "vmap",
    "vmap of func.grad",
    "compile",
    "compile without gradient",
    "second derivative",
    "forward mode",
    "inference mode",
    "no_grad",
    "default device",
    "default dtype",
    "offloaded",
    "autocast",
    "in place",
    "side thread",
)
SHARDED = ("value", "gradient", "second backward", "checkpoint", "scan")  # transformations of JAX on several devices
OF_PROCESSES = ("value", "gradient", "second backward", "batched cotangents", "checkpoint", "second derivative")
WITHOUT_GRADIENTS = ("value", "compile without gradient", "inference mode", "no_grad")
REFUSED_BY_MOST = ("second derivative", "forward mode")  # all but impl="reference" refuse these
FUNCTIONS_OF_TOKENS = ("nll", "focal", "clipped", "bonus", "squares")  # tests/search/functions.py
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
LEAVES = ("e", "c", "bias", "token_weight")


class _Literal:
    """A dataclass whose repr leaves out what is at its default, so that a failure is a short literal for a test."""

    def __repr__(self) -> str:
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class Program(_Literal):
    """All that is static: the function and how it is called, shapes, types, options, and which gradients are wanted."""

    package: str = "jax"  # or "torch"
    impl: str = "cce"  # auto, chunked, reference, and in torch torch_compile
    function: str = CROSS_ENTROPY  # of FUNCTIONS
    form: str = "function"  # of FORMS
    transformation: str = "gradient"  # of IN_JAX or IN_TORCH
    setting: str = "usual"  # of SETTINGS
    backend: str = "aot_eager"  # of torch.compile; inductor in the nightly mode
    layout: str = "one"  # of MODES; in torch "processes"
    split: str = ""  # of SPLITS; in torch "vocabulary", "sequence" (too: a part of e) or "tokens"
    processes: int = 1  # of torch.distributed
    leading: tuple[int, ...] = (40,)
    width: int = 20
    vocabulary: int = 229
    dtype: str = "float32"
    mixed: bool = False  # c and bias are float32 beside an e of 16 bits
    index_dtype: str = "int32"  # of targets and ids; of those that JAX cannot hold NumPy's arrays
    strides_e: str = "plain"  # of STRIDES, in torch
    strides_c: str = "plain"
    vocab_axis: int = 0
    arrays: tuple[str, ...] = ()  # of bias, class_weight and token_weight
    wanted: tuple[str, ...] = ("e", "c")  # and bias, token_weight; none for an evaluation
    objective: tuple[str, ...] = ("loss",)  # the results that are differentiated
    return_lse: bool = False
    reduction: str = "mean"
    softcap: float | None = None
    logit_scale: float | None = None
    temperature: float = 1.0  # not of linear_cross_entropy
    temperatures: bool = False  # an array instead, about this size, a temperature for each token
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    num_items: float | None = None
    shift: int = 0
    ignore_index: int = -100
    targets: bool = True  # linear_log_probs takes None
    entropy: bool | str = False  # of linear_log_probs also "detached"
    ids: int = 0  # K, of linear_log_probs
    predicted: bool = False
    top_k: int = 0
    mean_logit: bool = False
    fn: str = ""  # of FUNCTIONS_OF_TOKENS
    return_numbers: bool = False
    divergence: str = ""  # of DIVERGENCES
    beta: float = 0.5
    return_entropy: bool = False
    teacher_width: int = 0
    teacher_dtype: str = ""
    teacher_bias: bool = False
    teacher_softcap: float | None = None
    teacher_logit_scale: float | None = None
    teacher_vocab_axis: int = 0
    memory_budget: int | str = DEFAULT
    gradient_tolerance: float = 0.0

    @property
    def tokens(self) -> int:
        return int(np.prod(self.leading))

    @property
    def predicting(self) -> tuple[int, ...]:
        """The shape of targets after the shift."""
        return (*self.leading[:-1], self.leading[-1] - self.shift) if self.shift else self.leading

    @property
    def differentiates(self) -> bool:
        """Whether gradients are results."""
        return bool(self.wanted) and self.transformation not in WITHOUT_GRADIENTS

    @property
    def may_save(self) -> bool:
        """Whether the backward pass may use exponentials that were rounded to 16 bits."""
        return self.dtype == "bfloat16" and self.impl in ("auto", "cce") and self.memory_budget != 0

    @property
    def may_leave_out(self) -> bool:
        """Whether blocks of dz may be left out: by the kernels for Hopper, which take MANY tokens or more."""
        return self.gradient_tolerance > 0 and self.may_save and self.label_smoothing == 0 and self.tokens >= MANY

    @property
    def results(self) -> tuple[str, ...]:
        """The names of what the call returns."""
        chosen = [("lse", self.return_lse)]
        if self.function == LOG_PROBS:
            chosen = [("log_probs", self.targets), ("lse", True), ("entropy", self.entropy), ("id_log_probs", self.ids)]
            chosen += [("predicted", self.predicted), ("top_ids", self.top_k), ("top_log_probs", self.top_k)]
            return tuple(name for name, there in [*chosen, ("mean_logit", self.mean_logit)] if there)
        if self.function == TOKEN_LOSS:
            also = self.return_numbers
            chosen = [("log_probs", also), ("lse", also), ("entropy", also and self.entropy)]
        if self.function == DIVERGENCE:
            chosen = [("entropy", self.return_entropy)]
        return ("loss", *(name for name, there in chosen if there))

    def type_of(self, name: str) -> str:
        """The type of an array, and of its gradient."""
        return "float32" if name == "token_weight" or (self.mixed and name in ("c", "bias")) else self.dtype

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the function but for arrays, impl, fn and the layout."""
        budget = {} if self.memory_budget == DEFAULT else {"memory_budget": self.memory_budget}
        common = {"vocab_axis": self.vocab_axis, "softcap": self.softcap, "logit_scale": self.logit_scale}
        common |= budget | {"precision": "highest"}
        sums = {"reduction": self.reduction, "num_items": self.num_items}
        named = {"shift": self.shift, "ignore_index": self.ignore_index}
        heat = {} if self.temperatures or self.temperature == 1 else {"temperature": self.temperature}
        if self.function == CROSS_ENTROPY:
            return common | {name: getattr(self, name) for name in OPTIONS} | {"return_lse": self.return_lse}
        if self.function == LOG_PROBS:
            also = {name: getattr(self, name) for name in ("entropy", "predicted", "top_k", "mean_logit")}
            return common | named | heat | also
        if self.function == TOKEN_LOSS:
            return common | named | heat | sums | {"entropy": self.entropy, "return_numbers": self.return_numbers}
        also = {name: getattr(self, f"teacher_{name}") for name in ("softcap", "logit_scale", "vocab_axis")}
        also = {f"teacher_{name}": value for name, value in also.items()}
        kind = {"divergence": self.divergence, "beta": self.beta, "return_entropy": self.return_entropy}
        return common | heat | sums | kind | also


@dataclass(frozen=True, repr=False)
class Data(_Literal):
    """What the arrays hold."""

    seed: int = 0
    kind: str = "flat"  # trained, confident, far or together
    size: float = 1.0  # of the logits of flat and far, the standard deviation; of confident and together, the target's
    offset: float = 0.0  # of all logits, by a feature that all tokens have
    ignored: str = "none"  # one, few, most, runs, all but one, all
    poison: str = ""  # what ignored tokens' embeddings and weights hold: nan or inf
    out_of_range: int = 0  # of so many tokens the target is
    bias: float = 0.0  # the mean of the biases
    masked: int = 0  # so many columns, targets of no token, have a bias of −inf
    cotangent: float = 1.0  # the size of the cotangents
    odd: bool = False  # of "none": some tokens' loss or lse, or both, have no cotangent, or none in all
    weight: float = 1.0  # what multiplies the weights of tokens, and the arguments of fn
    teacher: str = "other"  # or near: its logits differ from the student's by about 1e-3 of theirs; same


@dataclass(frozen=True)
class Call:
    program: Program
    data: Data


def draw(seed: int, number: int, where: str) -> Call:
    """The call of this number.

    where: "jax" and "torch", small calls in one process on one device; "sharded", JAX on 8 devices; "processes",
    several of torch; "hopper", JAX through Mosaic's GPU interpreter; "gpu", JAX and torch in turns.
    """
    k = number // SHARED
    package = ("jax", "torch")[k % 2] if where == "gpu" else "torch" if where in ("torch", "processes") else "jax"
    program = _programs(seed, where, package)(k // 2 if where == "gpu" else k)
    return Call(program, _data(np.random.default_rng([seed, WHERE.index(where), number, 1]), program))


def losses(seed: int, where: str) -> Iterator[Call]:
    """The drawn calls of linear_cross_entropy, one of each program, without its transformation and setting."""
    for number in count(0, SHARED):
        call = draw(seed, number, where)
        p = call.program
        if (p.function, p.form) == (CROSS_ENTROPY, "function") and p.dtype != "float64":
            yield replace(call, program=replace(p, transformation="gradient", setting="usual"))


# Pairs of values


def _word(value: Any, **names: Any) -> str:
    return next((name for name, x in names.items() if value == x), "other")


def kinds(program: Program) -> dict[str, str]:
    """What a program has of each dimension, as a word."""
    p = program
    found = {name: str(getattr(p, name)) for name in _AS_THEY_ARE}
    found["type"] = p.dtype + ", c float32" * p.mixed
    found["wanted"], found["arrays"] = ", ".join(p.wanted) or "none", ", ".join(p.arrays) or "none"
    found["differentiated"] = ", ".join(p.objective)
    found["temperature"] = "each token's" if p.temperatures else _heat(p.temperature)
    found["memory_budget"] = _word(p.memory_budget, zero=0, default=DEFAULT, all="all")
    for name in ("softcap", "logit_scale", "num_items"):
        found[name] = _word(getattr(p, name), none=None, zero=0.0)
    for name in ("ids", "shift", "label_smoothing", "z_loss", "gradient_tolerance"):
        found[name] = _word(getattr(p, name), none=0)
    found["axes"] = str(len(p.leading))
    found["selections"] = ", ".join(x for x in ("predicted", "top_k", "mean_logit") if getattr(p, x)) or "none"
    return found


def _heat(temperature: float) -> str:
    return "1" if temperature == 1 else "small" if temperature < 0.1 else "a number"


_AS_THEY_ARE = ("function", "form", "impl", "transformation", "setting", "layout", "split", "processes", "index_dtype")
_AS_THEY_ARE += ("strides_e", "strides_c", "vocab_axis", "reduction", "targets", "entropy", "fn", "divergence")
DIMENSIONS = (*_AS_THEY_ARE, "type", "wanted", "softcap", "temperature", "memory_budget", "shift", "ids", "axes")
Pair = tuple[str, str, str, str]
ENOUGH = 2  # programs with each pair, of SHARED calls each: at least five calls
CANDIDATES = 8  # random programs, and as many for the rarest pairs, of which the one with most rare pairs is taken


def pairs(program: Program) -> list[Pair]:
    """All pairs of values of two DIMENSIONS that a program has."""
    found = kinds(program)
    return [(a, found[a], b, found[b]) for a, b in combinations(DIMENSIONS, 2)]


def _worth(pair: Pair) -> int:
    """More where there are most values, whose pairs are the last that are drawn often enough."""
    return 4 if "transformation" in pair and not {"wanted", "fn", "divergence", "form"}.isdisjoint(pair) else 1


@cache
def _programs(seed: int, where: str, package: str) -> Callable[[int], Program]:
    """The programs of a seed by their numbers, each made when it is asked for."""
    made: list[Program] = []
    drawn: Counter[Pair] = Counter()
    enough: set[Pair] = set()  # pairs that were drawn often enough
    rare: dict[Pair, int] = {}  # pairs that were drawn too seldom, and how often a program was looked for

    def next_program() -> Program:
        rng = np.random.default_rng([seed, WHERE.index(where), len(made)])
        candidates = [_program(rng, where, package, {}) for _ in range(CANDIDATES)]
        for pair in nsmallest(CANDIDATES, rare, key=lambda x: (rare[x], x)):
            rare[pair] += 1
            candidates.append(_program(rng, where, package, {pair[0]: pair[1], pair[2]: pair[3]}))
        every = [pairs(x) for x in candidates]
        seldom = [set(found) - enough for found in every]
        best = max(range(len(candidates)), key=lambda k: sum(map(_worth, seldom[k])))
        drawn.update(every[best])
        enough.update(pair for pair in seldom[best] if drawn[pair] >= ENOUGH)
        for pair in set().union(*seldom) - rare.keys():
            rare[pair] = 0
        for pair in enough & rare.keys():
            del rare[pair]
        return candidates[best]

    def of(number: int) -> Program:
        while len(made) <= number:
            made.append(next_program())
        return made[number]

    return of


class _Picks:
    """Random choices, of which some are fixed: `fixed` has words of `kinds`."""

    def __init__(self, rng: np.random.Generator, fixed: Mapping[str, str]):
        self.rng, self.fixed = rng, fixed

    def of(self, name: str, weights: Mapping[Any, float]) -> Any:
        """A key of weights, as often as its weight says; the one that is fixed, if it is there."""
        wanted = self.fixed.get(name)
        for key, weight in weights.items():
            if weight > 0 and wanted == str(key):
                return key
        keys, shares = list(weights), list(weights.values())
        return keys[rng_choice(self.rng, shares)]

    def among(self, name: str, values: Any) -> Any:
        return self.of(name, dict.fromkeys(values, 1.0))

    def chance(self, probability: float) -> bool:
        return bool(self.rng.uniform() < probability)

    def option(self, name: str, probability: float) -> bool:
        """Whether an option is given, whose word is "none" where it is not."""
        return self.of(name, {"none": 1 - probability, "other": probability}) == "other"


def rng_choice(rng: np.random.Generator, shares: Sequence[float]) -> int:
    """An index, as often as its share says."""
    sums = list(accumulate(shares))
    return bisect_right(sums, rng.uniform() * sums[-1])


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _size(rng: np.random.Generator, low: int, high: int, multiples: tuple[int, ...], aligned: float) -> int:
    """Log-uniform; with the probability `aligned`, the next multiple of one of those given."""
    found = round(_log_uniform(rng, low, high))
    if rng.uniform() < aligned:
        multiple = int(rng.choice(multiples))
        found = max(multiple, round(found / multiple) * multiple)
    return int(np.clip(found, low, high))


def _program(rng: np.random.Generator, where: str, package: str, fixed: Mapping[str, str]) -> Program:
    """A random program; with what is fixed as far as it goes together."""
    x = _Picks(rng, fixed)
    hopper = where == "hopper" or (where == "gpu" and x.chance(0.65))
    shares = {CROSS_ENTROPY: 0.4, LOG_PROBS: 0.2, TOKEN_LOSS: 0.2, DIVERGENCE: 0.2}
    function = CROSS_ENTROPY if where == "hopper" else x.of("function", shares)
    of_forms = {"function": 0.55, "module": 0.1, "functional": 0.1, "head": 0.15, "hf": 0.1}
    form = x.of("form", of_forms) if where == "torch" and function == CROSS_ENTROPY else "function"
    layout, split, processes = _layout(x, where, function)
    transformation = _transformation(x, where, form, layout, function)
    of_settings = dict(zip(SETTINGS, (0.5, 0.2, 0.12, 0.1, 0.06, 0.02), strict=True))
    setting = x.of("setting", of_settings) if where == "jax" else "usual"
    dtype, mixed = _types(x, where, hopper, package, form, setting, transformation)
    impl = _impl(x, where, package, function, form, dtype, transformation, layout)
    tokens, width, vocabulary = _shape(rng, where, hopper)
    leading, shift = _leading(x, where, form, tokens, function, layout, split)
    strided = where == "torch" and form in ("function", "module")
    plain = dict(zip(STRIDES, (0.6, 0.1, 0.1, 0.1, 0.1), strict=True))
    if transformation == "forward mode":  # PyTorch itself fails
        plain.pop("negative")
    strides = [x.of(name, plain) if strided else "plain" for name in ("strides_e", "strides_c")]
    if form == "hf" and "expanded" in strides:
        strides = ["plain", "plain"]
    if where == "gpu" and impl == "chunked" and x.chance(0.5):  # several groups, of 1024 columns or more
        vocabulary = min(vocabulary * 2, 2**17)
    if where in ("jax", "torch") and impl == "chunked" and x.chance(0.3):
        vocabulary = vocabulary * 10
    program = Program(
        package=package,
        impl=impl,
        function=function,
        form=form,
        transformation=transformation,
        setting=setting,
        layout=layout,
        split=split,
        processes=processes,
        leading=leading,
        width=width,
        vocabulary=vocabulary,
        dtype=dtype,
        mixed=mixed,
        index_dtype=_index_dtype(x, where, form, layout),
        strides_e=strides[0],
        strides_c=strides[1],
        vocab_axis=int(x.among("vocab_axis", (0,) if form in ("functional", "head", "hf") else (0, 1))),
        shift=shift,
        softcap=None if form == "functional" else _softcap(x),
    )
    program = _with_arrays(x, program, hopper)
    program = _with_options(x, program, where, hopper)
    if hopper and program.vocab_axis == 0 and x.chance(0.3):  # (D, V) needs a multiple of 64
        program = replace(program, vocabulary=program.vocabulary + 8 * int(rng.integers(1, 8)))
    return _with_budget(x, _with_results(x, program), where, hopper)


def _layout(x: _Picks, where: str, function: str) -> tuple[str, str, int]:
    if where == "processes":
        splits = ("tokens",) if function == DIVERGENCE else ("vocabulary", "sequence", "tokens")
        return "processes", x.among("split", splits), int(x.of("processes", {2: 0.7, 4: 0.3}))
    if where != "sharded":
        return "one", "", 1
    from tests.devices.meshes import LAYOUTS  # which imports JAX

    split, layouts = x.among("split", SPLITS), {layout.name: layout for layout in LAYOUTS}
    return x.among("layout", [mode for mode in MODES if layouts[split].allows(mode)]), split, 1


def _transformation(x: _Picks, where: str, form: str, layout: str, function: str) -> str:
    if where == "hopper":
        return "gradient"
    if where == "gpu":
        return x.of("transformation", {"gradient": 0.8, "value": 0.1, "second backward": 0.1})
    if where == "sharded":
        return x.among("transformation", SHARDED)
    if where == "processes":
        return x.among("transformation", OF_PROCESSES)
    every = IN_JAX if where == "jax" else IN_TORCH
    weights = {name: 0.5 if name in REFUSED_BY_MOST else 1.0 for name in every}
    if form in ("head", "hf"):  # a module's parameters are no arguments of a function
        for name in ("func.grad", "vmap", "vmap of func.grad", "forward mode", "in place"):
            weights[name] = 0.0
    weights["gradient"] = 2.0
    return x.of("transformation", weights)


def _types(
    x: _Picks, where: str, hopper: bool, package: str, form: str, setting: str, transformation: str
) -> tuple[str, bool]:
    """The type, and whether c and bias are float32 beside it."""
    types = {"bfloat16": 0.7, "float16": 0.3} | ({} if hopper else {"float32": 0.7})
    types |= {f"{name}, c float32": 0.25 * types[name] for name in ("bfloat16", "float16") if form != "hf"}
    if transformation == "autocast":
        types.pop("float32", None)
    elif where == "torch" or setting == "x64":
        types["float64"] = 0.3 if setting == "x64" else 0.1
    dtype, *mixed = x.of("type", types).split(", ")
    return dtype, bool(mixed)


def _impl(
    x: _Picks, where: str, package: str, function: str, form: str, dtype: str, transformation: str, layout: str
) -> str:
    if where == "hopper":
        return "cce"
    if where == "gpu":
        return x.of("impl", {"auto": 0.7, "cce": 0.2, "chunked": 0.1})
    if form == "functional":
        return "auto"
    impls = {"auto": 0.1, "cce": 0.4, "chunked": 0.25, "reference": 0.25}
    if package == "torch":
        impls["torch_compile"] = 0.25
    if dtype == "float64":
        impls["cce"] = 0.03  # refused
    if transformation in REFUSED_BY_MOST:
        impls["reference"] = 1.5
    if layout == "partial" and dtype == "bfloat16":  # XLA for CPUs ends the process at JAX's own sums of bfloat16 there
        impls["reference"] = 0.0
    return x.of("impl", impls)


def _index_dtype(x: _Picks, where: str, form: str, layout: str) -> str:
    if where in ("hopper", "gpu"):
        return x.of("index_dtype", {"int32": 0.7, "int64": 0.3})
    if form == "hf":
        return "int64"
    weights = dict.fromkeys(INDEX_TYPES, 0.1) | {"int32": 0.2, "int64": 0.2}
    if layout in ("checked", "unchecked", "partial"):  # jax.shard_map itself narrows 64 bits
        weights |= {"int64": 0.0, "uint64": 0.0}
    return x.of("index_dtype", weights)


def _shape(rng: np.random.Generator, where: str, for_hopper: bool) -> tuple[int, int, int]:
    """N, D and V, of which a GPU and the truth can hold what they need."""
    if where in ("jax", "torch"):
        n, d, v = (_size(rng, 1, most, of, 0.3) for most, of in ((100, (8, 16)), (64, (16,)), (300, (8, 64))))
        return n, d, v
    if where in ("sharded", "processes"):
        return 8 * int(rng.choice([1, 4, 8])), 16 * int(rng.integers(1, 3)), 64 * int(rng.integers(1, 4))
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
    while vocabulary * width > (2**28 if large else 2**27):
        vocabulary = max(128, vocabulary // 128 * 64)
    return tokens, width, vocabulary


def _leading(
    x: _Picks, where: str, form: str, tokens: int, function: str, layout: str, split: str
) -> tuple[tuple[int, ...], int]:
    """Leading axes of so many tokens, in batches about so many, and a shift that the last of them allows."""
    if where == "sharded":  # batch and sequence of 8, 32 or 64, of which any mesh axis may split either
        shift = 0 if function == DIVERGENCE or not x.option("shift", 0.25) else int(x.rng.choice([1, 2]))
        return (tokens, 8), shift
    if where == "processes":
        shift = 0 if function == DIVERGENCE or not x.option("shift", 0.25) else 1
        return (tokens, 4) if x.among("axes", (1, 2)) == 2 else (tokens,), shift
    if form == "hf":
        return (int(x.rng.integers(1, 4)), max(2, tokens // 3)), 1
    axes = {1: 0.6, 2: 0.3 * (tokens >= 7), 3: 0.05 * (tokens >= 7), 0: 0.05}
    if where == "hopper" or form == "functional":
        axes |= {2: 0.0, 3: 0.0}
    if where in ("hopper", "gpu"):
        axes[0] = 0.0
    many = x.of("axes", axes)
    if many == 0:
        return (), 0
    batch = () if many == 1 else (int(x.rng.choice([1, 2, 3])),) if many == 2 else (2, int(x.rng.choice([1, 2])))
    leading = (*batch, -(-tokens // int(np.prod(batch))))
    shift = int(x.rng.choice([1, 1, 2, 5])) if function != DIVERGENCE and x.option("shift", 0.25) else 0
    return leading, 0 if form == "functional" else min(shift, leading[-1] - 1)


def _softcap(x: _Picks) -> float | None:
    if not x.option("softcap", 0.35):
        return None
    how = ("usual", "small", "any")[rng_choice(x.rng, (0.2, 0.5, 0.3))]
    low, high = {"small": (0.1, 2.0), "any": (2.0, 1e6)}.get(how, (30.0, 30.0))
    return round(_log_uniform(x.rng, low, high), 3)


def _with_arrays(x: _Picks, p: Program, hopper: bool) -> Program:
    """bias, class_weight and token_weight, and which gradients are wanted."""
    there = {"bias": not hopper}
    there["class_weight"] = p.function == CROSS_ENTROPY and p.form not in ("hf",)
    there["token_weight"] = p.function in (CROSS_ENTROPY, DIVERGENCE) and p.form not in ("hf", "functional")
    fixed = x.fixed.get("wanted", "")
    chosen = [name for name, can in there.items() if can and (x.chance(0.35) or name in fixed.split(", "))]
    every = [name for name in LEAVES if name in ("e", "c", *chosen)]
    if p.function == DIVERGENCE and "token_weight" in every:
        every.remove("token_weight")  # it has no gradient there
    patterns = {", ".join(y): 1.0 for n in range(1, len(every)) for y in combinations(every, n)}
    patterns |= {", ".join(every): max(1.0, 1.5 * len(patterns)), "none": max(0.2, 0.1 * len(patterns))}
    if p.transformation in WITHOUT_GRADIENTS:
        patterns = {", ".join(every): 1.0, "none": 0.5}
    elif p.transformation not in ("gradient", "default device", "default dtype"):
        patterns.pop("none")
    wanted = x.of("wanted", patterns)
    return replace(p, arrays=tuple(chosen), wanted=() if wanted == "none" else tuple(wanted.split(", ")))


def _with_options(x: _Picks, p: Program, where: str, hopper: bool) -> Program:
    """Those that the function has."""
    rng, plain = x.rng, p.form == "functional"
    p = replace(p, ignore_index=_ignore_index(x, p))
    if not plain and x.chance(0.3) and not (p.form == "hf" and p.softcap is not None):
        p = replace(p, logit_scale=round(float(rng.uniform(-2, 2)), 3) or None)
    if p.function != LOG_PROBS:
        p = replace(p, reduction=x.of("reduction", {"mean": 0.5, "sum": 0.2, "none": 0.3}))
        if p.reduction == "mean" and not plain and x.chance(0.2):
            items = 0.0 if x.chance(0.1) and p.form != "hf" else round(_log_uniform(rng, 0.1, 1e4), 3)
            p = replace(p, num_items=float(max(1, round(items))) if p.form == "hf" else items)
    if p.function == CROSS_ENTROPY:
        of_tolerances = [0.2, 0.2, 0.2, 0.2, 0.2] if where == "gpu" else [0.4, 0.15, 0.15, 0.15, 0.15]

        def tolerance() -> float:
            return float(rng.choice(TOLERANCES, p=of_tolerances)) * (p.form == "function")

        first = tolerance() if hopper else 0.0
        if hopper:  # where Hopper's kernels form the gradients; seldom beside a tolerance, which it makes void
            may = p.dtype == "bfloat16" and p.softcap is None and p.reduction != "none"
            smoothing = may and x.chance(0.1 if first else 0.6)
        else:
            smoothing = p.form != "hf" and x.chance(0.3)
        z_loss = not plain and p.form != "hf" and x.chance(0.3)
        return replace(
            p,
            label_smoothing=float(rng.choice([0.01, 0.1, 0.5, 1.0])) if smoothing else 0.0,
            z_loss=round(_log_uniform(rng, 1e-5, 0.1), 6) if z_loss else 0.0,
            gradient_tolerance=first if hopper else tolerance(),
        )
    heat = x.of("temperature", {"1": 0.4, "a number": 0.2, "small": 0.15, "each token's": 0.25})
    low, high = (1e-10, 0.1) if heat == "small" else (0.2, 5.0)
    temperature = 1.0 if heat == "1" else float(f"{_log_uniform(rng, low, high):.3g}")
    p = replace(p, temperature=temperature, temperatures=heat == "each token's")
    if p.function == LOG_PROBS:
        ids = x.of("ids", {"none": 0.5, "other": 0.5 if p.processes == 1 else 0.3}) == "other"
        some = x.chance(0.35)
        targets = p.shift > 0 or x.of("targets", {True: 0.85, False: 0.15})
        return replace(
            p,
            targets=targets,
            entropy=x.of("entropy", {False: 0.4, True: 0.4, "detached": 0.2}),
            ids=int(rng.integers(1, 8)) if ids else 0,
            predicted=some and x.chance(0.5),
            top_k=int(rng.integers(1, 1 + min(p.vocabulary, 8))) if some and x.chance(0.5) else 0,
            mean_logit=some and x.chance(0.5),
        )
    if p.function == TOKEN_LOSS:
        fn = x.among("fn", FUNCTIONS_OF_TOKENS)
        entropy = fn == "bonus" or bool(x.of("entropy", {False: 0.6, True: 0.4}))
        return replace(p, fn=fn, entropy=entropy, return_numbers=x.chance(0.3))
    divergence = x.among("divergence", DIVERGENCES)
    beta = 0.5
    if divergence == "jsd" and x.chance(0.7):
        beta = _log_uniform(rng, 1e-12, 0.5)
        beta = float(f"{beta:.4g}") if x.chance(0.6) else float(f"{1 - beta:.12g}")
    # autocast rounds the teacher's arrays to its type
    alike = p.dtype in ("float32", "float64") or x.chance(0.3) or p.transformation == "autocast"
    return replace(
        p,
        divergence=divergence,
        beta=beta if 0 < beta < 1 else 0.5,
        return_entropy=x.chance(0.3),
        teacher_width=p.width if x.chance(0.4) else max(1, round(p.width * float(rng.uniform(0.5, 1.5)))),
        teacher_dtype=p.dtype if alike else str(rng.choice(["bfloat16", "float16"])),
        teacher_bias=x.chance(0.3),
        teacher_softcap=_softcap(_Picks(rng, {})),
        teacher_logit_scale=None if x.chance(0.7) else round(float(rng.uniform(0.3, 2)), 3),
        teacher_vocab_axis=int(rng.integers(2)),
    )


def _ignore_index(x: _Picks, p: Program) -> int:
    """One that the type of targets holds."""
    if p.form == "hf":
        return -100
    held = np.iinfo(p.index_dtype)
    weights = {-100: 0.6, -1: 0.2, 0: 0.1, 2**31 - 1: 0.05, -(2**31): 0.05, 255: 0.0 if held.min < 0 else 0.6}
    return x.of("ignore_index", {k: w for k, w in weights.items() if held.min <= k <= held.max and w > 0})


def _with_results(x: _Picks, p: Program) -> Program:
    """What is returned beside the loss, and which results are differentiated."""
    if p.function == LOG_PROBS:
        names = [("log_probs", p.targets), ("lse", True), ("entropy", p.entropy is True), ("id_log_probs", p.ids)]
        can = [name for name, there in names if there]
        chosen = tuple(name for name in can if x.chance(0.6)) or (str(x.rng.choice(can)),)
        return replace(p, objective=chosen, wanted=tuple(name for name in p.wanted if name != "token_weight"))
    if p.function != CROSS_ENTROPY or p.form in ("functional", "head", "hf"):
        return p
    chosen = (("loss",), ("loss", "lse"), ("lse",))[rng_choice(x.rng, (0.65, 0.25, 0.1))]
    if "token_weight" in p.wanted and chosen == ("lse",):  # which no lse depends on
        chosen = ("loss",)
    return replace(p, objective=chosen, return_lse="lse" in chosen or x.chance(0.4))


def _with_budget(x: _Picks, program: Program, where: str, hopper: bool) -> Program:
    """Budgets from 0 to everything; 0 more often on small shapes, where most others save everything."""
    tokens, vocabulary = program.tokens, program.vocabulary
    exactly = 2 * tokens * vocabulary
    others = {
        "any": round(_log_uniform(x.rng, 2**20, 2**36)),
        "exponentials": exactly,
        "almost": exactly - 1,
        "more": exactly + 6 * tokens * program.width + 256 * tokens + 2**25,
        "part": round(exactly * float(x.rng.uniform(0.3, 1.0))) + 4 * tokens * program.width + 2**26,
    }
    budgets = {"zero": 0, "default": DEFAULT, "all": "all"}
    if program.form in ("functional", "head", "hf"):
        return program
    weights = {"zero": 1.0 if where == "gpu" else 3.0, "default": 1.0, "all": 1.0, "other": 5.0}
    if hopper and (program.label_smoothing or program.may_leave_out):  # where Hopper's kernels form the gradients
        weights |= {"zero": 0.05, "default": 4.0, "all": 4.0, "other": 3.0}
    name = x.of("memory_budget", weights)
    if name == "other":
        found = others[str(x.rng.choice(list(others)))]
        return replace(program, memory_budget=found if found >= 2**20 else 2**20)  # less than 1 MiB is refused
    return replace(program, memory_budget=budgets[name])


# Data


def _data(rng: np.random.Generator, p: Program) -> Data:
    x = _Picks(rng, {})
    kind = x.of("", {"flat": 0.4, "trained": 0.25, "confident": 0.2, "far": 0.15})
    sizes = {"flat": (0.03, 10.0), "trained": (1.0, 1.0), "confident": (5.0, 80.0), "far": (30.0, 1e4)}[kind]
    shares = {"none": 0.3, "one": 0.1, "few": 0.2, "most": 0.12, "runs": 0.12, "all but one": 0.1, "all": 0.06}
    ignored = x.of("", shares)
    if (p.function == LOG_PROBS and not p.targets) or (p.function == DIVERGENCE and "token_weight" not in p.arrays):
        ignored = "none"
    poison = str(rng.choice(["nan", "inf"])) if ignored != "none" and rng.uniform() < 0.4 else ""
    if "expanded" in (p.strides_e, p.strides_c) or p.form == "hf":
        poison = ""
    if p.setting == "debug_nans":  # which raises for a NaN in what is given
        poison = poison and "inf"
    bad = 0
    defined = "class_weight" not in p.arrays or p.reduction != "mean" or p.num_items is not None
    defined = defined and p.form != "hf" and p.setting != "debug_nans"
    if p.function in (CROSS_ENTROPY, LOG_PROBS) and p.targets and defined:
        bad = int(rng.integers(1, 4)) if rng.uniform() < (0.5 if "loss" not in p.objective else 0.05) else 0
    bias, masked, biased = 0.0, 0, "bias" in p.arrays
    if biased and x.chance(0.4):
        bias = 1e3 if x.chance(0.2) else round(float(rng.uniform(-120, 120)), 1)
    finite = p.label_smoothing == 0 and not p.mean_logit and (p.logit_scale or 1.0) > 0
    finite = finite and (p.divergence != "forward_kl" or p.teacher_bias) and (p.divergence or not p.teacher_bias)
    # A softcap makes a logit of −inf finite. So one side alone may have mass where the other has none.
    capped = p.softcap is not None, p.teacher_softcap is not None or not p.teacher_bias
    finite = finite and capped not in {"forward_kl": [(False, True)], "reverse_kl": [(True, False)]}.get(
        p.divergence, []
    )
    if biased and x.chance(0.15) and p.vocabulary > 8 and finite:
        masked = int(rng.integers(1, 1 + p.vocabulary // 4))
    data = Data(
        seed=int(rng.integers(2**31)),
        kind=kind,
        size=round(_log_uniform(rng, *sizes), 3),
        offset=0.0 if kind == "far" or x.chance(0.8) else float(rng.choice([1e2, 1e3, 1e4])),
        ignored=ignored,
        poison=poison,
        out_of_range=bad,
        bias=bias,
        masked=masked,
        cotangent=1.0 if rng.uniform() < 0.6 else round(_log_uniform(rng, 1e-4, 1e3), 6),
        odd=bool(rng.uniform() < 0.3),
        teacher=x.of("", {"other": 0.5, "near": 0.35, "same": 0.15}) if p.function == DIVERGENCE else "other",
    )
    if p.may_leave_out and rng.uniform() < 0.5:
        return replace(data, kind="together", size=round(_log_uniform(rng, 6.0, 25.0), 3))
    return data

"""A simpler call that still fails: options dropped one by one, and sizes halved, for as long as one does."""

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from tests.search.calls import (
    CROSS_ENTROPY,
    DIVERGENCE,
    IN_JAX,
    IN_TORCH,
    LOG_PROBS,
    REFUSED_BY_MOST,
    TOKEN_LOSS,
    Call,
    Program,
)

# Other options mean less without these.
FIRST = ("layout", "package", "function", "form", "transformation", "setting", "arrays", "objective", "reduction")
FIRST += ("shift", "leading")
OF_FUNCTIONS = {
    CROSS_ENTROPY: ("label_smoothing", "z_loss", "gradient_tolerance", "return_lse"),
    LOG_PROBS: ("targets", "ids", "predicted", "top_k", "mean_logit"),
    TOKEN_LOSS: ("fn", "return_numbers"),
    DIVERGENCE: ("divergence", "beta", "return_entropy", *(f.name for f in fields(Program) if "teacher" in f.name)),
}


def shrunk(call: Call, fails: Callable[[Call], bool], seconds: float) -> Call:
    """The last of ever simpler calls of which fails(call) is true; call itself if none of the first is."""
    until = time.monotonic() + seconds
    tried = {call}
    found = True
    while found:
        found = False
        for simpler in _simpler(call):
            if time.monotonic() > until:
                return call
            if simpler not in tried and _makes_sense(simpler.program):
                tried.add(simpler)
                if fails(simpler):
                    call, found = simpler, True
                    break
    return call


def _simpler(call: Call) -> Iterator[Call]:
    """Calls that differ in one thing, those first that leave out most."""
    program, data = call.program, call.data
    other = {"leading", "width", "vocabulary", "wanted", "split", "processes", "fn", "divergence", "teacher_dtype"}
    other |= {"teacher_width"}  # whose defaults need not be simpler
    for name in (*FIRST, *(f.name for f in fields(Program) if f.name not in FIRST)):
        default = getattr(Program(), name)
        if name not in other and getattr(program, name) != default:
            yield Call(_with(program, **{name: default}), data)
    for x in program.arrays:
        yield Call(_with(program, arrays=tuple(y for y in program.arrays if y != x)), data)
    for x in program.wanted:
        yield Call(_with(program, wanted=tuple(y for y in program.wanted if y != x)), data)
    for name in (
        "out_of_range",
        "poison",
        "ignored",
        "kind",
        "cotangent",
        "size",
        "bias",
        "odd",
        "offset",
        "masked",
        "weight",
        "teacher",
    ):
        default = getattr(type(data)(), name)
        if getattr(data, name) != default:
            yield Call(program, replace(data, **{name: default}))
    if data.out_of_range > 1:
        yield Call(program, replace(data, out_of_range=1))
    if len(program.leading) != 1:
        yield Call(_with(program, leading=(program.tokens,)), data)
    for keep in (lambda n: n // 2, lambda n: n * 3 // 4, lambda n: n - n % 64, lambda n: n - n % 8, lambda n: n - 1):
        for name in ("vocabulary", "width"):
            yield Call(_with(program, **{name: keep(getattr(program, name))}), data)
        if program.leading:
            yield Call(_with(program, leading=(*program.leading[:-1], keep(program.leading[-1]))), data)


def _with(program: Program, **changes) -> Program:
    """program changed, and what no longer fits with it."""
    p = replace(program, **changes)
    default, lost = Program(), []
    for function, names in OF_FUNCTIONS.items():
        lost += [name for name in names if p.function != function]
    lost += ["temperature", "temperatures", "entropy"] * (p.function == CROSS_ENTROPY)
    lost += ["shift"] * (p.function == DIVERGENCE) + ["reduction"] * (p.function == LOG_PROBS)
    lost += ["form", "strides_e", "strides_c", "backend"] * (p.package == "jax") + ["setting"] * (p.package == "torch")
    lost += ["split", "processes"] * (p.layout == "one")
    p = replace(p, **{name: getattr(default, name) for name in lost})
    if p.package == "jax":
        p = replace(p, impl="chunked" if p.impl == "torch_compile" else p.impl)
        p = replace(p, setting="x64") if p.dtype == "float64" else p
    if p.transformation not in (IN_JAX if p.package == "jax" else IN_TORCH):
        p = replace(p, transformation="gradient")
    if p.transformation in REFUSED_BY_MOST and program.transformation not in REFUSED_BY_MOST:
        p = replace(p, transformation="gradient")
    allowed = {CROSS_ENTROPY: ("bias", "class_weight", "token_weight"), DIVERGENCE: ("bias", "token_weight")}
    arrays = tuple(x for x in p.arrays if x in allowed.get(p.function, ("bias",)))
    leaves = ("e", "c", *(x for x in arrays if x == "bias" or p.function == CROSS_ENTROPY))
    length = p.leading[-1] if p.leading else 1
    p = replace(
        p,
        arrays=arrays,
        wanted=tuple(x for x in p.wanted if x in leaves),
        num_items=p.num_items if p.reduction == "mean" else None,
        shift=max(0, min(p.shift, length - 1)),
        top_k=min(p.top_k, p.vocabulary),
        entropy=p.fn == "bonus" or p.entropy,
        mixed=p.mixed and p.dtype in ("bfloat16", "float16"),
        return_lse=p.return_lse or (p.function == CROSS_ENTROPY and "lse" in p.objective),
    )
    can = [x for x in p.results if x != "entropy" or p.entropy is True]
    can = can if p.function in (CROSS_ENTROPY, LOG_PROBS) else ["loss"]
    can = [x for x in can if x in ("loss", "log_probs", "lse", "entropy", "id_log_probs")]
    return replace(p, objective=tuple(x for x in p.objective if x in can) or (can[0],))


def _makes_sense(program: Program) -> bool:
    p = program
    sized = p.vocabulary > 0 and p.width > 0 and p.tokens > 0
    whole = p.layout == "one" or all(n % 8 == 0 for n in (*p.leading, p.width, p.vocabulary))
    return sized and whole and (p.form != "hf" or len(p.leading) == 2)

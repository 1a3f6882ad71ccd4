"""A simpler call that still fails: options dropped one by one, and sizes halved, for as long as one does."""

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from tests.search.calls import Call, Program

FIRST = ("package", "arrays", "objective", "reduction", "shift", "leading")  # other options mean less without these


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
    other = {"leading", "width", "vocabulary", "wanted"}  # whose defaults need not be simpler
    for name in (*FIRST, *(f.name for f in fields(Program) if f.name not in FIRST)):
        default = getattr(Program(), name)
        if name not in other and getattr(program, name) != default:
            yield Call(_with(program, **{name: default}), data)
    for x in program.arrays:
        yield Call(_with(program, arrays=tuple(y for y in program.arrays if y != x)), data)
    for x in program.wanted:
        yield Call(_with(program, wanted=tuple(y for y in program.wanted if y != x)), data)
    for name in ("out_of_range", "poison", "ignored", "kind", "cotangent", "size", "bias", "odd"):
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
    found = replace(program, **changes)
    wanted = tuple(x for x in found.wanted if x in ("e", "c", *found.arrays))
    length = found.leading[-1] if found.leading else 1
    return replace(
        found,
        wanted=wanted,
        return_lse=found.return_lse or found.objective != "loss",
        num_items=found.num_items if found.reduction == "mean" else None,
        shift=max(0, min(found.shift, length - 1)),
    )


def _makes_sense(program: Program) -> bool:
    return program.vocabulary > 0 and program.width > 0 and program.tokens > 0

"""A simpler call that fails alike: options dropped one by one, and sizes made smaller, for as long as one does."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from tests.search.calls import Call, Data, Program

SIZES = "leading", "width", "vocabulary", "wanted", "teacher_width"  # whose defaults are not the simplest
TOGETHER = {"layout": ("split", "processes")}  # mean nothing without it


def shrunk(call: Call, wrong: Callable[[Call], list[str]], seconds: float) -> Call:
    """The last of ever simpler calls of which the same is wrong; call itself if that is so of none.

    What makes no sense, such as a result of another function, fails in other words.
    """
    until, tried, words = time.monotonic() + seconds, {call}, _kind(wrong(call))
    found = True
    while found:
        found = False
        for simpler in _simpler(call):
            if time.monotonic() > until:
                return call
            if simpler not in tried:
                tried.add(simpler)
                if _kind(wrong(simpler)) == words:
                    call, found = simpler, True
                    break
    return call


def _kind(wrong: list[str]) -> str:
    """What is wrong, without its numbers."""
    return re.split(r"\d", wrong[0])[0] if wrong else ""


def _simpler(call: Call) -> Iterator[Call]:
    """Calls that differ in one thing, those first that leave out most."""
    program, data = call.program, call.data
    default: dict[str, object] = {f.name: f.default for f in fields(Program) if f.name not in SIZES}
    for name, value in default.items():
        if getattr(program, name) != value:
            changed = {name: value} | {x: default[x] for x in TOGETHER.get(name, ())}
            yield Call(replace(program, **changed), data)  # type: ignore[arg-type]
    for name in ("arrays", "wanted"):
        for x in getattr(program, name):
            left = tuple(y for y in getattr(program, name) if y != x)
            kept = tuple(y for y in program.wanted if y in (*left, "e", "c"))
            yield Call(replace(program, **{"wanted": kept, name: left}), data)
    for f in fields(Data):
        if f.name != "seed" and getattr(data, f.name) != f.default:
            yield Call(program, replace(data, **{f.name: f.default}))
    if len(program.leading) != 1:
        yield Call(replace(program, leading=(program.tokens,)), data)
    for keep in (lambda n: n // 2, lambda n: n * 3 // 4, lambda n: n - n % 64, lambda n: n - n % 8, lambda n: n - 1):
        for name in ("vocabulary", "width"):
            if keep(getattr(program, name)):
                yield Call(replace(program, **{name: keep(getattr(program, name))}), data)
        if program.leading and keep(program.leading[-1]):
            yield Call(replace(program, leading=(*program.leading[:-1], keep(program.leading[-1]))), data)

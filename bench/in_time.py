"""Calls that are compared, as many as fit in a time. Of each other one the reason is kept, an error or the time."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from bench import memory
from bench.calls import Call
from bench.measure import BURST, HEATING, WARM, in_turns, milliseconds
from bench.report import Row, first_line

OVER = "the time for others was over"
Check = Callable[[Any], Row]  # of a call's result


class Prepared(NamedTuple):
    """Calls that have run, what was found of each, and why the others are missing."""

    calls: dict[str, Call]
    rows: dict[str, Row]  # peak_mb, and what the check says
    missing: dict[str, str]


def prepared(
    makes: dict[str, Callable[[], Call]], rounds: int, seconds: float = math.inf, check: Check = lambda _: {}
) -> Prepared:
    """Loads, compiles, checks and weighs each call in turn: those whose turns, too, will be over in so many seconds."""
    found, end = Prepared({}, {}, {}), time.monotonic() + seconds
    for name, make in makes.items():
        if time.monotonic() >= end:
            found.missing[name] = OVER
            continue
        try:
            call = make()
            row = check(call()) | {"peak_mb": memory.peak(call)}
            turn = milliseconds(call) / 1e3
            end -= max(HEATING, WARM * turn) + rounds * BURST * turn
            if time.monotonic() >= end:
                found.missing[name] = f"{OVER}: {1e3 * turn:.1f} ms a call"
            else:
                found.calls[name], found.rows[name] = _kept(name, call, found.missing), row
        except Exception as error:
            found.missing[name] = first_line(error)
        call = None
    memory.empty()
    return found


def timed(calls: dict[str, Call], found: Prepared, rounds: int, queued: bool = False) -> dict[str, float]:
    """Milliseconds of calls, and of those prepared, in turns; without those that failed at it. queued: see in_turns."""
    times = in_turns(calls | found.calls, rounds, queued)
    return {name: ms for name, ms in times.items() if name not in found.missing}


def _kept(name: str, call: Call, failed: dict[str, str]) -> Call:
    """The call; after an error it does nothing, so that the calls that it takes turns with go on."""

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if name in failed:
                return None
            try:
                return function(*arguments)
            except Exception as error:
                failed[name] = first_line(error)

        return run

    return Call(guarded(call.run), guarded(call.wait))

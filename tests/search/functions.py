"""The losses of a user's own that the search gives to linear_token_loss: for jax.numpy and for torch."""

from collections.abc import Callable
from functools import cache
from typing import Any


def _nll(numbers: Any, xp: Any) -> Any:
    return -numbers.log_probs


def _focal(numbers: Any, xp: Any) -> Any:
    return -((1 - xp.exp(numbers.log_probs)) ** 2) * numbers.log_probs


def _clipped(numbers: Any, old: Any, advantage: Any, xp: Any) -> Any:
    """PPO's: the ratio to an old policy, with a clip."""
    ratio = xp.exp(numbers.log_probs - old)
    return -xp.minimum(ratio * advantage, xp.clip(ratio, 0.8, 1.2) * advantage)


def _bonus(numbers: Any, advantage: Any, xp: Any) -> Any:
    return -advantage * numbers.log_probs - 0.01 * numbers.entropy


def _squares(numbers: Any, wanted: Any, xp: Any) -> Any:
    return 0.5 * (numbers.log_probs - wanted) ** 2 + 1e-3 * numbers.lse**2


_FUNCTIONS = {"nll": _nll, "focal": _focal, "clipped": _clipped, "bonus": _bonus, "squares": _squares}
ARGUMENTS = {"nll": 0, "focal": 0, "clipped": 2, "bonus": 1, "squares": 1}


@cache
def function_of(name: str, xp: Any) -> Callable[..., Any]:
    """fn(numbers, *arguments), the same object each time. xp: jax.numpy or torch."""

    def fn(numbers: Any, *arguments: Any) -> Any:
        return _FUNCTIONS[name](numbers, *arguments, xp=xp)

    return fn

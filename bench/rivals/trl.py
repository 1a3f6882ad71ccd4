"""TRL: log-probabilities, entropies and divergences in chunks of tokens × columns. Its default is 4096 × 32768.

Chunk sizes are constants of its modules for which its functions have no argument. They are read at each call, also in
the backward pass, which comes before the next call of another size.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def numbers(tokens: int = 4096, columns: int = 32768) -> Callable[..., Any]:
    module: Any = import_module("trl.kernels.chunked_logprob")

    def found(e, c, targets, temperature):
        module.TOKEN_CHUNK_SIZE = tokens
        options = temperature, columns, None, 1.0, ("entropy",)
        return module.ChunkedLogProbFunction.apply(e, c, None, targets, *options)[:2]

    return found


def divergence(beta: float, tokens: int = 4096, columns: int = 32768) -> Callable[..., Any]:
    module: Any = import_module("trl.kernels.chunked_divergence")

    def loss(e, c, teacher_e, teacher_c):
        module.TOKEN_CHUNK_SIZE, module.VOCAB_CHUNK_SIZE = tokens, columns
        return module.ChunkedDivergenceFunction.apply(e, c, None, teacher_e, teacher_c, None, beta)[0].mean()

    return loss

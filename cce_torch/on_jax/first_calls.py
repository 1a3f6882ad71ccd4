"""What is different while JAX traces and compiles a program, which takes seconds: a program's first call.

The garbage collector waits. In a process with PyTorch one full collection takes 0.2 s, and tracing causes two. Compiled
programs for a GPU are kept on disk (compiled_programs.py).
"""

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from cce_torch.on_jax import compiled_programs


class _OfThread(threading.local):
    on: str = ""  # torch's name of the device whose program is called; "" outside of `call`
    stack: ExitStack | None = None  # what ends with this call


_of_thread = _OfThread()


def call(program: Callable, arrays: Sequence[Any], on: str) -> Any:
    """program(*arrays). on: torch's name of their device, "cpu" or "cuda"."""
    _of_thread.on = on
    try:
        return program(*arrays)
    finally:
        _of_thread.on = ""
        if _of_thread.stack is not None:
            stack, _of_thread.stack = _of_thread.stack, None
            stack.close()


def tracing() -> None:
    """To be called by a program's function, which runs only while JAX traces it. JAX then compiles the program."""
    if _of_thread.on and _of_thread.stack is None:
        _of_thread.stack = ExitStack()
        _of_thread.stack.enter_context(_without_collections())
        if _of_thread.on in compiled_programs.KEPT_OF:
            _of_thread.stack.enter_context(compiled_programs.kept())


@contextmanager
def _without_collections() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

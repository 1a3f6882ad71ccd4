"""Groups of processes that talk by gloo and stay: to start one takes seconds, and a drawn call a fraction of one.

Each call has a process group of its own, so that one that went wrong leaves no messages for the next. A collective that
waits longer than SECONDS is an error of its process; processes that answer differently are an error of the call.
"""

import atexit
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context, set_forkserver_preload
from multiprocessing.connection import Connection, wait
from typing import Any

SECONDS = 60.0  # that a collective may wait: the processes may compile programs meanwhile
LONGEST = 300.0  # that a call may take

Answer = tuple[str, Any]  # "done" and what was returned, or "failed" and the exception


class Group:
    """So many processes. `run` calls a function in each of them."""

    def __init__(self, count: int) -> None:
        context = get_context("forkserver")
        set_forkserver_preload(["tests.search.run_torch", "cce_torch.on_jax.bridge", "torch.distributed.tensor"])
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(count):
            pipe, theirs = context.Pipe()
            arguments = theirs, rank, count, f"{self.folder.name}/store"
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(pipe)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """function(group, *arguments) of each process, by rank.

        Raises:
          AssertionError: not all processes raised the same error, or one has not answered.
          The error that all processes raised.
        """
        message = pickle.dumps((function, arguments))
        for pipe in self.pipes:
            pipe.send_bytes(message)
        answers = self._answers()
        failed = {rank: x for rank, (how, x) in answers.items() if how == "failed"}
        if len(answers) == len(self.pipes) and not failed:
            return [answers[rank][1] for rank in range(len(self.pipes))]
        words = {rank: f"{type(x).__name__}: {x}" for rank, x in failed.items()}
        if len(failed) < len(self.pipes) or len({type(x) for x in failed.values()}) > 1:
            self.end()
            rest = [rank for rank in range(len(self.pipes)) if rank not in answers]
            raise AssertionError(f"the processes answered differently: {words}; no answer from {rest}")
        raise failed[0]

    def _answers(self) -> dict[int, Answer]:
        """Those of the processes that answer in time."""
        found: dict[int, Answer] = {}
        until = time.monotonic() + LONGEST
        while len(found) < len(self.pipes) and time.monotonic() < until:
            left = [pipe for rank, pipe in enumerate(self.pipes) if rank not in found]
            for pipe in wait(left, timeout=max(0.0, until - time.monotonic())):
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    found[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join()
                    code = self.processes[rank].exitcode
                    found[rank] = "failed", RuntimeError(f"the process ended with exit code {code}")
        return found

    def end(self) -> None:
        """Ends the processes. The next call starts others."""
        _started.pop(len(self.processes), None)
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


_started: dict[int, Group] = {}


def of_processes(count: int) -> Group:
    """So many processes, which are started once."""
    if count not in _started:
        _started[count] = Group(count)
        atexit.register(_started[count].end)
    return _started[count]


def _serve(pipe: Connection, rank: int, count: int, file: str) -> None:
    """What a process does: it joins the others, and answers until the pipe is closed."""
    from tests.search.processes import prepare

    prepare("processes")
    import torch
    import torch.distributed as dist

    from tests.call_torch import run_uncompiled
    from tests.nightly import NIGHTLY

    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if not NIGHTLY:
        run_uncompiled()  # else each process compiles the same functions, which takes most of a minute
    limit = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=count, timeout=limit)
    while True:
        try:
            function, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        group: Any = dist.new_group(backend="gloo", timeout=limit)
        try:
            answer: Answer = "done", function(group, *arguments)
        except Exception as error:
            answer = "failed", _that_can_be_sent(error)
        dist.destroy_process_group(group)
        pipe.send_bytes(pickle.dumps(answer))


def _that_can_be_sent(error: Exception) -> Exception:
    """The error itself, or one with its words."""
    try:
        same = pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return same if str(same) == str(error) else RuntimeError(f"{type(error).__name__}: {error}")

"""One process a GPU, which runs jobs one after the other. A job that ends its process, or hangs, costs only itself."""

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

spawn = multiprocessing.get_context("spawn")


def _work(gpu: str | None, pipe: Any) -> None:
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # nothing in this process has used a GPU yet
    while True:
        call, arguments = pipe.recv()
        try:
            pipe.send((call(*arguments), None))
        except ImportError as error:
            pipe.send((None, f"missing: {error}"))
        except Exception as error:
            traceback.print_exc()
            pipe.send((None, f"{type(error).__name__}: {error}"[:500]))


class Worker:
    def __init__(self, gpu: str | None) -> None:
        self.pipe, of_process = spawn.Pipe()
        self.process = spawn.Process(target=_work, args=(gpu, of_process), daemon=True)
        self.process.start()
        of_process.close()

    def call(self, seconds: float, call: Callable, *arguments: Any) -> tuple[Any, str | None]:
        """The result of call(*arguments), or None and why there is none. Then the process may have ended."""
        self.pipe.send((call, arguments))
        if not self.pipe.poll(seconds):
            self.end()
            return None, f"took more than {seconds:.0f} s"
        try:
            return self.pipe.recv()
        except EOFError:
            self.end()
            return None, "its process ended"

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def visible(gpus: int) -> Sequence[str | None]:
    """The names of so many GPUs for CUDA_VISIBLE_DEVICES; without a GPU, [None]."""
    listed = [x for x in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if x]
    if gpus == 0:
        return [None]
    return [*listed, *map(str, range(len(listed), gpus))][:gpus]


def spread(
    jobs: Iterable[Any], gpus: Sequence[str | None], seconds: float, end: float, call: Callable, done: Callable
) -> None:
    """Runs call(job, ...) on all GPUs, a process each, and done(job, result, reason) here, one at a time.

    A job gets so many `seconds`, and none is started after the time `end` of time.perf_counter(). Jobs of another
    package than the last one start in a new process, as each package keeps memory of its own.
    """
    waiting, lock = iter(list(jobs)), threading.Lock()

    def on(gpu: str | None) -> None:
        worker, package = None, None
        while True:
            with lock:
                job = next(waiting, None)
            if job is None:
                break
            if time.perf_counter() > end:
                with lock:
                    done(job, None, "there was no time left")
                continue
            if worker and (not worker.process.is_alive() or job.package != package):
                worker.end()
                worker = None
            worker, package = worker or Worker(gpu), job.package
            result, reason = worker.call(seconds, call, job)
            with lock:
                done(job, result, reason)
        if worker:
            worker.end()

    threads = [threading.Thread(target=on, args=(gpu,)) for gpu in gpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

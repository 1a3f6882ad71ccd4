"""Compiled programs on disk: JAX's persistent compilation cache, in a folder of this package, for its programs alone.

JAX has one persistent cache for a process, and none unless the user names a folder for it. If the user has named one,
this file does nothing. Otherwise JAX asks the folder here for a program, but only while a thread compiles a program of
this package. JAX makes the key from the program itself, its options, the versions of jaxlib and CUDA, and the GPU.

Programs for a CPU are not kept. XLA compiles them for one type of CPU, and refuses many of its own on the CPU that it
compiled them on (jax-ml/jax#38445).

Whoever can write to the folder can run code in this process. So it must belong to the user, and nobody else may write
to it. It is opened once: nobody can put another folder in its place later. Processes need no lock, as a program is
written to a file of another name, which is then renamed. A digest finds a damaged file. No error of the file system
reaches a caller: without the folder, JAX compiles.
"""

import hashlib
import os
import stat
import time
import warnings
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from pathlib import Path

import jax

from cce_torch.on_jax.compat import compilation_cache

VARIABLE = "CCE_TORCH_CACHE"  # 0: no program is kept; else the folder
KEPT_OF = ("cuda",)  # torch's names of devices
LIMIT = 512 * 2**20  # bytes of all programs
SHORTEST = 0.1  # seconds: what takes less to compile is not kept
LEFT_BEHIND = 3600  # seconds after which an unfinished file is of a process that has ended
DIGEST = hashlib.sha256().digest_size
FINISHED, UNFINISHED = ".program", ".part"
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UnsafeError(Exception):
    """Others can write to the folder."""


def kept() -> AbstractContextManager:
    """A context in which JAX takes the programs that this thread compiles from the folder, and puts them there."""
    config = jax.config
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        return nullcontext()
    folder = folder_of(os.environ.get(VARIABLE, ""))
    return nullcontext() if folder is None else compilation_cache(folder, SHORTEST)


@cache
def folder_of(setting: str) -> "Folder | None":
    """The folder that this value of VARIABLE names; None if there is none, or it cannot be used."""
    path = None if setting == "0" else Path(setting) if setting else default_path()
    if path is None or not hasattr(os, "O_DIRECTORY"):  # Windows, for which JAX has no CUDA
        return None
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Folder(path)
    except OSError:
        return None
    except UnsafeError as error:
        warnings.warn(f"cce_torch keeps no compiled programs: {error}", stacklevel=2)
        return None


def default_path() -> Path | None:
    """A folder among the caches of the user; None if the user has no home."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():
        try:
            caches = Path.home() / ".cache"
        except (RuntimeError, KeyError):
            return None
    return caches / "cce-jax" if caches.is_absolute() else None


class Folder:
    """A cache as JAX wants one: get and put, of bytes. The programs that were used last are kept, up to LIMIT."""

    def __init__(self, path: Path) -> None:
        """OSError if the folder cannot be opened; UnsafeError."""
        self.handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        found = os.fstat(self.handle)
        if found.st_uid != os.geteuid() or found.st_mode & OTHERS_WRITE:
            os.close(self.handle)
            raise UnsafeError(
                f"others can write to {path}, and could so run code in this process. Give it to the user of this "
                f"process alone (chown, chmod 700), set {VARIABLE} to another folder, or to 0"
            )

    def get(self, key: str) -> bytes | None:
        """What was put for the key; None if there is nothing, or the file is damaged."""
        name = key + FINISHED
        with suppress(OSError):
            with open(name, "rb", opener=self._opener) as file:
                digest, value = file.read(DIGEST), file.read()
            if hashlib.sha256(value).digest() == digest:
                with suppress(OSError):
                    os.utime(name, dir_fd=self.handle)  # used now
                return value
            os.unlink(name, dir_fd=self.handle)
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keeps the value, if the file system can. Programs that were not used for longest make room for it."""
        name = f"{key}.{os.getpid()}.{time.monotonic_ns()}{UNFINISHED}"
        size = DIGEST + len(value)
        if size > LIMIT:
            return
        with suppress(OSError):
            self._make_room(size)
            try:
                with open(name, "xb", opener=self._opener) as file:
                    file.write(hashlib.sha256(value).digest())
                    file.write(value)
                os.replace(name, key + FINISHED, src_dir_fd=self.handle, dst_dir_fd=self.handle)
            except BaseException:
                with suppress(OSError):
                    os.unlink(name, dir_fd=self.handle)
                raise

    def _make_room(self, size: int) -> None:
        """Removes files until `size` more bytes are within LIMIT."""
        files, now = [], time.time()
        for name in os.listdir(self.handle):
            with suppress(OSError):
                found = os.stat(name, dir_fd=self.handle, follow_symlinks=False)
                if name.endswith(FINISHED):
                    files.append((found.st_mtime_ns, found.st_size, name))
                elif name.endswith(UNFINISHED) and found.st_mtime < now - LEFT_BEHIND:
                    os.unlink(name, dir_fd=self.handle)
        size += sum(of_file for _, of_file, _ in files)
        for _, of_file, name in sorted(files):
            if size <= LIMIT:
                return
            with suppress(OSError):
                os.unlink(name, dir_fd=self.handle)
            size -= of_file

    def _opener(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o600, dir_fd=self.handle)

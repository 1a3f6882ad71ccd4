"""First calls from PyTorch: compiled programs on disk, and what else is different while JAX compiles."""

import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from jax.experimental.compilation_cache import compilation_cache as of_process

from cce_torch import linear_cross_entropy
from cce_torch.on_jax import compiled_programs, first_calls, programs
from cce_torch.on_jax.compat import compilation_cache
from cce_torch.on_jax.compiled_programs import DIGEST, FINISHED, UNFINISHED, VARIABLE, Folder, folder_of
from tests.call_torch import forget

ROOT = Path(__file__).parents[1]


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    """A folder that does not exist yet, which `VARIABLE` names."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "programs"))
    return tmp_path / "programs"


@pytest.fixture
def kept_of_cpu(monkeypatch) -> None:
    """Programs for a CPU are kept too, however fast they compile."""
    monkeypatch.setattr(compiled_programs, "KEPT_OF", ("cpu",))
    monkeypatch.setattr(compiled_programs, "SHORTEST", 0.0)


DIRECTORY, SHORTEST = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"


@contextmanager
def persistent_cache(path: str | None) -> Iterator[None]:
    """JAX's persistent cache is this folder; without one it has none, also in processes that start here."""
    before = {x: getattr(jax.config, x) for x in (DIRECTORY, SHORTEST)}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(DIRECTORY.upper(), raising=False)
        jax.config.update(DIRECTORY, path)
        jax.config.update(SHORTEST, 0.0)
        of_process.reset_cache()
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    of_process.reset_cache()


@pytest.fixture(autouse=True)
def without_the_tests_cache() -> Iterator[None]:
    """tests/conftest.py names a persistent cache, with which cce_torch keeps no programs of its own."""
    with persistent_cache(None):
        yield


@pytest.fixture
def user_cache(tmp_path) -> Iterator[Path]:
    """JAX's persistent cache, as a user sets it."""
    with persistent_cache(str(tmp_path / "of_user")):
        yield tmp_path / "of_user"


def names(path: Path) -> list[str]:
    """The programs in a folder, by the names of their functions."""
    return sorted(x.name.split("-")[0] for x in path.glob("*")) if path.exists() else []


def step(softcap: float) -> list[torch.Tensor]:
    """A loss and its gradients, with programs of their own for each softcap."""
    generator = torch.Generator().manual_seed(0)
    e, c = (torch.randn(n, 16, generator=generator).requires_grad_() for n in (40, 50))
    loss = linear_cross_entropy(e, c, torch.arange(40), softcap=softcap, impl="chunked")
    return [loss.detach(), *torch.autograd.grad(loss, (e, c))]


def compiled(number: float) -> None:
    """Compiles a program of a user's."""
    jax.jit(lambda x: x * number + 1)(np.float32(2))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 220)), max_size=30))
def test_a_folder_holds_what_was_put_last_within_its_limit(tmp_path_factory, puts):
    path, latest = tmp_path_factory.mktemp("programs"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_programs, "LIMIT", 200 + 2 * DIGEST)
        folder = Folder(path)
        for number, (key, size) in enumerate(puts):
            value = bytes([number]) * size
            folder.put(key, value)
            if size + DIGEST <= compiled_programs.LIMIT:
                latest[key] = value
            assert folder.get(key) == latest.get(key)
            assert all(folder.get(x) in (None, y) for x, y in latest.items())
            assert sum(x.stat().st_size for x in path.iterdir()) <= compiled_programs.LIMIT
    os.close(folder.handle)


def test_what_was_used_last_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled_programs, "LIMIT", 3 * (DIGEST + 10))
    folder = Folder(tmp_path)
    for second, key in enumerate("abc"):
        folder.put(key, key.encode() * 10)
        os.utime(tmp_path / (key + FINISHED), (second, second))
    left_behind, new = (tmp_path / (x + UNFINISHED) for x in ("old", "new"))
    left_behind.touch()
    os.utime(left_behind, (0, 0))
    new.touch()
    assert folder.get("a") == b"a" * 10
    folder.put("d", b"d" * 10)
    assert [x for x in "abcd" if folder.get(x) is None] == ["b"]
    assert new.exists()
    assert not left_behind.exists()


@given(st.binary(max_size=100), st.data())
def test_a_damaged_file_is_no_program(tmp_path_factory, value, data):
    path = tmp_path_factory.mktemp("programs")
    folder, file = Folder(path), path / ("key" + FINISHED)
    folder.put("key", value)
    whole = file.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    flipped = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    file.write_bytes(data.draw(st.sampled_from([whole[:place], flipped])))
    assert folder.get("key") is None
    assert not file.exists()
    folder.put("key", value)
    assert folder.get("key") == value
    os.close(folder.handle)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, None])
def test_a_folder_to_which_others_can_write_is_refused_with_one_warning(path, mode, monkeypatch):
    """mode: None for the folder of another user."""
    if mode is None:
        monkeypatch.setattr(os, "geteuid", lambda: path.parent.stat().st_uid + 1)
    else:
        path.mkdir()
        path.chmod(mode)
    with pytest.warns(UserWarning, match=f"keeps no compiled programs: others can write to {path}.*{VARIABLE}"):
        assert folder_of(str(path)) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert folder_of(str(path)) is None


def test_the_folder_is_made_for_the_user_alone_among_the_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    path = compiled_programs.default_path()
    assert path == tmp_path / "caches" / "cce-jax"
    assert isinstance(folder_of(str(path)), Folder)
    assert path.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compiled_programs.default_path() == tmp_path / "home" / ".cache" / "cce-jax"


def test_without_a_folder_no_error_and_no_warning_reaches_the_caller(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError(30, "Read-only file system")

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    (tmp_path / "file").touch()
    folder = Folder(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert folder_of(str(tmp_path / "file" / "programs")) is None
        folder.put("key", b"value")
        monkeypatch.setattr(os, "replace", fails)
        folder.put("other", b"value")
        assert [x.name for x in tmp_path.glob("[ko]*")] == ["key" + FINISHED]
        monkeypatch.setattr(os, "utime", fails)
        assert folder.get("key") == b"value"
        monkeypatch.setattr(os, "open", fails)
        monkeypatch.setattr(os, "unlink", fails)
        assert folder.get("key") is None
        folder.put("key", b"value")
        monkeypatch.setattr(Path, "mkdir", fails)
        assert folder_of(str(tmp_path / "programs")) is None
        monkeypatch.setattr(Path, "home", no_home)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert compiled_programs.default_path() is None


def test_a_program_comes_back_from_the_folder(path, kept_of_cpu, monkeypatch):
    found = []
    monkeypatch.setattr(Folder, "get", lambda self, key, get=Folder.get: found.append(get(self, key)) or found[-1])
    compiled(0.1)
    want = step(softcap=3.25)
    compiled(0.2)
    kept = names(path)
    assert kept == ["jit_torch_begin", "jit_torch_finish"]
    assert found == [None, None]
    for name in ("_begin_program", "_finish_program"):
        getattr(programs, name).cache_clear()
    forget()
    jax.clear_caches()
    assert all(map(torch.equal, step(softcap=3.25), want))
    assert None not in found[2:]
    assert len(found) == 4
    assert names(path) == kept


def test_nothing_is_kept_where_it_is_switched_off_or_for_a_cpu(path, monkeypatch):
    step(softcap=3.5)
    monkeypatch.setattr(compiled_programs, "KEPT_OF", ("cpu",))
    monkeypatch.setenv(VARIABLE, "0")
    step(softcap=3.75)
    monkeypatch.setenv(VARIABLE, str(path))
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        step(softcap=4.25)
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert not path.exists()


def test_a_cache_of_the_users_own_gets_the_programs(path, kept_of_cpu, user_cache):
    step(softcap=4.5)
    compiled(0.3)
    assert {"jit_torch_begin", "jit_torch_finish", "jit__lambda"} <= {x.removesuffix("_") for x in names(user_cache)}
    assert not path.exists()


def test_other_threads_and_later_programs_keep_the_cache_of_the_process(path, user_cache):
    folder = folder_of(str(path))
    with compilation_cache(folder, 0.0):
        thread = threading.Thread(target=compiled, args=(0.4,))
        thread.start()
        thread.join()
        assert names(path) == []
        jax.jit(lambda x: x * 0.5 + 1)(np.float32(2))
        assert len(names(path)) == 1
    before = names(user_cache)
    compiled(0.6)
    assert len(names(path)) == 1
    assert len(names(user_cache)) > len(before) > 0


KEYS = """
import contextlib, hashlib, sys
from types import SimpleNamespace
import jax, torch
from jax._src import cache_key
from jax.sharding import AbstractMesh, use_abstract_mesh
from cce_jax import plans
from cce_kernels.device import H200
from cce_kernels.head import Head
from cce_kernels.numbers import Wanted
from cce_torch.call import Call
from cce_torch import linear_cross_entropy
from cce_torch.on_jax import compiled_programs, kinds, programs

compiled_programs.KEPT_OF, compiled_programs.SHORTEST = ("cpu",), 0.0
e, c = (torch.ones(n, 16).requires_grad_() for n in (40, 50))
linear_cross_entropy(e, c, torch.arange(40), softcap=4.75, impl="chunked").backward()
N, D, V, S = 512, 128, 1024, jax.ShapeDtypeStruct
core = plans.Core(Head(None, 0, None), "auto", None, H200, one_platform=True)
kind = kinds.Kind(Call(), core, torch.Size((V, D)), torch.bfloat16, SimpleNamespace(platform="gpu"), kinds.Sizes())
wanted = Wanted(True, True, False)
left = programs.handover_of(kind, N, False, wanted).shapes
outputs = [S((), "float32"), S((3, N), "float32"), *(S(x.shape, x.dtype) for x in jax.tree.leaves(left))]
inputs = [S((N, D), "bfloat16"), S((V, D), "bfloat16"), None, S((2 * N,), "int32"), *[None] * 9]
gpu = contextlib.nullcontext()
if jax.__version_info__ >= (0, 11):
    from jax.sharding import AbstractDevice
    gpu = use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", None, platform="gpu")))
with gpu:
    traced = programs._begin_program(kind, N, wanted, len(outputs)).trace(*outputs, *inputs)
    assert "platform_index" not in str(traced.jaxpr), "a program for other platforms is traced too"
    lowered = traced.lower(lowering_platforms=("cuda",))
digest = hashlib.sha256()
cache_key._hash_computation(digest, lowered._lowering.stablehlo(), False)
print(lowered.as_text().count("custom_call @"), digest.hexdigest())
"""


def started(code: str, **more: str | None) -> subprocess.Popen:
    """A process that runs the code. more: of its environment; None: what is not in it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))} | more
    environment = {name: value for name, value in environment.items() if value is not None}
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], env=environment, stdout=PIPE, text=True)


def said(process: subprocess.Popen) -> list[str]:
    """What it prints."""
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0
    return output.splitlines()


def test_two_new_processes_at_once_make_the_same_keys(path):
    """For a CPU, by the names of the files; for an H200 that is not there, by what JAX makes a key of."""
    # The second process has other hashes, and its code stands in other lines.
    each = [started("\n" * 9 * seed + KEYS, PYTHONHASHSEED=str(seed)) for seed in (0, 1)]
    (first,), (second,) = map(said, each)
    assert first == second
    assert int(first.split()[0]) > 3, "kernels are among what the key is made of"
    assert names(path) == ["jit_torch_begin", "jit_torch_finish"]


FRESH = """
import sys, torch
before = set(sys.modules)
import cce_torch
new = {x.split(".")[0] for x in set(sys.modules) - before}
assert new == {"cce_torch", "cce_kernels"}, new
assert "jax" not in sys.modules, "JAX"
assert "torch._dynamo" not in sys.modules, "the compiler"
import cce_torch.in_torch.rule
assert "torch._inductor.compile_fx" not in sys.modules, "the compiler for in_torch"
torch.manual_seed(0)
e, c, t = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4), torch.arange(5)
cce_torch.linear_cross_entropy(e, c, t, impl="reference").backward()
assert "jax" not in sys.modules, "JAX for impl='reference'"
step = torch.compile(lambda: cce_torch.linear_cross_entropy(e, c, t, num_items=7), backend="aot_eager", fullgraph=True)
step().backward()
assert "jax" in sys.modules
"""

DELETED = """
e, c, t = torch.ones(5, 4), torch.ones(9, 4), torch.arange(5)
for _ in range(3):
    cce_torch.linear_cross_entropy(e, c, t, shift=1, label_smoothing=0.1, impl="chunked")
    for x in jax.live_arrays():
        x.delete()
"""
ASKED = {  # what JAX is asked, by what ran before
    "jax_devices.start()": {"preallocate": False},
    "os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'true'; jax_devices.start()": None,
    "jax.config.update('jax_pjrt_client_create_options', {'preallocate': True}); jax_devices.start()": {
        "preallocate": True
    },
    "jax.devices(); jax_devices.start()": None,
    DELETED: {"preallocate": False},  # by a first call; and the user may delete all arrays of JAX
}
EACH = """
import os, sys, torch
def in_child(code):
    child = os.fork()
    if not child:
        try:
            exec(code, globals())
            print(jax.config.jax_pjrt_client_create_options, flush=True)
        except RuntimeError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
in_child(fresh)
import jax, cce_torch
from cce_torch.on_jax import bridge, jax_devices
for code in codes:
    in_child(code)
exec(codes[-1])
in_child(codes[-1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_a_new_process_imports_and_asks_of_jax():
    """JAX is asked to leave memory, unless the user said otherwise or it runs; also by a call, before any other use.

    Importing starts nothing, and a number of items compiles before JAX is imported. In a process that was forked later
    a call says what to do.
    """
    fresh = f"{FRESH}print('fresh', flush=True)\nos._exit(0)"
    code = f"fresh, codes = {fresh!r}, {list(ASKED)!r}\n{EACH}"
    first, *found, forked = said(started(code, XLA_PYTHON_CLIENT_PREALLOCATE=None))
    assert first == "fresh"
    assert found == [str(x) for x in ASKED.values()]
    for word in ("forked", "spawn", "impl='torch_compile'"):
        assert word in forked


def test_the_garbage_collector_waits_while_jax_traces():
    enabled = []

    def program(fails: bool) -> None:
        first_calls.tracing()
        first_calls.tracing()
        enabled.append(gc.isenabled())
        assert not fails

    first_calls.tracing()
    assert gc.isenabled(), "JAX traces for another reason than a call"
    first_calls.call(program, [False], "cpu")
    assert gc.isenabled()
    with pytest.raises(AssertionError):
        first_calls.call(program, [True], "cpu")
    assert gc.isenabled()
    gc.disable()
    first_calls.call(program, [False], "cpu")
    assert not gc.isenabled()
    gc.enable()
    assert enabled == [False] * 3

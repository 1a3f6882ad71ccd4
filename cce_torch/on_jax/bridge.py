"""Where the two runtimes meet: a compiled JAX program runs on torch's memory, in the order of torch's current stream.

`run` is the only way from one runtime to the other. On a GPU it is safe because of four facts:

1. Inputs are complete when JAX reads them. A program starts when all of its arguments are ready. The first argument is
   imported such that it is ready only when everything that torch's current stream held at that moment is done.
2. Inputs are alive until JAX has read them. `run` holds the caller's tensors until it has made torch's current stream
   wait for the end of the program. Whatever torch's allocator then does with their memory happens after the program.
   So JAX need not hold the inputs, and does not: JAX releases arrays late, some at the next call, and until then a
   gradient would count as allocated. To JAX an input is an address and a shape. The next tensor at this address, of
   this shape, is the same array to JAX, as a weight is at every step. If Ctrl-C arrives after the program was started
   and before torch's stream waits for it, the host waits until all programs that JAX was given have ended.
3. Outputs are torch's own memory, never JAX's. They are allocated here, on the current stream, and donated to the
   program, which writes its results into them. To torch's allocator, `record_stream`, side streams and DDP they are
   like any other tensor, and JAX has no memory that it could give to someone else too early.
4. JAX's own memory is only scratch, which is taken and given back in the order of JAX's stream.

All results of a program become ready together, at its end. So waiting for one result is waiting for the program.
Nothing else here blocks the host.

On a CPU, `run` waits for the program and copies JAX's results into outputs: torch's own memory can be resized, JAX's
cannot. JAX holds the inputs until the program has ended, even if Ctrl-C has ended the wait for it. It holds them as
numpy arrays, because the thread that ran the program may release them after `run` has returned. Releasing a numpy array
there needs no interpreter. Releasing a tensor would need the interpreter, and would abort a process that is about to
end. The numpy arrays come from DLPack: `Tensor.numpy` would make the tensor's storage unresizable for good, and FSDP
resizes the storage of its weights.
"""

import ctypes
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from cce_torch.on_jax import first_calls, settings
from cce_torch.on_jax.compat import NAMES_PLATFORM, ShapedArray, batched_device_put, from_capsule, to_capsule
from cce_torch.on_jax.jax_devices import cpu, gpu, jax_device, out_of_memory

GPU_ALIGNMENT = 16  # bytes: the widest loads of XLA's kernels
DLPACK_CPU, DLPACK_CUDA = 1, 2
DLPACK_TYPES = {
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.bfloat16: (4, 16),
    torch.bool: (6, 8),
}
DEFAULT_STREAM = 1  # DLPack's number for CUDA's legacy default stream, whose handle is 0
CONSTANTS = 1024  # scalars that stay on their device for the next call

Input = Tensor | float | int | None

_of_thread = threading.local()


def run(
    program: Callable, inputs: Sequence[Input], outputs: Sequence[Tensor], scratch: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """Runs a jitted program(*scratch, *outputs, *inputs) -> results like scratch and outputs. Returns outputs.

    Scratch and outputs are donated to the program; outputs then hold its results. Inputs and outputs are row-major, on
    one device, of types that JAX holds without conversion. The program gets an int as an int32 scalar, a float as a
    float32 scalar, and None as None. The results for scratch are of no use: on a GPU they overwrite scratch, on a CPU
    they are dropped.
    """
    if settings.are_default():
        return _run(program, inputs, outputs, scratch)
    with settings.defaults():
        return _run(program, inputs, outputs, scratch)


def _run(
    program: Callable, inputs: Sequence[Input], outputs: Sequence[Tensor], scratch: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    device, donated = outputs[0].device, (*scratch, *outputs)
    if device.type == "cpu":
        arrays = [_on_cpu(x) if isinstance(x, Tensor) else constant(x, device) for x in (*donated, *inputs)]
        results = jax.block_until_ready(first_calls.call(program, arrays, "cpu"))
        for output, result in zip(outputs, results[len(scratch) :], strict=True):
            output.copy_(torch.from_dlpack(result))
        return tuple(outputs)
    inputs = [aligned(x) if isinstance(x, Tensor) else x for x in inputs]
    if device.index == torch.cuda.current_device():
        _run_gpu_or_retry(program, inputs, donated)
    else:
        with torch.cuda.device(device):
            _run_gpu_or_retry(program, inputs, donated)
    return tuple(outputs)


class _Memory:
    """A CPU tensor in a form that numpy.from_dlpack imports in a fifth of the time that it needs for the tensor."""

    def __init__(self, x: Tensor) -> None:
        self.capsule = torch._C._to_dlpack(x)

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return DLPACK_CPU, 0


def _on_cpu(x: Tensor) -> jax.Array:
    """A jax.Array on the memory of x. It keeps x alive through a numpy array."""
    x = x.detach()
    if x.dtype == torch.bfloat16:  # numpy has no such type
        array = np.from_dlpack(_Memory(x.view(torch.int16))).view(jnp.bfloat16)  # type: ignore[arg-type]
    else:
        array = np.from_dlpack(_Memory(x))  # type: ignore[arg-type]
    device, sharding = cpu()
    return batched_device_put(_aval(array.shape, array.dtype), sharding, [array], [device])


@lru_cache(maxsize=1024)
def _aval(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    return ShapedArray(shape, dtype)


def _run_gpu_or_retry(program: Callable, inputs: Sequence[Input], outputs: Sequence[Tensor]) -> None:
    try:
        return _run_gpu(program, inputs, outputs)
    except jax.errors.JaxRuntimeError as error:
        if not _is_out_of_memory(error):
            raise
    torch.cuda.empty_cache()  # JAX cannot allocate memory that torch holds and does not use
    try:
        _run_gpu(program, inputs, outputs)
    except jax.errors.JaxRuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(out_of_memory(outputs[0].device, error)) from None


def _is_out_of_memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error)


def _run_gpu(program: Callable, inputs: Sequence[Input], outputs: Sequence[Tensor]) -> None:
    index = outputs[0].device.index
    current = torch._C._cuda_getCurrentRawStream(index)  # torch.cuda.current_stream takes 8 µs
    stream = gpu(index).get_stream_for_external_ready_events()
    arrived = _event(index)
    arrived.record(_stream(current, index))
    arrived.wait(_stream(stream, index))
    first, *others = outputs
    arrays = [_lent(first, index, stream)]  # fact 1: ready when `stream`, which waits for `current`, has come this far
    arrays += [_lent(x, index) for x in others]
    device = first.device
    for x in inputs:
        if x is not None:
            x = _at(x.data_ptr(), x.shape, x.dtype, index) if isinstance(x, Tensor) else constant(x, device)
        arrays.append(x)
    try:
        results = first_calls.call(program, arrays, "cuda")
        # fact 2: this makes `current` wait for the program's end; the capsule itself is not used
        to_capsule(results[0], stream=current or DEFAULT_STREAM)
    except jax.errors.JaxRuntimeError:  # the program did not start, or has ended
        raise
    except BaseException:
        _wait_for_programs(index)
        raise
    if any(r.unsafe_buffer_pointer() != x.data_ptr() for r, x in zip(results, outputs, strict=True)):
        raise RuntimeError("JAX did not write its results into the memory that it was given for them")  # fact 3


def _wait_for_programs(index: int) -> None:
    """Waits until every program that JAX was given for the device has ended: they run one after another."""
    jax.block_until_ready(_last(constant(0, torch.device("cuda", index))))


@jax.jit
def _last(x: jax.Array) -> jax.Array:
    """A program that does almost nothing."""
    return x + 1


def _event(index: int) -> torch.cuda.Event:
    """This thread's event for the device. The caller waits for it at once: recording it again changes no wait."""
    if not hasattr(_of_thread, "events"):
        _of_thread.events = defaultdict(torch.cuda.Event)
    return _of_thread.events[index]


@cache
def _stream(handle: int, index: int) -> torch.cuda.Stream:
    return torch.cuda.ExternalStream(handle, device=index) if handle else torch.cuda.default_stream(index)


def _lent(x: Tensor, index: int, stream: int | None = None):
    """A jax.Array on the memory of x, to be used once. It does not keep x alive. Ready when `stream` is; None: now."""
    return _array(x.data_ptr(), x.shape, x.dtype, index, stream)


def _at(address: int, shape: torch.Size, dtype: torch.dtype, index: int):
    """A read-only jax.Array on this address, ready at once. It reads whatever is in the memory at that time."""
    return _not_deleted(_kept_at, address, shape, dtype, index)


@lru_cache(maxsize=1024)
def _kept_at(address: int, shape: torch.Size, dtype: torch.dtype, index: int):
    return _array(address, shape, dtype, index, None)


def _not_deleted(kept, *key: Any):
    """The cached array kept(*key), made again if the user has deleted it: jax.live_arrays() gives it to the user."""
    found = kept(*key)
    if found.is_deleted():
        kept.cache_clear()
        found = kept(*key)
    return found


class DLManagedTensor(ctypes.Structure):
    """DLPack's structure of this name. With strides null the tensor is row-major."""

    _fields_ = [
        ("address", ctypes.c_void_p),
        ("platform", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


DESCRIPTION_BYTES, ADDRESS_BYTES = ctypes.sizeof(DLManagedTensor), ctypes.sizeof(ctypes.c_void_p)
_malloc, _free = ctypes.pythonapi.PyMem_RawMalloc, ctypes.pythonapi.PyMem_RawFree  # which need no interpreter
_malloc.restype, _malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def _array(address: int, shape: torch.Size, dtype: torch.dtype, index: int, stream: int | None):
    platform = (DLPACK_CUDA,) if NAMES_PLATFORM else ()
    but_address, _sizes = _described(shape, dtype, index)
    description = _malloc(DESCRIPTION_BYTES)  # JAX reads `deleter` from here when it frees the array, on any thread
    ctypes.memmove(description, address.to_bytes(ADDRESS_BYTES, sys.byteorder) + but_address, DESCRIPTION_BYTES)
    capsule = _new_capsule(description, b"dltensor", None)
    return from_capsule(capsule, gpu(index), stream, None, *platform)


@lru_cache(maxsize=1024)
def _described(shape: torch.Size, dtype: torch.dtype, index: int) -> tuple[bytes, Any]:
    """The bytes after the address in a DLManagedTensor, and the sizes that they point to, which JAX copies."""
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    whole = DLManagedTensor(
        None,
        DLPACK_CUDA,
        index,
        len(shape),
        *DLPACK_TYPES[dtype],
        1,
        ctypes.addressof(sizes),
        deleter=ctypes.cast(_free, ctypes.c_void_p),
    )
    return bytes(whole)[ADDRESS_BYTES:], sizes


def constant(value: int | float | None, device: torch.device):
    """value as a JAX int32 or float32 scalar on the device: a program takes it without a compilation for each value."""
    return None if value is None else _not_deleted(_kept_constant, value, device)


@lru_cache(maxsize=CONSTANTS, typed=True)
def _kept_constant(value: int | float, device: torch.device):
    return jax.device_put(np.float32(value) if isinstance(value, float) else np.int32(value), jax_device(device))


def aligned(x: Tensor) -> Tensor:
    """x where a program can read it: a copy if its address does not fit."""
    return x.clone() if x.data_ptr() % GPU_ALIGNMENT else x

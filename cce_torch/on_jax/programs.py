"""The two JAX programs that torch runs, forward and backward, and the numbers of tokens that they are compiled for.

JAX compiles a program for each shape, and the number of tokens N differs from batch to batch. The first EXACT values of
N get programs of their own. Any other N is padded with ignored tokens to the next multiple of 256, and above 1024 to
the next of four sizes an octave (…, 4096, 5120, 6144, 7168, 8192, 10240, …). So a process compiles few programs and
pads little.

A process keeps the last PROGRAMS programs of each direction that it called, and frees older ones. Numbers that change
from step to step (label_smoothing, z_loss, scale) are arguments of a program. Whether such a number is given is static.
"""

import threading
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch import Tensor

from cce_jax import losses, passes
from cce_kernels.device import gpu_of
from cce_kernels.head import Head
from cce_kernels.numbers import Cotangents, Inputs, Statistics, Wanted
from cce_kernels.residuals import Residuals
from cce_torch.on_jax import bridge

# The backward pass chooses between kernels by the number of kept tokens. With these options XLA makes them one CUDA
# graph, in which the device chooses. Else the host would wait for the number before it launches either kernel.
ON_GPU = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": 1,
}
EXACT = 4
SMALLEST = 256
STEPS_PER_OCTAVE = 4
PROGRAMS = 256  # a process on a CPU ended at about 2,000: a program takes several of its 65,530 memory mappings

_choosing = threading.Lock()


@dataclass(frozen=True)
class Call:
    """The options of a call for which its programs are compiled."""

    ignore_index: int
    shift: int
    loss: losses.Loss
    softcap: float | None
    precision: str | None
    impl: passes.Impl
    memory_budget: int | None
    wide_dc: bool  # c and bias were float32 and are rounded to e's type: their gradients are float32
    of_shard: bool = False  # c is a shard of the vocabulary: de is a part of a sum, in float32

    def is_exact(self, dtype: torch.dtype) -> bool:
        """Whether float32 matmuls are exact: not TF32."""
        return dtype == torch.float32 and (self.precision or _float32_precision()) == "highest"


class Numbers(NamedTuple):
    """The options of a call that are arguments of its programs. None: the loss has no such term."""

    label_smoothing: float | None
    z_loss: float | None
    scale: float | None


def _float32_precision() -> str:
    """PyTorch's setting for float32 matmuls, whichever of its two interfaces set it last."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # from PyTorch 2.9 on, if the newer interface has set a value that the older does not have
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


class Sizes:
    """The number of tokens that programs are compiled for, as a function of N: the same N always gets the same size."""

    def __init__(self) -> None:
        self.chosen: dict[int, int] = {}

    def __call__(self, tokens: int) -> int:
        if tokens not in self.chosen:
            with _choosing:
                exact = len(self.chosen) < EXACT
                self.chosen.setdefault(tokens, tokens if exact else padded_size(tokens))
        return self.chosen[tokens]


def padded_size(tokens: int) -> int:
    """The smallest padded size that holds so many tokens."""
    octave = 2 ** (max(tokens - 1, 1).bit_length() - 1)
    step = max(octave // STEPS_PER_OCTAVE, SMALLEST)
    return -(-tokens // step) * step


@dataclass(frozen=True, eq=False)
class Kind:
    """What is common to all calls with the same options, types, device and shapes, except N.

    A Kind lives as long as one of its programs is kept, or a graph holds a saved array whose size the Kind chose.
    """

    call: Call
    static: passes.Core  # the static part of the core's call
    c_shape: torch.Size  # in the order of memory
    dtype: torch.dtype
    device: Any  # JAX's device
    sizes: Sizes

    @property
    def vocabulary(self) -> int:
        return self.c_shape[self.static.head.vocab_axis]

    def shapes(self, size: int, with_bias: bool) -> Inputs:
        """The core's inputs in a program of `size` tokens, as shapes without memory."""
        dtype, axis = str(self.dtype)[6:], self.static.head.vocab_axis
        e = jax.ShapeDtypeStruct((size, self.c_shape[1 - axis]), dtype)
        bias = jax.ShapeDtypeStruct((self.vocabulary,), dtype) if with_bias else None
        targets = jax.ShapeDtypeStruct((size,), "int32")
        return Inputs(e, jax.ShapeDtypeStruct(tuple(self.c_shape), dtype), bias, targets)  # type: ignore[arg-type]

    def laid_out(self, c: Tensor) -> Tensor:
        """c, (V, D), in this Kind's order of memory, which a hook on saved tensors may have changed."""
        axis = self.static.head.vocab_axis
        if _vocab_axis(c) == axis:
            return c
        return c.T.contiguous().T if axis == 1 else c.contiguous()


_kinds: MutableMapping[tuple, Kind] = WeakValueDictionary()


def kind_of(call: Call, c_shape: torch.Size, vocab_axis: int, dtype: torch.dtype, device: torch.device) -> Kind:
    """The one Kind of such calls, even if several threads ask for it at once. The first call starts JAX."""
    bridge.check_can_run(device)
    exact = call.is_exact(dtype)  # depends on PyTorch's setting, which may change between calls
    key = call, c_shape, vocab_axis, dtype, device, exact
    found = _kinds.get(key)
    if found is None:
        on = bridge.jax_device(device)
        head = Head(call.softcap, vocab_axis, lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT)
        gpu = gpu_of(on) if device.type == "cuda" else None
        static = passes.Core(head, call.loss.smooths, call.impl, call.memory_budget, gpu, call.of_shard, call.wide_dc)
        with _choosing:
            found = _kinds.setdefault(key, Kind(call, static, c_shape, dtype, on, Sizes()))
    return found


def kind_of_tensors(e: Tensor, c: Tensor, call: Call) -> Kind:
    """The Kind of a call on these tensors. A symbolic shape is made a constant."""
    axis = _vocab_axis(c)
    return kind_of(call, torch.Size(map(int, (c.T if axis else c).shape)), axis, e.dtype, e.device)


def _vocab_axis(c: Tensor) -> int:
    """The axis of the vocabulary in the order of memory."""
    return 0 if c.is_contiguous() or not c.T.is_contiguous() else 1


@lru_cache(maxsize=PROGRAMS)
def saved_shape_of(kind: Kind, size: int, with_bias: bool, wanted: Wanted) -> tuple[int, ...]:
    """The shape of what a call with `size` tokens saves for these gradients."""
    return passes.plan_for(kind.shapes(size, with_bias), kind.static, wanted).saved_shape


def loss(e, c, bias, targets, class_weight, token_weight, num_items, *, wanted: Wanted | None, row_length: int,
         call: Call, numbers: Numbers):  # fmt: skip
    """The loss, () or (N,), the core's statistics, (2 or 3, N), both float32, and what is saved: passes.forward_pass.

    The statistics of ignored tokens are 0.
    e: (N, D), N ≥ 1; c: (V, D), bias: (V,); targets: (N,) int64, before the shift, in rows of row_length tokens;
    class_weight: (V,); token_weight: (N,); num_items: one element; wanted: the gradients that will be asked for, or
    None if nothing is to be saved for them.
    """
    arrays = Arrays(e, c, call, numbers)
    rows = 2 + call.loss.smooths
    whole = call.loss.reduction == "none"
    outputs = [
        e.new_empty((arrays.size,) if whole else (), dtype=torch.float32),
        e.new_empty((rows, arrays.size), dtype=torch.float32),
    ]
    to_save = saved_shape_of(arrays.kind, arrays.size, bias is not None, wanted) if wanted else (0, 0)
    if to_save[0]:
        outputs.append(e.new_empty(to_save))
    value, statistics, *saved = bridge.run(
        _loss_program(arrays.kind, arrays.size, wanted, to_save[0] > 0),
        arrays.inputs(e, bias, targets, class_weight, token_weight, num_items, row_length),
        outputs,
    )
    if arrays.size != arrays.tokens:
        statistics = statistics[:, : arrays.tokens].contiguous()
    return arrays.cut(value) if whole else value, statistics, saved[0] if saved else None


def saved_shape(e: Tensor, c: Tensor, bias: Tensor | None, wanted: Wanted, call: Call) -> tuple[int, ...]:
    """The shape of what `loss` saves. The tensors may be fake."""
    kind = kind_of_tensors(e, c, call)
    return saved_shape_of(kind, kind.sizes(e.shape[0]), bias is not None, wanted)


def gradients(
    of_loss, of_statistics, e, c, bias, targets, class_weight, token_weight, num_items, statistics, saved,
    *, wanted: Wanted, of_token_weight: bool, row_length: int, call: Call, numbers: Numbers,
) -> list[Tensor]:  # fmt: skip
    """The wanted ones of de, dc, dbias and the gradient of token_weight, in the shapes of e, c, bias and token_weight.

    of_loss, of_statistics: the cotangents of the first two results of `loss`; None for zero. statistics, saved: the
    other results of `loss`. The program overwrites parts of saved that no later call reads
    (cce_kernels/exponentials.py).
    """
    arrays = Arrays(e, c, call, numbers)
    overwritten = [] if saved is None or not saved.numel() else [saved]
    outputs = []
    if wanted.e:
        outputs.append(e.new_empty((arrays.size, e.shape[1])))
    if wanted.c:
        outputs.append(arrays.of_parameter(arrays.c))
    if wanted.bias:
        outputs.append(arrays.of_parameter(bias))
    if of_token_weight:
        outputs.append(e.new_empty(arrays.size, dtype=torch.float32))
    if of_loss is not None and of_loss.dim():
        of_loss = arrays.padded(of_loss, 0)
    results = list(bridge.run(
        _gradients_program(arrays.kind, wanted, of_token_weight, bool(overwritten), arrays.size),
        [dense(of_loss), arrays.padded(of_statistics, 0, axis=1), arrays.padded(statistics, 0, axis=1),
         *arrays.inputs(e, bias, targets, class_weight, token_weight, num_items, row_length)],
        outputs, scratch=overwritten,
    ))  # fmt: skip
    if wanted.e:
        results[0] = arrays.cut(results[0])
    if wanted.c and arrays.kind.static.head.vocab_axis == 1:
        results[int(wanted.e)] = results[int(wanted.e)].T
    if of_token_weight:
        results[-1] = arrays.cut(results[-1]).to(token_weight.dtype)
    return results


class Tokens:
    """N tokens in a program that is compiled for `size` tokens."""

    def __init__(self, kind: Kind, tokens: int) -> None:
        self.kind, self.tokens, self.size = kind, tokens, kind.sizes(tokens)

    def padded(self, x: Any, fill: float, axis: int = 0) -> Any:
        """x with as many tokens as the program is compiled for. The new tokens hold fill."""
        if x is None or self.size == self.tokens:
            return dense(x)
        shape = list(x.shape)
        shape[axis] = self.size - self.tokens
        return torch.cat([x, x.new_full(shape, fill)], axis)

    def of_parameter(self, x: Tensor) -> Tensor:
        """Memory for the gradient of c or bias."""
        dtype = torch.float32 if self.kind.call.wide_dc else x.dtype
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)

    def cut(self, x: Tensor) -> Tensor:
        """x without the padding. Not a view: autograd forbids changes of a view in place."""
        return x if self.size == self.tokens else x.resize_(self.tokens, *x.shape[1:])

    def of_loss(self, targets, class_weight, token_weight, num_items, row_length: int, numbers: Numbers) -> list:
        """The arguments of `Problem.of` from the targets on."""
        call = self.kind.call
        words = self.padded(targets, call.ignore_index).view(torch.int32)  # JAX without x64 has no 64-bit integers
        length = row_length if call.shift else None
        weights = self.padded(real(token_weight), 0)
        return [words, dense(real(class_weight)), weights, dense(real(num_items)), length, *numbers]


class Arrays(Tokens):
    """The tensors of a call in the form that its program takes: row-major, and padded to the program's size."""

    def __init__(self, e: Tensor, c: Tensor, call: Call, numbers: Numbers) -> None:
        axis = _vocab_axis(c)
        self.c = dense(c.T if axis else c)
        self.numbers = numbers
        super().__init__(kind_of(call, self.c.shape, axis, e.dtype, e.device), e.shape[0])

    def inputs(self, e, bias, targets, class_weight, token_weight, num_items, row_length: int) -> list:
        """The arguments of `Problem.of`."""
        of_loss = self.of_loss(targets, class_weight, token_weight, num_items, row_length, self.numbers)
        return [self.padded(e, 0), self.c, dense(bias), *of_loss]


def real(x: Tensor | None) -> Tensor | None:
    """x in a type that JAX holds without x64."""
    return x if x is None or x.dtype in (torch.float32, torch.bfloat16, torch.float16) else x.float()


def dense(x: Any) -> Any:
    """x in row-major memory. A pending negation is carried out, as DLPack would drop it."""
    return None if x is None else x.resolve_neg().contiguous()


class Problem(NamedTuple):
    """What a program computes the loss of."""

    kind: Kind
    inputs: Inputs
    token_weight: jax.Array | None  # (N,) float32
    num_items: jax.Array | None
    label_smoothing: jax.Array | None
    z_loss: jax.Array | None

    @classmethod
    def of(cls, kind: Kind, e, c, bias, words, class_weight, token_weight, num_items, row_length, label_smoothing,
           z_loss, scale) -> "Problem":  # fmt: skip
        call = kind.call
        columns = _columns(words, call.ignore_index, kind.vocabulary)
        weights = None if class_weight is None else class_weight.astype(jnp.float32)
        if token_weight is not None:
            token_weight = token_weight.astype(jnp.float32)
        if call.shift:
            last = jnp.arange(columns.shape[0], dtype=jnp.int32) % row_length >= row_length - call.shift
            columns = jnp.where(last, -1, _moved(columns, -call.shift, -1))
            token_weight = None if token_weight is None else _moved(token_weight, -call.shift, 0)
        items = None if num_items is None else num_items.reshape(())
        inputs = Inputs(e, c, bias, columns, weights, None if scale is None else scale.reshape(1))
        return cls(kind, inputs, token_weight, items, label_smoothing, z_loss)

    def loss(self, statistics: Statistics, token_weight: jax.Array | None) -> jax.Array:
        """The loss, from the core's numbers."""
        value, _ = losses.loss(statistics, self.inputs.targets, self.inputs.weights, token_weight, self.num_items,
                               vocabulary=self.kind.vocabulary, options=self.kind.call.loss,
                               label_smoothing=self.label_smoothing, z_loss=self.z_loss)  # fmt: skip
        return value

    def results(self, statistics: Statistics) -> tuple[jax.Array, jax.Array]:
        """The loss, and the numbers as an array, 0 for ignored tokens."""
        value = self.loss(statistics, self.token_weight)
        return value, jnp.where(self.inputs.targets >= 0, rows_of(statistics), 0)

    def moved_back(self, of_weight: jax.Array) -> jax.Array:
        """The gradient of the token weights before the shift, from that of self.token_weight."""
        shift = self.kind.call.shift
        return _moved(of_weight, shift, 0) if shift else of_weight


def _columns(words: jax.Array, ignore_index: int, vocabulary: int) -> jax.Array:
    """losses.columns for 64-bit targets, which are given as their low and high words, (2·N,)."""
    low, high = words.reshape(-1, 2).T
    in_vocabulary = (high == 0) & (low >= 0) & (low < vocabulary)
    ignored = (low == _signed(ignore_index & 0xFFFFFFFF)) & (high == _signed(ignore_index >> 32 & 0xFFFFFFFF))
    return jnp.where(ignored, -1, jnp.where(in_vocabulary, low, vocabulary))


def _moved(x: jax.Array, by: int, fill: int) -> jax.Array:
    """x moved by |by| elements, to the end if by > 0, else to the front. The elements that become free hold fill."""
    filling = jnp.full((abs(by),), fill, x.dtype)
    return jnp.concatenate([filling, x[:-by]] if by > 0 else [x[-by:], filling])


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def named(numbers: Any, rows: jax.Array) -> Any:
    """The inverse of `rows_of`, for Statistics or Cotangents."""
    return numbers(*rows, *[None] * (3 - len(rows)))


def rows_of(statistics: Statistics) -> jax.Array:
    return jnp.stack([x for x in statistics if x is not None])


def saved_of(residuals: Residuals) -> list[jax.Array]:
    """What is saved, as one array of Plan.saved_shape; [] for nothing."""
    return jax.tree.leaves(residuals._replace(m=None if residuals.m is None else residuals.m[None]))


def residuals_of(saved: jax.Array | None) -> Residuals:
    """The inverse of `saved_of`."""
    return Residuals(m=saved[0]) if saved is not None and saved.ndim == 3 else Residuals(exponentials=saved)


def jitted(program: Callable, outputs: int, options: dict[str, Any] | None = None) -> Callable:
    """jax.jit(program), whose first arguments are the memory of `outputs` results.

    JAX would drop an argument that the program does not read. keep_unused=True prevents that, but then JAX 0.11.2 never
    frees a program: the cache of _dce_jaxpr holds its own key. A function with a derivative rule of its own keeps all
    its arguments.
    """
    opaque = jax.custom_jvp(program)
    opaque.defjvp(_never_differentiated)
    return jax.jit(opaque, donate_argnums=range(outputs), compiler_options=options)


def _never_differentiated(*_: Any) -> Any:
    raise NotImplementedError("torch differentiates the loss, by another program")


@lru_cache(maxsize=PROGRAMS)
def _loss_program(kind: Kind, size: int, wanted: Wanted | None, saves: bool) -> Callable:
    """The forward program. size: its number of tokens, so that each size is kept and freed alone. wanted: None for
    evaluation.
    """
    count = 3 if saves else 2

    def torch_loss(*arrays):
        problem = Problem.of(kind, *arrays[count:])  # the first `count` are the results' memory
        statistics, residuals = passes.forward_pass(problem.inputs, kind.static, wanted)
        value, rows = problem.results(statistics)
        return value, rows, *saved_of(residuals)

    return jitted(torch_loss, count)


@lru_cache(maxsize=PROGRAMS)
def _gradients_program(kind: Kind, wanted: Wanted, of_token_weight: bool, with_saved: bool, size: int) -> Callable:
    """The backward program. size: as for _loss_program."""
    count = with_saved + wanted.e + wanted.c + wanted.bias + of_token_weight

    def torch_gradients(*arrays):
        saved = arrays[0] if with_saved else None
        of_loss, of_statistics, stacked, *rest = arrays[count:]  # the first `count` are the results' memory
        problem = Problem.of(kind, *rest)

        def value(stacked, token_weight):
            return problem.loss(named(Statistics, stacked), token_weight)

        # Without a cotangent of the loss, the loss is not differentiated. A cotangent of 0 would give NaN for a token
        # whose target is out of range: 0 · NaN is NaN.
        cotangents, of_weight = jnp.zeros_like(stacked), jax.tree.map(jnp.zeros_like, problem.token_weight)
        if of_loss is not None:
            cotangents, of_weight = jax.vjp(value, stacked, problem.token_weight)[1](of_loss)
        if of_statistics is not None:
            cotangents += of_statistics
        found, residuals = passes.gradients(
            problem.inputs, named(Statistics, stacked), residuals_of(saved), named(Cotangents, cotangents), kind.static,
            wanted,
        )  # fmt: skip
        results = *(x for x in found if x is not None), *([problem.moved_back(of_weight)] if of_token_weight else [])
        return *saved_of(residuals), *results

    return jitted(torch_gradients, count, ON_GPU if kind.device.platform != "cpu" else None)

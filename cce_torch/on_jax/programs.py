"""The JAX programs that torch runs, forward and backward. A process keeps the last PROGRAMS of each that it called.

The plan says what the forward program leaves for the backward program (cce_kernels/plan/residuals.py), and so which of
two pairs of programs runs:

    torch_loss, torch_gradients    nothing, exponentials or m is left. The backward program computes the gradients.
                                   If selections are asked for, torch_loss computes them too, and nothing is left.
    torch_begin, torch_finish      the gradients of S, the sum of the tokens' losses, are left. The loss is a function
                                   of S and of numbers that have no gradient, such as the number of items. So the
                                   backward program multiplies by factor = of_loss · ∂loss/∂S. It writes de and dc into
                                   the memory of what was left, if the caller says that nobody will read that later.

A third way has one program. Where the exponentials would be left and a GPU takes less time for the call than the host
for a second program, torch_at_once runs both passes, for a cotangent of the loss of 1. What is left are gradients in
float32: PyTorch multiplies them by the cotangent, and rounds them once.

What lies between the programs are tensors of PyTorch, the leaves of Residuals. Numbers that change from step to step
(label_smoothing, z_loss, scale) are arguments of a program. Whether such a number is given is static.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, wraps
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch import Tensor

from cce_jax import losses, passes, plans
from cce_kernels.numbers import FLOAT32_MAX, Cotangents, Inputs, Numbers, Wanted
from cce_kernels.plan.residuals import Residuals, shapes_of
from cce_kernels.selections import Asked, Selections
from cce_torch import call as records
from cce_torch.call import Call, Given, OfGiven, OfResults, Results, Saved, Scheduled, selects
from cce_torch.on_jax import bridge, first_calls
from cce_torch.on_jax.kinds import Kind, kind_of_tensors, without_results

# The backward pass chooses between kernels by the number of kept tokens. The program with selections takes as many
# chunks as these tokens fill. With these options XLA makes one CUDA graph, in which the device decides. Else the host
# would wait for the number before it launches kernels.
ON_GPU = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": 1,
}
AT_ONCE = 2**37  # N·D·V: an H200 takes about 1.4 ms for such a call
PROGRAMS = 256  # a process on a CPU ended at about 2,000: a program takes several of its 65,530 memory mappings

Result = Tensor | None


class ResidualShapes:
    """What a forward program leaves for the backward program: Residuals, as shapes."""

    def __init__(self, shapes: Residuals) -> None:
        self.shapes = shapes
        each: Any = (None if x is None else (x.shape, getattr(torch, x.dtype.name)) for x in shapes)
        self.fields: Any = records.Residuals(*each)  # the shape and the type of each
        self.is_nothing = self.fields == records.Residuals()
        self.formed = shapes.of_one_factor  # gradients, up to a factor

    @property
    def bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in (x for x in self.fields if x is not None))

    def made(self, make: Callable[[Any, torch.dtype], Tensor]) -> records.Residuals:
        """Residuals as tensors make(shape, dtype)."""
        return records.Residuals(*[None if of is None else make(*of) for of in self.fields])

    def placeholders(self, like: Tensor) -> records.Residuals:
        """Tensors with the memory of one element each."""
        return self.made(lambda shape, dtype: like.new_empty((), dtype=dtype).expand(shape))


class Handover(ResidualShapes):
    """What the forward program of a Kind leaves. The graph holds it, so that the backward program fits what was left.

    It is made once for all calls of these arguments, with all that is decided for them.
    """

    def __init__(self, kind: Kind, size: int, wanted: Wanted | None, shapes: Residuals, at_once: bool = False) -> None:
        """size: the number of tokens of the program. wanted: for which gradients it leaves something.

        at_once: whether these are gradients for a cotangent of the loss of 1, in float32.
        """
        super().__init__(shapes)
        self.at_once = at_once
        self.kind, self.size, self.wanted, call = kind, size, wanted, kind.call
        # The shapes and types of the program's results
        self.numbers = [] if call.of_shard else [(call.losses(size), torch.float32)]
        self.numbers.append(((call.rows, size), torch.float32))
        self.selected = call.selected(size)

    def times(self, residuals: records.Residuals, factor: Tensor, wanted: Sequence[bool], count: int) -> OfGiven:
        """The gradients of `count` tokens, where they were left at_once. factor: the cotangent of the loss, ()."""
        formed, kind = (residuals.de, residuals.dc, residuals.dbias), self.kind
        de, dc, dbias = (
            torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype)) if w and x is not None else None
            for x, w, (_, dtype) in zip(formed, wanted, kind.of_gradients(self.size), strict=False)
        )
        de = None if de is None else Tokens(kind, count).cut(de)
        return OfGiven(de, None if dc is None else kind.in_order_of_c(dc), dbias, None)


@lru_cache(maxsize=PROGRAMS)
def handover_of(kind: Kind, size: int, with_bias: bool, wanted: Wanted | None) -> Handover:
    """What is left for these gradients by the program of `size` tokens. wanted: None for evaluation."""
    inputs = kind.shapes(size, with_bias)
    if wanted is None:
        return Handover(kind, size, wanted, Residuals())
    if kind.call.reduction != "none":
        plan = plans.plan_for(inputs, kind.static, wanted, one_factor=True)
        if plan.in_forward is not None:
            return Handover(kind, size, wanted, shapes_of(plan))
        if plan.saved and math.prod(inputs.e.shape) * kind.vocabulary <= AT_ONCE:
            # What is left is counted too: the memory of the results holds no float32 gradients of 16-bit tensors.
            flags, of = (wanted.e, wanted.c, wanted.bias), kind.of_gradients(size)
            de, dc, dbias = (
                jax.ShapeDtypeStruct(x, "float32") if w else None for w, (x, _) in zip(flags, of, strict=True)
            )
            found = Handover(kind, size, wanted, Residuals(de=de, dc=dc, dbias=dbias), at_once=True)  # type: ignore[arg-type]
            if plan.held + found.bytes <= plan.request.memory_budget:
                return found
    return Handover(kind, size, wanted, shapes_of(plans.plan_for(inputs, kind.static, wanted)))


def handover(given: Given, call: Call, wanted: Sequence[bool]) -> Handover:
    """`handover_of` for a call on these tensors, which may be fake."""
    kind = kind_of_tensors(given.e, given.c, call)
    return handover_of(kind, kind.sizes(int(given.e.shape[0])), given.bias is not None, _wanted(wanted))


def compiled(given: Given, call: Call, wanted: Sequence[bool]) -> Handover:
    """What the forward program of a call leaves that torch.compile traced.

    Only gradients are left. The results cannot take their memory there, so de and dc count twice against the budget.
    """
    call = call._replace(compiled=False)
    found = handover(given, without_results(call, given.e, given.c, wanted), wanted)
    return found if found.formed else handover(given, call, [])


def _wanted(gradients: Sequence[bool]) -> Wanted | None:
    return _made(*gradients) if gradients else None


_made = lru_cache(Wanted)


def loss(left: Handover, given: Given, scheduled: Scheduled, reference: Tensor | None) -> Results:
    """The results of a call, with what is left. N ≥ 1. If selections are asked for, nothing is left.

    reference: of a shard of the vocabulary, (N,), the logits of the targets, which one of the shards holds. The
    exponentials of the kernels are relative to it. It is −inf where no shard holds the target, and None where the
    program finds it, or needs none.
    """
    kind, new = left.kind, given.e.new_empty
    tokens, numbers = Tokens(kind, given.e.shape[0]), [new(shape, dtype=dtype) for shape, dtype in left.numbers]
    others = [None if x is None else new(x[0], dtype=x[1]) for x in (*left.fields, *left.selected)]
    outputs = numbers + [x for x in others if x is not None]
    inputs = tokens.inputs(given, scheduled, kind.in_memory(given.c))
    if left.formed:
        begins = _at_once_program if left.at_once else _begin_program
        program = begins(kind, left.size, left.wanted, len(outputs))
    else:
        program = _loss_program(kind, left.size, left.wanted, len(outputs))
        inputs.insert(0, tokens.padded(reference, 0))
    bridge.run(program, inputs, outputs)
    residuals, selections = (
        records.Residuals(*others[: len(left.fields)]),
        records.Selections(*others[len(left.fields) :]),
    )
    if selects(kind.call):
        selections = records.Selections(*(None if x is None else tokens.cut(x) for x in selections))
    value = new(0, dtype=torch.float32) if kind.call.of_shard else numbers[0]
    value = tokens.cut(value) if left.numbers[0][0] == (left.size,) else value
    return Results(value, tokens.first(numbers[-1]), selections, residuals)


def target(given: Given, scheduled: Scheduled, wanted: Sequence[bool], call: Call) -> Tensor:
    """The logit of each token's target, (N,) float32: 0 where a shard of the vocabulary does not hold it."""
    kind = kind_of_tensors(given.e, given.c, call)
    tokens, output = Tokens(kind, given.e.shape[0]), given.e.new_empty
    program = _target_program(kind, tokens.size, _wanted(wanted))
    inputs = tokens.inputs(given, scheduled, kind.in_memory(given.c))
    return tokens.first(bridge.run(program, inputs, [output(tokens.size, dtype=torch.float32)])[0])


def gradients(
    left: Handover,
    given: Given,
    scheduled: Scheduled,
    saved: Saved,
    of: OfResults,
    wanted: Sequence[bool],
    in_place: bool,
) -> OfGiven:
    """The wanted ones of de, dc, dbias and the gradient of token_weight, in their tensors' shapes; None: not wanted.

    left: of the forward pass. saved.statistics: the rows of kind.of_backward, to which the cotangents belong. Where
    gradients were left, the cotangent of the statistics is None. in_place: de and dc take the memory of what was left,
    which is of no use afterwards. Otherwise the program overwrites only parts of it that no later call reads
    (cce_kernels/exponentials.py).
    """
    kind, of_token_weight, residuals = left.kind.of_backward, wanted[3], saved.residuals
    tokens, (of_loss, of_statistics), at_once = Tokens(kind, given.targets.numel()), of, None
    if left.at_once:
        assert of_loss is not None
        at_once = left.times(residuals, of_loss, wanted, tokens.count)
        if not of_token_weight:
            return at_once
        wanted = False, False, False, True  # torch_finish gives the rest
    asked, scratch = _made(*wanted[:3]), []
    of_weight = [given.targets.new_empty(tokens.size, dtype=torch.float32)] if of_token_weight else []
    if left.formed:
        assert left.wanted is not None
        large = [dense(x) for x, w in ((residuals.de, asked.e), (residuals.dc, asked.c)) if w and x is not None]
        program = _finish_program(
            kind, left.size, given.bias is not None, left.wanted, asked, of_token_weight, in_place
        )
        small = zip(residuals._replace(de=None, dc=None), left.fields, strict=True)
        others = [dense(x) for x, of in small if x is not None and of is not None]
        statistics = tokens.padded(saved.statistics, 0, axis=1) if of_token_weight else None
        inputs = [*others, dense(of_loss), statistics, *tokens.of_loss(given, scheduled)]
        inputs = inputs if in_place else large + inputs
        outputs = [*(large if in_place else map(torch.empty_like, large))]
        outputs += tokens.of_gradients(given.targets, (False, False, asked.bias))
    else:
        of_loss = tokens.padded(of_loss, 0) if of_loss is not None and of_loss.dim() else dense(of_loss)
        name = next((k for k, x in zip(left.fields._fields, left.fields, strict=True) if x is not None), None)
        program = _gradients_program(kind, asked, of_token_weight, name, tokens.size)
        inputs = [of_loss, tokens.padded(of_statistics, 0, axis=1), tokens.padded(saved.statistics, 0, axis=1)]
        inputs += tokens.inputs(given, scheduled, kind.in_memory(given.c))
        outputs, scratch = tokens.of_gradients(given.e, wanted[:3]), [getattr(residuals, name)] if name else []
    found = iter(bridge.run(program, inputs, [*outputs, *of_weight], scratch))
    de, dc, dbias, dweight = (next(found) if w else None for w in wanted)
    if dc is not None:
        dc = kind.in_order_of_c(viewed(dc, kind.dtype) if left.shapes.steps is not None else dc)
    if dweight is not None:
        dweight = tokens.cut(dweight).to(given.token_weight.dtype)  # type: ignore[union-attr]
    if at_once is not None:
        return at_once._replace(token_weight=dweight)
    return OfGiven(None if de is None else tokens.cut(de), dc, dbias, dweight)


class Tokens:
    """N tokens in a program that is compiled for `size` tokens."""

    def __init__(self, kind: Kind, count: int) -> None:
        self.kind, self.count, self.size = kind, count, kind.sizes(count)

    def padded(self, x: Any, fill: float, axis: int = 0) -> Any:
        """x with as many tokens as the program is compiled for. The new tokens hold fill."""
        if x is None:
            return None
        if self.size == self.count:
            return dense(x)
        shape = list(x.shape)
        shape[axis] = self.size - self.count
        return torch.cat([x, x.new_full(shape, fill)], axis)

    def of_gradients(self, like: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
        """Memory for the wanted ones of de, dc, in the order of memory, and dbias. like: a tensor on the device."""
        each = self.kind.of_gradients(self.size)
        return [like.new_empty(shape, dtype=dtype) for (shape, dtype), w in zip(each, wanted, strict=True) if w]

    def cut(self, x: Tensor) -> Tensor:
        """x without the padding. Not a view: autograd forbids changes of a view in place."""
        return x if self.size == self.count else x.resize_(self.count, *x.shape[1:])

    def first(self, x: Tensor) -> Tensor:
        """The tokens of (..., N) that are no padding."""
        return x if self.size == self.count else x[..., : self.count].contiguous()

    def inputs(self, given: Given, scheduled: Scheduled, c: Tensor) -> list:
        """The arguments of `Problem.of`. c: given.c in the order of memory."""
        return [self.padded(given.e, 0), c, dense(given.bias), *self.of_loss(given, scheduled)]

    def of_loss(self, given: Given, scheduled: Scheduled) -> list:
        """The arguments of `Problem.of` from the targets on."""
        call, targets = self.kind.call, given.targets
        length = targets.shape[-1] if call.shift else None
        targets = targets if targets.dim() == 1 else targets.reshape(-1)
        # JAX without x64 has no 64-bit integers.
        words = self.padded(targets, call.ignore_index).view(torch.int32)
        weights = self.padded(real(given.token_weight), 0)
        others = real(given.class_weight), weights, real(given.num_items)
        of_tokens = self.padded(given.inverse_temperature, 1), self.padded(given.ids, -1)
        return [words, *others, *of_tokens, length, *_terms(*scheduled)]


@lru_cache(maxsize=1024)
def _terms(label_smoothing: float, z_loss: float, scale: float) -> tuple[float | None, ...]:
    """The numbers as arguments of a program; None stands for a number that changes nothing."""
    return float(label_smoothing) or None, float(z_loss) or None, scale_of(scale)


def scale_of(scale: float) -> float | None:
    return None if scale == 1 else float(scale)


def real(x: Tensor | None) -> Tensor | None:
    """x in row-major memory, in a type that JAX holds without x64."""
    if x is None:
        return None
    return dense(x if x.dtype in (torch.float32, torch.bfloat16, torch.float16) else x.float())


def dense(x: Any) -> Any:
    """x in row-major memory. A pending negation is carried out, as DLPack would drop it."""
    return None if x is None else x.resolve_neg().contiguous()


def viewed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The memory of x as another type. No view to autograd, which forbids changes of a view in place."""
    storage: Any = x.untyped_storage()
    return torch.empty(0, dtype=dtype, device=x.device).set_(storage, x.storage_offset(), x.shape, x.stride())


class Problem(NamedTuple):
    """What a program computes the loss of."""

    kind: Kind
    inputs: Inputs
    token_weight: jax.Array | None  # (N,) float32
    num_items: jax.Array | None
    label_smoothing: jax.Array | None
    z_loss: jax.Array | None

    @classmethod
    def of(cls, kind: Kind, arrays: Sequence[Any]) -> "Problem":
        """arrays: of `Tokens.inputs`."""
        e, c, bias, words, class_weight, token_weight, num_items, inverse_temperature, ids, *others = arrays
        (row_length, label_smoothing, z_loss, scale), call = others, kind.call
        columns = _columns(words, call.ignore_index, kind.vocabulary)
        weights = None if class_weight is None else class_weight.astype(jnp.float32)
        if token_weight is not None:
            token_weight = token_weight.astype(jnp.float32)
        if call.shift:
            last = jnp.arange(columns.shape[0], dtype=jnp.int32) % row_length >= row_length - call.shift
            columns = jnp.where(last, -1, _moved(columns, -call.shift, -1))
            token_weight = None if token_weight is None else _moved(token_weight, -call.shift, 0)
        items = None if num_items is None else num_items.reshape(())
        scale = None if scale is None else scale.reshape(1)
        inputs = Inputs(e, c, bias, columns, weights, scale, inverse_temperature, ids)
        return cls(kind, inputs, token_weight, items, label_smoothing, z_loss)

    def loss(self, statistics: Numbers, token_weight: jax.Array | None) -> jax.Array:
        """The loss, from the statistics."""
        terms, vocabulary = self.terms(token_weight), self.kind.vocabulary
        return losses.loss(statistics, terms, self.common, self.num_items, self.kind.loss, vocabulary)[0]

    def results(self, statistics: Numbers, others: Residuals | Selections) -> tuple[jax.Array, ...]:
        """The loss, but not of a shard; the statistics as an array, 0 for ignored tokens; the others."""
        kept = jnp.where(self.inputs.targets >= 0, stacked(statistics), 0), *jax.tree.leaves(others)
        return kept if self.kind.call.of_shard else (self.loss(statistics, self.token_weight), *kept)

    def terms(self, token_weight: jax.Array | None) -> losses.Terms:
        inputs = self.inputs
        return losses.terms(inputs.targets, inputs.weights, token_weight, self.kind.vocabulary, jnp.float32)

    @property
    def common(self) -> losses.Common:
        return losses.Common(self.label_smoothing, self.z_loss, self.inputs.weights)

    def factor(self, of_loss: jax.Array) -> jax.Array:
        """of_loss · ∂loss/∂S, where S is the sum of the tokens' losses."""
        terms = self.terms(self.token_weight)

        def loss(total):
            return losses.reduced(total, terms, self.num_items, self.kind.loss)

        return jax.vjp(loss, jnp.float32(0))[1](of_loss)[0]

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


def stacked(statistics: Numbers) -> jax.Array:
    """The statistics as one array, (Call.rows, N)."""
    *rows, mean, ids = statistics
    parts = jnp.stack([x for x in rows if x is not None]), None if ids is None else ids.T, mean
    return jnp.concatenate([jnp.atleast_2d(x) for x in parts if x is not None])


def unstacked(of: Any, rows: jax.Array, call: Call) -> Any:
    """The inverse of `stacked`. of: Numbers; or Cotangents, without the reference's."""
    log_mass, reference, target, *_ = rows
    mean, ids = rows[-1] if call.with_mean else None, call.ids_of(rows) if call.ids else None
    total = rows[3] if call.smooths else None
    if of is Cotangents:
        return Cotangents(log_mass, target, total, mean, ids)
    return Numbers(log_mass, reference, target, total, mean, ids)


def finite(reference: jax.Array | None) -> jax.Array | None:
    """reference as cce_kernels.blocks.numbers takes it: −FLOAT32_MAX where no shard holds the target."""
    return None if reference is None else jnp.maximum(reference, -FLOAT32_MAX)


def jitted(program: Callable, outputs: int, options: dict[str, Any] | None = None) -> Callable:
    """jax.jit(program), whose first arguments are the memory of `outputs` results.

    JAX would drop an argument that the program does not read. keep_unused=True prevents that, but then JAX 0.11.2 never
    frees a program: the cache of _dce_jaxpr holds its own key. A function with a derivative rule of its own keeps all
    its arguments.
    """

    @wraps(program)
    def traced(*arrays: Any) -> Any:
        first_calls.tracing()
        return program(*arrays)

    opaque = jax.custom_jvp(traced)
    opaque.defjvp(_never_differentiated)
    return jax.jit(opaque, donate_argnums=range(outputs), compiler_options=options)


def _never_differentiated(*_: Any) -> Any:
    raise NotImplementedError("torch differentiates the loss, by another program")


def options_on(kind: Kind) -> dict[str, Any] | None:
    """XLA's options for a program whose loops and branches depend on the number of kept tokens."""
    return ON_GPU if kind.device.platform != "cpu" else None


# Arguments of each program: `size`, its number of tokens, so that each size is kept and freed alone; `count` or what
# gives it, the number of results, whose memory comes first among the program's arguments.


@lru_cache(maxsize=PROGRAMS)
def _loss_program(kind: Kind, size: int, wanted: Wanted | None, count: int) -> Callable:
    """wanted: None for evaluation."""

    def torch_loss(*arrays):
        reference, *of_problem = arrays[count:]  # the first are the results' memory
        problem = Problem.of(kind, of_problem)
        if selects(kind.call):
            asked = Asked(kind.call.top_k, kind.call.mean_logit)
            return problem.results(*passes.numbers_and_selections(problem.inputs, kind.static, asked))
        return problem.results(*passes.forward_pass(problem.inputs, kind.static, wanted, finite(reference)))

    return jitted(torch_loss, count, options_on(kind) if selects(kind.call) else None)


@lru_cache(maxsize=PROGRAMS)
def _target_program(kind: Kind, size: int, wanted: Wanted | None) -> Callable:
    def torch_target(_, *arrays):
        return (passes.target_logits(Problem.of(kind, arrays).inputs, kind.static, wanted),)

    return jitted(torch_target, 1)


@lru_cache(maxsize=PROGRAMS)
def _begin_program(kind: Kind, size: int, wanted: Wanted, count: int) -> Callable:
    def torch_begin(*arrays):
        problem = Problem.of(kind, arrays[count:])
        cotangents_of = losses.cotangents_of(problem.common, kind.loss, kind.vocabulary)
        terms = problem.terms(problem.token_weight)
        return problem.results(*passes.begin(problem.inputs, terms, cotangents_of, kind.static, wanted))

    return jitted(torch_begin, count)


@lru_cache(maxsize=PROGRAMS)
def _at_once_program(kind: Kind, size: int, wanted: Wanted, count: int) -> Callable:
    def torch_at_once(*arrays):
        problem = Problem.of(kind, arrays[count:])
        inputs, static = problem.inputs, replace(kind.static, wide_de=True, wide_dc=True)
        numbers, left = passes.forward_pass(inputs, static, wanted)
        numbers = jax.tree.map(lambda x: jnp.where(inputs.targets >= 0, x, 0), numbers)
        of_numbers = jax.grad(lambda numbers: problem.loss(numbers, problem.token_weight))(numbers)
        (de, dc, dbias), _ = passes.gradients(inputs, numbers, left, Cotangents.of(of_numbers), static, wanted)
        return problem.results(numbers, Residuals(de=de, dc=dc, dbias=dbias))

    return jitted(torch_at_once, count, options_on(kind))


@lru_cache(maxsize=PROGRAMS)
def _gradients_program(kind: Kind, wanted: Wanted, of_token_weight: bool, left: str | None, size: int) -> Callable:
    """left: the one field of Residuals that the forward program left."""
    count = (left is not None) + wanted.e + wanted.c + wanted.bias + of_token_weight

    def torch_gradients(*arrays):
        residuals = Residuals(**{left: arrays[0]}) if left else Residuals()
        of_loss, of_statistics, rows, *others = arrays[count:]
        problem = Problem.of(kind, others)

        def value(rows, token_weight):
            return problem.loss(unstacked(Numbers, rows, kind.call), token_weight)

        # Without a cotangent of the loss, the loss is not differentiated. A cotangent of 0 would give NaN for a token
        # whose target is out of range: 0 · NaN is NaN.
        cotangents, of_weight = jnp.zeros_like(rows), jax.tree.map(jnp.zeros_like, problem.token_weight)
        if of_loss is not None:
            cotangents, of_weight = jax.vjp(value, rows, problem.token_weight)[1](of_loss)
        if of_statistics is not None:
            cotangents += of_statistics
        statistics, of = (unstacked(x, y, kind.call) for x, y in ((Numbers, rows), (Cotangents, cotangents)))
        found, residuals = passes.gradients(problem.inputs, statistics, residuals, of, kind.static, wanted)
        results = [*found, problem.moved_back(of_weight) if of_token_weight else None]
        return tuple(jax.tree.leaves((residuals, results)))

    return jitted(torch_gradients, count, options_on(kind))


@lru_cache(maxsize=PROGRAMS)
def _finish_program(
    kind: Kind, size: int, with_bias: bool, left_for: Wanted, wanted: Wanted, of_token_weight: bool, in_place: bool
) -> Callable:
    shapes = handover_of(kind, size, with_bias, left_for).shapes
    others = jax.tree.structure(shapes._replace(de=None, dc=None))
    count, large = wanted.e + wanted.c + wanted.bias + of_token_weight, wanted.e + wanted.c

    def torch_finish(*arrays):
        arrays = iter(arrays[:large] + arrays[count:] if in_place else arrays[count:])
        de, dc = (next(arrays) if w else None for w in (wanted.e, wanted.c))
        residuals: Residuals = jax.tree.unflatten(others, islice(arrays, others.num_leaves))
        of_loss, rows, *of_problem = arrays
        unread = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kind.shapes(size, with_bias))
        problem = Problem.of(kind, [unread.e, unread.c, unread.bias, *of_problem])
        residuals, factor = residuals._replace(de=de, dc=dc), problem.factor(of_loss)
        found = passes.finish(problem.inputs, residuals, factor, kind.static, left_for)
        dc = found.c
        if dc is not None and shapes.steps is not None:
            dc = lax.bitcast_convert_type(dc, jnp.int16)  # the type in which dc was left, to be written into its memory
        results = [x if w else None for x, w in ((found.e, wanted.e), (dc, wanted.c), (found.bias, wanted.bias))]
        if of_token_weight:

            def value(token_weight):
                return problem.loss(unstacked(Numbers, rows, kind.call), token_weight)

            results.append(problem.moved_back(jax.vjp(value, problem.token_weight)[1](of_loss)[0]))
        return tuple(x for x in results if x is not None)

    return jitted(torch_finish, count)

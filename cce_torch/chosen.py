"""Logits of chosen columns, in chunks of tokens: those of given ids, and the largest of each token. No (N, V) tensor.

`logits` are differentiable in e, c and bias. With ids k of token i, and equation (6) of cce_jax/core.py for the logits

    z_ik = τ_i · softcap(scale · (e_i·c_k + b_k))         dz_ik = ẑ_ik · scale · τ_i · (1 − (z_ik / τ_i κ)²)
    de_i = Σ_k dz_ik c_k              dc_v = Σ_{ik: id_ik = v} dz_ik e_i              db_v = Σ_{ik: id_ik = v} dz_ik

The rows c_k are gathered for a chunk of tokens at a time. For dc the pairs (i, k) are sorted by id. So the pairs of a
group of the vocabulary follow one another, and are summed in float32, one group after another.

`largest` is for PyTorch alone and for a split vocabulary. Other calls get the largest logits from the JAX program that
computes the statistics (cce_kernels/selections.py). `largest` has no derivative. It multiplies chunks of tokens and
groups of the vocabulary by torch.mm, and takes the largest logits of each. Where processes split the vocabulary, each
has the logits of its own columns; logits of ids are summed over the processes, and the largest logits are gathered.

Each takes at most ROOM bytes at a time, or the memory budget if that is less. A budget below LEAST_ROOM counts as
LEAST_ROOM: with less, PyTorch's loop over tokens and columns would have millions of steps. One token is always taken.
"""

from typing import Any

import torch
from torch import Tensor

from cce_kernels.default_budget import default_budget
from cce_torch.call import Operands, Selections
from cce_torch.operators import operator
from cce_torch.processes.collectives import gathered, one_cotangent, reduced, summed, whole
from cce_torch.processes.vocab_parallel import Setting, VocabParallel
from cce_torch.reverse_mode import applied, first_order
from cce_torch.torch_alone import blocks, reference
from cce_torch.torch_alone.compiled import WANTED, fake_gradients, new_gradients

ROOM = 256 * 2**20
LEAST_ROOM = 8 * 2**20
MOST_COLUMNS = 16384  # of a group: wide enough for a fast matmul
BYTES_OF_LOGIT = 32  # of a logit among which the largest are looked for: the logit, copies, an integer key, and sorted


def _options(setting: Setting) -> tuple[float, float | None, int | None]:
    """OPTIONS of an operator."""
    return setting.scheduled[2], setting.call.softcap, setting.call.memory_budget


def logits(operands: Operands, ids: Tensor, setting: Setting) -> Tensor:
    """The logits of ids, (N, K), at least float32, differentiable in e, c and bias. Arbitrary where an id is negative.

    ids: (N, K) int64, less than V. Where processes split the vocabulary, c has the rows of this process.
    """
    if setting.call.impl == "reference" and setting.shard is None:
        z = reference.logits(operands, setting.call, setting.scheduled[2])
        return z.gather(1, ids.clamp(min=0))
    e, c, bias, _, _, inverse_temperature = operands
    return applied(_Logits, e, c, bias, ids, inverse_temperature, setting)  # type: ignore[no-any-return]


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(e, c, bias, ids, inverse_temperature, setting: Setting) -> Tensor:
        shard = setting.shard
        own = _own(ids, shard)
        e = _whole(e, setting)
        z = id_logits(e, c, bias, own, inverse_temperature, *_options(setting))
        return z if shard is None else summed(torch.where(own >= 0, z, 0), shard)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        (*tensors, ctx.setting), ctx.called = inputs, "linear_log_probs"
        ctx.save_for_backward(*tensors, output)

    @staticmethod
    def backward(ctx: Any, of_logits: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        setting, wanted = ctx.setting, ctx.needs_input_grad[:3]
        of_logits = of_logits if setting.shard is None else one_cotangent(of_logits)

        def run(of_logits: Tensor, e: Tensor, c: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
            bias, ids, inverse_temperature, z = others
            own, shard, part, wide = _own(ids, setting.shard), setting.shard, e.shape, setting.shard is not None
            dz = _of_products(of_logits, z, inverse_temperature, setting)
            dz, e, budget = torch.where(own >= 0, dz, 0), _whole(e, setting), setting.call.memory_budget
            de, dc, dbias = id_gradients(dz, e, c, bias, own, budget, *wanted, wide)
            if wanted[0] and shard is not None:
                de = reduced(de, part, setting.tokens, shard).to(e.dtype)
            return tuple(x if w else None for x, w in zip((de, dc, dbias), wanted, strict=True))

        found = first_order(ctx.called, run, (of_logits, *ctx.saved_tensors))
        return tuple(found) + (None,) * 3


def _own(ids: Tensor, shard: VocabParallel | None) -> Tensor:
    """ids as rows of this process' c; -1 where it does not hold them."""
    if shard is None:
        return ids
    return torch.where((ids >= shard.start) & (ids < shard.stop), ids - shard.start, -1)


def _whole(e: Tensor, setting: Setting) -> Tensor:
    """e of all tokens, (N, D)."""
    e = e if setting.shard is None else whole(e, setting.tokens, setting.shard)
    return e.reshape(-1, e.shape[-1])


def _of_products(of_logits: Tensor, z: Tensor, inverse_temperature: Tensor | None, setting: Setting) -> Tensor:
    """dz, (N, K), from the cotangents of the logits z."""
    dz, softcap = of_logits * setting.scheduled[2], setting.call.softcap
    if inverse_temperature is not None:
        dz, z = dz * inverse_temperature[:, None], z / inverse_temperature[:, None]
    return dz if softcap is None else dz * (1 - (z / softcap) ** 2)


def _room(e: Tensor, memory_budget: int | None) -> int:
    budget = default_budget(e.shape[0], e.shape[1], e.itemsize) if memory_budget is None else memory_budget
    return min(max(budget, LEAST_ROOM), ROOM)


PARAMETERS = "Tensor e, Tensor c, Tensor? bias"
OPTIONS = "float scale, float? softcap, SymInt? memory_budget"


def _fake_logits(e: Tensor, _c: Tensor, _bias: Tensor | None, ids: Tensor, *_: Any) -> Tensor:
    return e.new_empty(ids.shape, dtype=torch.promote_types(e.dtype, torch.float32))


@operator("id_logits", f"{PARAMETERS}, Tensor ids, Tensor? inverse_temperature, {OPTIONS}", "Tensor", _fake_logits)
def id_logits(*arguments: Any) -> Tensor:
    """The logits of ids, (N, K). e: (N, D). Arbitrary where an id is negative; 0 if c has no rows."""
    e, c, bias, ids, inverse_temperature, scale, softcap, memory_budget = arguments
    accumulate = torch.promote_types(e.dtype, torch.float32)
    found = e.new_zeros(ids.shape, dtype=accumulate)
    if not len(c):
        return found
    row = 3 * accumulate.itemsize * ids.shape[1] * e.shape[1]  # bytes: the rows of c, rounded, and wide
    for part in blocks.runs(len(e), _room(e, memory_budget) // max(row, 1)):
        at = ids[part].clamp(min=0)
        raw = torch.bmm(c[at].to(e.dtype).to(accumulate), e[part].to(accumulate)[:, :, None])[:, :, 0]
        raw = raw if bias is None else raw + bias[at].to(e.dtype).to(accumulate)
        inverse = None if inverse_temperature is None else inverse_temperature[part]
        z = blocks.capped(raw, scale, softcap)
        found[part] = z if inverse is None else z * inverse[:, None]
    return found


@operator(
    "id_gradients",
    f"Tensor dz, {PARAMETERS}, Tensor ids, SymInt? memory_budget, {WANTED}",
    "(Tensor, Tensor, Tensor)",
    fake_gradients,
)
def id_gradients(dz: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """de, dc and dbias; one that is not wanted has no elements. dz: (N, K), 0 where an id is negative."""
    e, c, bias, ids, memory_budget, *wanted = arguments
    want_e, want_c, *_ = wanted
    room, accumulate = _room(e, memory_budget), dz.dtype
    de, dc, dbias = new_gradients(e, c, bias, *wanted)
    if want_e:
        de.zero_()
        row = 3 * accumulate.itemsize * ids.shape[1] * e.shape[1]
        for part in blocks.runs(len(e) if len(c) else 0, room // max(row, 1)):
            rows = c[ids[part].clamp(min=0)].to(e.dtype).to(accumulate)
            de[part] = torch.bmm(dz[part][:, None], rows)[:, 0].to(de.dtype)
    if dbias.numel():
        sums = dbias.new_zeros(len(c) + 1, dtype=accumulate)  # the last is of no column
        dbias.copy_(_add_at(sums, _named(ids, len(c)), dz.flatten())[:-1])
    if want_c:
        _write_dc(dc, dz, e, ids, room)
    return de, dc, dbias


def _named(ids: Tensor, rows: int) -> Tensor:
    """ids, (N·K,), with `rows` in place of a negative id."""
    return torch.where(ids < 0, rows, ids).flatten()


def _add_at(sums: Tensor, at: Tensor, values: Tensor) -> Tensor:
    """sums, with values added to the rows `at`, in the same order each time: on CUDA index_add_ has none."""
    return sums.index_put_((at,), values, accumulate=True) if sums.is_cuda else sums.index_add_(0, at, values)


def _write_dc(dc: Tensor, dz: Tensor, e: Tensor, ids: Tensor, room: int) -> None:
    """dc, (V, D), in float32 sums of one group of the vocabulary after another."""
    (vocabulary, width), accumulate, each = dc.shape, dz.dtype, ids.shape[1]
    group = max(min(room // (2 * accumulate.itemsize * width), vocabulary), 1)
    named, order = torch.sort(_named(ids, vocabulary))
    starts = [*range(0, vocabulary, group), vocabulary]
    bounds = torch.searchsorted(named, torch.tensor(starts, device=named.device)).tolist()  # waits for the GPU
    for start, stop, first, last in zip(starts[:-1], starts[1:], bounds[:-1], bounds[1:], strict=True):
        sums = dz.new_zeros((stop - start, width))
        for part in blocks.runs(last - first, room // (4 * accumulate.itemsize * width)):
            pairs = order[first:last][part]
            values = e[pairs // each].to(accumulate) * dz.flatten()[pairs, None]
            _add_at(sums, named[first:last][part] - start, values)
        dc[start:stop] = sums


def largest(operands: Operands, count: int, setting: Setting) -> Selections:
    """The `count` largest logits of each token and their ids, and the mean logit. Arbitrary for an ignored token.

    The lowest id comes first among equal logits. A count of 0 gives the mean alone.
    """
    (bias, _, _, inverse_temperature), shard = operands[2:], setting.shard
    e, c, bias = _whole(operands.e.detach(), setting), operands.c.detach(), None if bias is None else bias.detach()
    values, ids, total = largest_logits(e, c, bias, inverse_temperature, count, *_options(setting))
    if shard is None:
        return Selections(values, ids, total / len(c))
    values = gathered(values, shard).transpose(0, 1).flatten(1)
    ids = gathered(ids + shard.start, shard).transpose(0, 1).flatten(1)
    return Selections(*_merged(values, ids, count), summed(total, shard) / shard.vocabulary)


def _fake_largest(e: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    accumulate, shape = torch.promote_types(e.dtype, torch.float32), (e.shape[0], others[3])
    new = e.new_empty
    return new(shape, dtype=accumulate), new(shape, dtype=torch.int64), new(e.shape[0], dtype=accumulate)


@operator(
    "largest_logits",
    f"{PARAMETERS}, Tensor? inverse_temperature, SymInt count, {OPTIONS}",
    "(Tensor, Tensor, Tensor)",
    _fake_largest,
)
def largest_logits(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logits and their ids, (N, count), and the sum of the logits, (N,). Fewer than count: -inf."""
    e, c, bias, inverse_temperature, count, scale, softcap, memory_budget = arguments
    (accumulate, operand), room = blocks.types(e), _room(e, memory_budget)
    values = e.new_full((len(e), count), -torch.inf, dtype=accumulate)
    ids, total = torch.full_like(values, len(c), dtype=torch.int64), values.new_zeros(len(e))
    columns = max(min(room // (4 * accumulate.itemsize * max(e.shape[1], 1)), MOST_COLUMNS), 1)
    for part in blocks.runs(len(e), room // (BYTES_OF_LOGIT * min(columns, max(len(c), 1)))):
        of_part = e[part].to(operand)
        inverse = None if inverse_temperature is None else inverse_temperature[part]
        for group in blocks.runs(len(c), columns):
            raw = blocks.product(of_part, c[group].to(e.dtype).to(operand).t(), accumulate)
            raw = raw if bias is None else raw + bias[group].to(e.dtype).to(accumulate)
            z = blocks.capped(raw, scale, softcap)
            z = z if inverse is None else z * inverse[:, None]
            total[part] += z.sum(1)
            if count:
                more, where = _largest(z, min(count, z.shape[1]))
                both = torch.cat([values[part], more], 1), torch.cat([ids[part], where + group.start], 1)
                values[part], ids[part] = _merged(*both, count)
    return values, ids, total


def _largest(z: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest of z, (n, V), in any order, and their columns; of equal ones those of the lowest columns.

    torch.topk takes any of equal elements. So it gets integers that differ: the order of a float32 z in the upper half,
    and the columns, counted from the end, in the lower half.
    """
    if z.dtype == torch.float64:
        values, columns = torch.sort(z, dim=1, descending=True, stable=True)
        return values[:, :count], columns[:, :count]
    bits = (z + 0.0).view(torch.int32)  # -0 becomes 0
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # negative numbers are ordered by their other bits, reversed
    last = z.shape[1] - 1
    keys = (bits.long() << 32) + (last - torch.arange(z.shape[1], device=z.device))
    columns = last - (torch.topk(keys, count, dim=1).values & 0xFFFFFFFF)
    return z.gather(1, columns), columns


def _merged(values: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of values, (n, m), descending, and their ids; of equal ones the lowest ids first."""
    ids, order = torch.sort(ids, dim=1)
    values, by_value = torch.sort(values.gather(1, order), dim=1, descending=True, stable=True)
    return values[:, :count], ids.gather(1, by_value)[:, :count]

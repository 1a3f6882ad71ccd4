"""The logits of given ids of each token, and what their cotangents ι add to dz.

    ids_ik = z_i,id(i,k)          dz_iv = (… + Σ_k ι_ik·[v = id(i,k)]) · ∂z_iv/∂(e_i·c_v)

Forward: rows of c are gathered and multiplied by e in float32. A logit is not rounded. Read: N·K rows of c. On a GPU
XLA makes one kernel of it, which holds none of them. Elsewhere never held: the rows of more than CHUNK_BYTES.
Tensor cores cut off the last digits of each partial sum. So the logits that an engine sums, and lse with them, are too
close to 0, each in proportion to itself. The ids' logits are not. So what lse has lost is taken from them too: what the
target's logit has lost (this product minus that of the engine), times lse over the target's logit. Where lse is further
from 0 than that logit, the quotient would multiply the roundings of both products: it is 1 at most.

Backward: dz at the ids is formed in float32 from these logits, with the terms of all numbers in it. Each window of the
vocabulary writes its ids' elements over those of the dz that an engine formed, before the two matmuls. To add ι to the
engine's element would not do: the element has been rounded to 16 bits, and p − 1 of a confident token is smaller than
the rounding of p. Where a token repeats an id, each copy writes the same number, which has the cotangents of all of
them: the order of the writes does not matter.

An id that is negative, or V or more, names no column. Its logit is 0 and it has no gradient. The same holds for all ids
of an ignored token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cce_kernels.device import Gpu
from cce_kernels.head import Head
from cce_kernels.mean import relative
from cce_kernels.numbers import Cotangents, Inputs, Numbers
from cce_kernels.request import Request
from cce_kernels.tokens import in_chunks
from cce_kernels.windows import FormDz, Window

CHUNK_BYTES = 64 * 2**20  # the most for the gathered rows of a chunk
BUDGET_SHARE = 8  # and at most the memory budget over this


class AtIds(NamedTuple):
    """Elements of dz, (rows, K) each. A column of -1: there is no such element."""

    columns: jax.Array  # int32
    dz: jax.Array  # at least float32


def logits(inputs: Inputs, numbers: Numbers | None, request: Request, gpu: Gpu | None) -> jax.Array:
    """The logits of the ids, (N, K), at least float32.

    numbers: the engine's; None where the columns are a shard. Without them, or with a softcap, which changes a
    difference of logits by the slope at each, no logit is moved.
    """
    assert inputs.ids is not None
    if numbers is None or request.head.softcap is not None:
        return products(inputs, request, gpu)
    found = products(inputs._replace(ids=jnp.concatenate([inputs.ids, inputs.targets[:, None]], axis=1)), request, gpu)
    moved = found[:, :-1] + lost(numbers, found[:, -1])[:, None]
    return jnp.where(columns_of(inputs, request.head) < 0, 0, moved)


def lost(numbers: Numbers, at_target: jax.Array) -> jax.Array:
    """What lse has lost, (N,). at_target: the target's logit of `products`."""
    found = (numbers.target - at_target) * jnp.clip(numbers.lse / numbers.target, -1, 1)
    return jnp.where(jnp.isfinite(found), found, 0)  # a bias may be −inf, and a target's logit 0


def products(inputs: Inputs, request: Request, gpu: Gpu | None) -> jax.Array:
    """The logits of the ids in float32's own products for every head.precision: no unit for matmuls computes them."""
    head, (c, bias) = request.head, (inputs.c, inputs.bias)

    def of_chunk(arrays: tuple[dict[str, jax.Array], jax.Array]) -> jax.Array:
        of_tokens, columns = arrays
        given = _without_ignored(inputs._replace(**of_tokens))
        column = jnp.maximum(columns, 0)
        if head.vocab_axis == 0:
            rows, e, width = c.at[column].get(mode="promise_in_bounds"), given.e[:, None, :], 2
        else:
            rows, e, width = c.at[:, column].get(mode="promise_in_bounds"), given.e.T[:, :, None], 0
        raw = jnp.sum(rows.astype(request.sum_dtype) * e.astype(request.sum_dtype), axis=width)
        x = head.logits(raw, None if bias is None else bias[column].astype(raw.dtype), given.scale)
        return jnp.where(columns < 0, 0, given.divided(x))

    size = _chunk(request, request.width * (request.itemsize + request.sum_itemsize)) if gpu is None else request.tokens
    return in_chunks(of_chunk, (inputs.of_tokens, columns_of(inputs, head)), size)


def columns_of(inputs: Inputs, head: Head) -> jax.Array:
    """The column that each id names, (N, K); -1 where it names none, or its token is ignored."""
    assert inputs.ids is not None
    named = (inputs.ids >= 0) & (inputs.ids < head.vocabulary(inputs.c)) & (inputs.targets >= 0)[:, None]
    return jnp.where(named, inputs.ids, -1)


def dz_at(inputs: Inputs, numbers: Numbers, of: Cotangents, request: Request) -> AtIds:
    """dz at the ids. numbers: over the whole vocabulary."""
    assert numbers.ids is not None
    assert of.ids is not None
    head, inputs = request.head, _without_ignored(inputs)
    columns, inverse = columns_of(inputs, head), inputs.inverse_temperature
    x = numbers.ids if inverse is None else numbers.ids / inverse[:, None]
    log_p = jnp.minimum(numbers.ids - numbers.reference[:, None], numbers.log_mass[:, None])
    of = relative(of, numbers, inputs.targets >= 0)
    weights = None if inputs.weights is None else inputs.weights[jnp.maximum(columns, 0)]
    of_tokens = jax.tree.map(lambda x: x[:, None], of._replace(ids=None))
    of_tokens = of_tokens._replace(ids=in_chunks(_of_repeated, (columns, of.ids), _chunk(request, 4 * request.ids)))
    is_target = columns == inputs.targets[:, None]
    return AtIds(
        columns, head.cotangent(x, jnp.exp(log_p), is_target, of_tokens, weights, inputs.factor_of_rows, log_p)
    )


def written(form: FormDz, at: AtIds, count: jax.Array) -> FormDz:
    """form, with the elements of dz that are known `at` ids. count: rows of dz from this one on are arbitrary.

    The column sums are then those of dz after it was rounded.
    """

    def formed(window: Window) -> tuple[jax.Array, jax.Array | None]:
        dz, sums = form(window)
        rows, columns = dz.shape
        row = jnp.arange(rows, dtype=jnp.int32)[:, None]
        local = jnp.where(at.columns >= window.owned, at.columns - window.start, columns)
        dz = dz.at[row, local].set(at.dz.astype(dz.dtype), mode="drop")
        if sums is not None:
            sums = jnp.sum(jnp.where(row < count, dz, 0).astype(sums.dtype), axis=0)
        return dz, sums

    return formed


def _of_repeated(given: tuple[jax.Array, jax.Array]) -> jax.Array:
    """For each id of a token the sum of the cotangents of the ids that name the same column, (n, K).

    Every copy of an id has the same bits: each sum has the same terms at the same places.
    """
    columns, of = given
    return jnp.sum(jnp.where(columns[:, :, None] == columns[:, None, :], of[:, None, :], 0), axis=2)


def _chunk(request: Request, of_id: int) -> int:
    """The tokens of a chunk that holds so many bytes for each id, and for the target."""
    room = min(CHUNK_BYTES, request.memory_budget // BUDGET_SHARE)
    return max(room // ((request.ids + 1) * of_id), 1)


def _without_ignored(inputs: Inputs) -> Inputs:
    """The inputs with e = 0 and temperature 1 for ignored tokens, whose rows may hold NaN."""
    live, inverse = inputs.targets >= 0, inputs.inverse_temperature
    inverse = None if inverse is None else jnp.where(live, inverse, 1)
    return inputs._replace(e=jnp.where(live[:, None], inputs.e, 0), inverse_temperature=inverse)

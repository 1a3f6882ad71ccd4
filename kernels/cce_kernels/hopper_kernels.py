"""The matmuls of the loss and its gradient on Hopper GPUs, for the calls that need no more than these.

    statistics   e·cᵀ       a run of the vocabulary a pair of programs; only sums leave, and exponentials to be saved
    dz           e·c_gᵀ     a group of columns, 16 bits an element written
    de           dz·c_g     added to de, float32, by the memory system
    saved_de     r·(P·c)    written once, of the tokens that are saved (saved.py)
    dc           dzᵀ·e      written once; or Pᵀ·(r·e) of all columns; or, a group of columns, both in one sum

They compute what forward.py, backward.py and products.py say, in the same places of the same arrays; cce_kernels/
tiles.py says of which calls (for_hopper). Read: left once per 256 columns, right once per 256 rows, from L2 wherever
programs that run together share them; never c_g, dc_g or any part of an array copied. de is added to where it lies by
the memory system, each element once a launch, so that the sum has one order. Each stops at the last kept token. Of a
group they take the number alone, the counter of XLA's loop, so that nothing else is launched to say where it starts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from cce_kernels.config import DEPTH, HOPPER, PAIR_ROWS, Gpu, HopperTiles, PairTiles
from cce_kernels.groups import Beside, Products
from cce_kernels.hopper import (
    BLOCK,
    ROWS,
    Multiply,
    Place,
    Sum,
    Work,
    along_rows,
    column_numbers,
    launch,
    parts_of,
    vector_of,
    zero_vector,
)
from cce_kernels.logits import Head, vocabulary_size
from cce_kernels.tiles import FLOAT32_MAX, LOG2_E, cdiv, grouped_order, row_group
from cce_kernels.windows import Groups, Window

PAIR_GROUP = 8  # pairs of row blocks that go through all columns before the next ones, at most


def _logits(raw: jax.Array, head: Head) -> jax.Array:
    """Head.logits without a bias; tanh by the exponential, whose hardware instruction is the more exact one."""
    z = raw if head.scale == 1.0 else raw * head.scale
    if head.softcap is None:
        return z
    return head.softcap - 2 * head.softcap / (1 + jnp.exp2(z * (2 * LOG2_E / head.softcap)))


def _padded(x: jax.Array) -> jax.Array:
    """Numbers of tokens, along the last axis, up to a multiple of PAIR_ROWS, as they are not copied by TMA."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % PAIR_ROWS)])


def _live_pairs(count: jax.Array) -> jax.Array:
    """Of row blocks that have some of the first `count` tokens; at least one."""
    return jnp.maximum(lax.div(count + (PAIR_ROWS - 1), PAIR_ROWS), 1)


def _spread(unit, units: int, pairs, column_tiles: int | jax.Array, group: int):
    """Of pairs · column_tiles tiles, how many one of the units computes; and where its n-th one lies.

    Those that run together lie side by side, however many pairs of row blocks the device finds.
    """
    tiles = lax.div(pairs * column_tiles - unit + (units - 1), units)
    return tiles, lambda n: grouped_order(unit + n * units, pairs, column_tiles, group)


class _Extent(NamedTuple):
    """Of a product: pairs of row blocks; columns; and its sums, one for each pair of operands."""

    pairs: Any
    columns: Any
    sums: Sequence[Sum]


def _every_tile(
    operands: Sequence[tuple[jax.Array, jax.Array]], others: Sequence[jax.Array | None],
    out: jax.Array | jax.ShapeDtypeStruct, multiply: Multiply, extent: Callable[..., _Extent],
    write: Callable[..., None], *, units: int, group: int, name: str, interpret,
) -> jax.Array:  # fmt: skip
    """Runs a kernel that writes each tile of the sum of products of pairs of operands once.

    extent(*others), of their Refs; write(warpgroup, product, row, column, out, *others), of a warpgroup's first row and
    column; product() gives the tile.
    """

    def kernel(*refs):
        *others, out_ref = refs
        shape = extent(*others)
        column_tiles = lax.div(shape.columns + (multiply.tiles.columns - 1), multiply.tiles.columns)
        spread = partial(_spread, units=units, pairs=shape.pairs, column_tiles=column_tiles, group=group)

        def work(unit, program) -> Work:
            tiles, at = spread(unit)

            def first(n):
                pair, column = at(n)
                return pair * PAIR_ROWS + program * BLOCK, column * multiply.tiles.columns

            return Work(tiles, first, shape.sums)

        def compute(warpgroup, work, product):
            program, (_, at) = lax.axis_index("cluster"), spread(lax.axis_index("pair"))

            def tile(n, carry):
                pair, column = at(n)
                row = warpgroup.first_row(pair * PAIR_ROWS + program * BLOCK)
                write(warpgroup, partial(product, n), row, column * multiply.tiles.columns, out_ref, *others)
                return carry

            lax.fori_loop(jnp.int32(0), work.tiles, tile, None)

        return work, compute

    (written,) = launch(operands, others, (out,), multiply, kernel, pairs=units, name=name, written=out.dtype,
                        interpret=interpret)  # fmt: skip
    assert written is not None
    return written


def statistics(
    e: jax.Array, c: jax.Array, target: jax.Array, starts: jax.Array | None, count: jax.Array,
    saved: jax.ShapeDtypeStruct | None, *, head: Head, splits: int, tiles: HopperTiles = HOPPER, interpret=None,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Log-sum-exps of runs of the vocabulary, (splits, N), inf where relative to the target a sum overflows; and P.

    starts: for each block of 128 tokens the first of its rows in e, negative where they do not lie side by side and
    nothing is to be written; None where they are those of e. count: from which token on nothing need be written.
    """
    (tokens, width), vocabulary, columns = e.shape, vocabulary_size(c, head), tiles.logits.columns
    pairs, column_tiles = cdiv(tokens, PAIR_ROWS), cdiv(vocabulary, columns)
    reference = jnp.clip(target * LOG2_E, -FLOAT32_MAX, FLOAT32_MAX)
    if starts is not None:
        assert starts.size == cdiv(tokens, BLOCK), "the kernel of scattered tokens has blocks of another size"
        starts = jnp.pad(starts, (0, 2 * pairs - starts.size), constant_values=-1)

    def kernel(reference_ref, starts_ref, count_ref, total_ref, saved_ref):
        def run(unit):
            pair, split = grouped_order(unit, pairs, splits, row_group(width, e.dtype.itemsize, PAIR_ROWS, PAIR_GROUP))
            first = lax.div(split * column_tiles, splits)
            return pair, split, first, lax.div((split + 1) * column_tiles, splits) - first

        def work(unit, program) -> Work:
            pair, _split, first, length = run(unit)
            row = pair * PAIR_ROWS + program * BLOCK
            length = jnp.where(pair * PAIR_ROWS < count_ref[0], length, 0)
            if starts_ref is not None:
                row = jnp.maximum(starts_ref[pair * 2 + program], 0)
            return Work(length, lambda n: (row, (first + n) * columns), [Sum(width // DEPTH, Place)])

        def compute(warpgroup, work, product):
            program = lax.axis_index("cluster")
            pair, split, first = run(lax.axis_index("pair"))[:3]
            row = warpgroup.first_row(pair * PAIR_ROWS + program * BLOCK)
            shift = vector_of(reference_ref, row)

            def tile(n, total):
                column = (first + n) * columns
                sums: list[jax.Array] = [total]

                def exponentials():
                    for begin, raw in parts_of(product(n), e.dtype):
                        p = jnp.exp2(_logits(raw, head) * LOG2_E - along_rows(shift, raw.shape))
                        if vocabulary % columns:
                            p = jnp.where(column_numbers(p.shape) < vocabulary - column - begin, p, 0.0)
                        sums.append(jnp.sum(p, axis=1))
                        yield p.astype(e.dtype)

                if saved_ref is None:
                    for _ in exponentials():
                        pass
                else:  # beyond its rows nothing is written
                    warpgroup.write(exponentials(), saved_ref, row, column)
                return sum(sums[1:], sums[0])

            total = lax.fori_loop(jnp.int32(0), work.tiles, tile, zero_vector())
            here = True if starts_ref is None else starts_ref[pair * 2 + program] >= 0

            @pl.when(here)
            def _():
                total_ref[split, pl.ds(row, ROWS)] = total

        return work, compute

    total, p = launch(
        [(e, c)], (_padded(reference), starts, count),
        (jax.ShapeDtypeStruct((splits, pairs * PAIR_ROWS), jnp.float32), saved),
        Multiply(tiles.logits, right_axis=1 - head.vocab_axis), kernel, pairs=pairs * splits, name="cce_statistics",
        written=None if saved is None else saved.dtype, interpret=interpret,
    )  # fmt: skip
    assert total is not None
    return (reference + jnp.log2(total[:, :tokens])) / LOG2_E, p


def dz_of_groups(
    e, c, lse, targets, cotangents, count,
    *, head: Head, groups: Groups, gpu: Gpu, tiles: HopperTiles = HOPPER, interpret=None,
) -> Callable[[Window], jax.Array]:  # fmt: skip
    """What backward.dz_of_group gives for a window, of a call that these kernels serve.

    groups.columns: a multiple of 64.
    """
    of_tokens = _padded(lse * LOG2_E), _padded(targets), _padded(cotangents), count  # once for all groups

    def extent(lse_ref, targets_ref, cotangents_ref, count_ref, number_ref) -> _Extent:
        start = groups.window(number_ref[0]).start
        left = jnp.minimum(groups.columns, groups.vocabulary - start)
        logits = Sum(e.shape[1] // DEPTH, lambda row, column: Place(row, start + column))
        return _Extent(_live_pairs(count_ref[0]), left, [logits])

    def write(warpgroup, product, row, column, dz_ref, lse_ref, targets_ref, cotangents_ref, count_ref, number_ref):
        start = groups.window(number_ref[0]).start
        vectors = lse_ref, targets_ref, cotangents_ref.at[0], cotangents_ref.at[1]
        lse, targets, of_lse, of_target = (vector_of(x, row) for x in vectors)

        def cotangents():
            for first, raw in parts_of(product(), e.dtype):
                z, shape = _logits(raw, head), raw.shape
                p = jnp.exp2(z * LOG2_E - along_rows(lse, shape))
                is_target = column_numbers(shape) == along_rows(targets - (start + column + first), shape)
                dz = head.cotangent(z, p, is_target, along_rows(of_lse, shape), along_rows(of_target, shape))
                yield dz.astype(e.dtype)

        warpgroup.write(cotangents(), dz_ref, row, column)

    def of_group(window: Window) -> jax.Array:
        return _every_tile(
            [(e, c)], (*of_tokens, window.number.reshape(1)),
            jax.ShapeDtypeStruct((e.shape[0], groups.columns), e.dtype),
            Multiply(tiles.logits, right_axis=1 - head.vocab_axis), extent, write, units=gpu.multiprocessors // 2,
            group=row_group(e.shape[1], e.dtype.itemsize, PAIR_ROWS, PAIR_GROUP), name="cce_dz", interpret=interpret,
        )  # fmt: skip

    return of_group


def cheapest(tiles: tuple[PairTiles, ...], pairs: int, width: int, units: int) -> PairTiles:
    return min(tiles, key=lambda x: x.cost(pairs, width, units))


def de_of_saved(
    p: jax.Array, r: jax.Array, c: jax.Array, count: jax.Array, place: jax.Array,
    *, head: Head, gpu: Gpu, tiles: HopperTiles = HOPPER, interpret=None,
) -> jax.Array:  # fmt: skip
    """r·(P·c) of the first `count` rows of P, (N_s, V), rounded, in the first rows of place, (N, D); N_s ≤ N.

    It may overwrite the others. r: (N_s,).
    """
    vocabulary, width, units = vocabulary_size(c, head), place.shape[1], gpu.multiprocessors // 2

    def extent(r_ref, count_ref) -> _Extent:
        return _Extent(_live_pairs(count_ref[0]), width, [Sum(vocabulary // DEPTH, Place)])

    def write(warpgroup, product, row, column, out_ref, r_ref, count_ref):
        r = vector_of(r_ref, row)
        parts = (x * along_rows(r, x.shape) for _, x in parts_of(product(), out_ref.dtype))
        warpgroup.write((x.astype(out_ref.dtype) for x in parts), out_ref, row, column)

    multiply = Multiply(cheapest(tiles.saved_de, cdiv(len(p), PAIR_ROWS), width, units), right_axis=head.vocab_axis)
    return _every_tile([(p, c)], (_padded(r), count), place, multiply, extent, write, units=units, group=PAIR_GROUP,
                       name="cce_saved_de", interpret=interpret)  # fmt: skip


def products(
    e: jax.Array, c: jax.Array, *, head: Head, unit: jax.Array | None, count: jax.Array, gpu: Gpu,
    groups: Groups, adding: bool = False, beside: Beside | None = None, splits: int = 1, tiles: HopperTiles = HOPPER,
    interpret=None,
) -> Products:  # fmt: skip
    """As products.kernel_products, for a call that these kernels serve; de is never None."""
    (tokens, width), vocabulary, axis = e.shape, vocabulary_size(c, head), head.vocab_axis
    units = gpu.multiprocessors // 2
    run = partial(_every_tile, units=units, group=PAIR_GROUP, interpret=interpret)

    def start_of(number_ref):
        return groups.window(number_ref[0]).start

    def add_de(de, dz, window):
        def extent(count_ref, number_ref) -> _Extent:
            start = start_of(number_ref)
            left = jnp.minimum(dz.shape[1], vocabulary - start)  # of the group's columns the vocabulary's
            steps, live = lax.div(left + (DEPTH * splits - 1), DEPTH * splits), _live_pairs(count_ref[0])

            def place(row, column) -> Place:
                inner = lax.div(row, live * PAIR_ROWS) * steps * DEPTH
                return Place(lax.rem(row, live * PAIR_ROWS), column, inner, start + inner)

            return _Extent(live * splits, width, [Sum(steps, place, None if splits == 1 else left)])

        def write(warpgroup, product, row, column, de_ref, count_ref, number_ref):
            live = _live_pairs(count_ref[0]) * PAIR_ROWS
            below = lax.div(row, live) * tokens + lax.rem(row, live)
            warpgroup.write((x for _, x in parts_of(product(), de_ref.dtype)), de_ref, below, column, add=True)

        multiply = Multiply(cheapest(tiles.de, cdiv(tokens, PAIR_ROWS) * splits, width, units), right_axis=axis)
        return run([(dz, c)], (count, window.number.reshape(1)), de, multiply, extent, write, name="cce_de")

    def put_dc(dc, dz, window):
        def ordered(of_group, of_width):
            """Of what has to do with the group and with D, what is left's, rows', and what is right's, columns'."""
            return (of_group, of_width) if axis == 0 else (of_width, of_group)

        def extent(count_ref, number_ref, unit_ref, saved_count_ref) -> _Extent:
            start = start_of(number_ref)
            rows, columns = ordered(jnp.minimum(dz.shape[1], vocabulary - start), width)

            def of_tokens(count_ref, first) -> Sum:
                of_row, of_column = ordered(first, 0)
                return Sum(lax.div(count_ref[0] + (DEPTH - 1), DEPTH),
                             lambda row, column: Place(of_row + row, of_column + column))  # fmt: skip

            sums = [of_tokens(count_ref, 0)]
            if beside is not None:
                sums.append(of_tokens(saved_count_ref, start))
            return _Extent(lax.div(rows + (PAIR_ROWS - 1), PAIR_ROWS), columns, sums)

        def write(warpgroup, product, row, column, dc_ref, count_ref, number_ref, unit_ref, saved_count_ref):
            parts = (x if unit_ref is None else x * unit_ref[0] for _, x in parts_of(product(), dc_ref.dtype))
            of_row, of_column = ordered(start_of(number_ref), 0)
            warpgroup.write((x.astype(dc_ref.dtype) for x in parts), dc_ref, of_row + row, of_column + column,
                            add=adding)  # fmt: skip

        rows, columns = ordered(dz.shape[1], width)
        multiply = Multiply(cheapest(tiles.dc, cdiv(rows, PAIR_ROWS), columns, units), left_axis=0, right_axis=0)
        operands = [ordered(dz, e)] + ([] if beside is None else [ordered(beside.exponentials, beside.e)])
        scale, of_saved = None if unit is None else unit.reshape(1), None if beside is None else beside.count
        others = count, window.number.reshape(1), scale, of_saved
        return run(operands, others, dc, multiply, extent, write, name="cce_dc")

    return Products(add_de, put_dc)

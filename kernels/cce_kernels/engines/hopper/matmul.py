"""Matmuls with an epilogue for Hopper GPUs (compute capability 9.0), lowered through Mosaic GPU.

    out_tile = epilogue(left[rows] · right[columns]ᵀ)

A program has three warpgroups, which work at the same time. One copies tiles into shared memory (by TMA), `stages`
steps ahead, even while another is in its epilogue. The other two multiply, 64 rows each. The second begins a few steps
after the first, so that the tensor cores work for one while the other is in its epilogue.
Programs come in pairs on neighbouring multiprocessors. The two programs of a pair have 128 rows each and the same
columns of right, of which each copies one half into the shared memory of both; or, with PairTiles.across, the same rows
of left and columns of their own.
Edges need no masks: TMA reads zeros beyond an array and writes nothing there. This holds only for arrays wider than
one of its tiles (64 columns): on an H200, writes beyond an array of exactly that width landed in the array.

statistics.py, dz.py and products.py say what is multiplied. In JAX 0.11 the kernels also run in Pallas' GPU interpreter
(tests/test_hopper.py); in JAX 0.10 they only lower.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cce_kernels.compat import run_on_mesh
from cce_kernels.device import Gpu
from cce_kernels.engines.hopper.registers import BLOCK, ROWS, multiple, remainder
from cce_kernels.engines.hopper.tiles import DEPTH, TMA_ROWS, PairTiles

OUTSIDE = 2**30  # an index beyond every array
COPYING = 2  # the index of the warpgroup that copies
REGISTERS = {"computing": 232, "copying": 40}  # per thread; 2 · 232 + 40 are all that a multiprocessor has


PARAMETERS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


@dataclass(frozen=True)
class Multiply:
    """The layout of the operands: left (rows, inner), right (columns, inner). With axis 0 inner comes first instead.

    out_axis: the axis of the output that the rows are. With 1 the output is (columns, rows), of a 16-bit type: the
    instructions that move tiles between registers and shared memory (ldmatrix, stmatrix) transpose them there.
    """

    tiles: PairTiles
    left_axis: int = 1
    right_axis: int = 1
    out_axis: int = 0
    written: Any = None  # the type of the parts that Warpgroup.write gets; None: it is not called
    gather: int = DEPTH  # along the inner axis, so many elements of a step are neighbours; with less, both axes are 0


class Work(NamedTuple):
    """What a program computes. The numbers may be known to the device alone."""

    tiles: Any  # how many tiles
    at: Callable[[Any], tuple[Any, Any]]  # n -> the first row and column of the program's n-th tile
    sum: "Sum"


class Sum(NamedTuple):
    """The sum over left·right that makes up a tile."""

    steps: Any  # steps of DEPTH along the inner axis; or a function: (row, column) of a tile -> its steps
    origin: Callable[[Any, Any], "Origin"]  # (row, column) of a tile -> where its operands begin
    limit: Any = None  # left counts as 0 from this index of its inner axis on; None: no limit


def over_tiles(work: Work, tile: Callable[[tuple[Any, Any], Any, Any], None]) -> Any:
    """Calls tile((row, column), first_step, steps) for each tile of a program. Returns the steps of all tiles.

    first_step: the steps of the tiles before.
    """
    same = None if callable(work.sum.steps) else work.sum.steps

    def body(n, first_step):
        at = work.at(n)
        steps = work.sum.steps(*at) if same is None else same
        tile(at, first_step if same is None else n * same, steps)
        return first_step + steps if same is None else first_step

    total = lax.fori_loop(jnp.int32(0), work.tiles, body, jnp.int32(0))
    return total if same is None else work.tiles * same


class Origin(NamedTuple):
    """The indices in left and right where a tile's operands begin."""

    row: Any  # of left
    column: Any  # of right
    left_inner: Any = 0
    right_inner: Any = 0
    # k -> where the k-th `gather` elements of a block-sparse sum are, in units of as many; None: the k-th are
    listed: Callable[[Any], Any] | None = None


class _Shared(NamedTuple):
    """A program's shared memory and barriers. left, right, full and free have one element for each stage."""

    left: Any
    right: Any
    slots: Any  # buffers of tiles that are being written
    full: Any  # completes when the stage has been copied
    free: Any  # completes when both programs of the pair have multiplied the stage
    started: Any  # completes when the first warpgroup is PairTiles.lead steps ahead, or has computed all of its tiles
    read: Any  # completes when a tile has been copied into a warpgroup's slots; one element for each warpgroup


class Warpgroup(NamedTuple):
    """The warpgroup that an epilogue runs in."""

    number: Any
    multiply: Multiply
    shared: _Shared

    def first_row(self, of_program):
        """This warpgroup's first row, from its program's first row."""
        return of_program + self.number * ROWS

    def begin_reading(self, out, row, column) -> None:
        """Begins to copy the tile out[row:, column:] into the slots, which hold a whole tile. `read` waits for it."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for k in range(self.multiply.tiles.slots):
            part = self._part_of(out, row, column, k)
            plgpu.copy_gmem_to_smem(part, self._slot(k), self.shared.read.at[self.number])

    def read(self) -> Iterator[jax.Array]:
        """The parts of the tile that `begin_reading` copies."""
        plgpu.barrier_wait(self.shared.read.at[self.number])
        for k in range(self.multiply.tiles.slots):
            yield plgpu.layout_cast(self._part(k)[...], plgpu.Layout.WGMMA)

    def write(self, parts: Iterable[jax.Array], out, row, column, add: bool = False) -> None:
        """Writes, or with add adds, the parts of a tile to out[row:, column:], side by side, in the parts' type."""
        slots = self.multiply.tiles.slots
        for k, part in enumerate(parts):
            plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
            self._part(k % slots)[...] = part
            plgpu.commit_smem()
            part_of_out = self._part_of(out, row, column, k)
            plgpu.copy_smem_to_gmem(self._slot(k % slots), part_of_out, reduction_op="add" if add else None)

    def write_at_once(self, parts: Iterable[jax.Array], out, row, column) -> None:
        """`write`, where the slots hold a whole tile and nothing is being copied from them."""
        for k, part in enumerate(parts):
            self._part(k)[...] = part
        plgpu.commit_smem()
        for k in range(self.multiply.tiles.slots):
            plgpu.copy_smem_to_gmem(self._slot(k), self._part_of(out, row, column, k))

    def _slot(self, k: int):
        """A slot, in the layout of the output."""
        return self.shared.slots.at[self.number, k]

    def _part(self, k: int):
        """The part of a tile in a slot: rows by columns of the tile."""
        return self._slot(k) if self.multiply.out_axis == 0 else self._slot(k).transpose((1, 0))

    def _part_of(self, out, row, column, k: int):
        """The k-th part of the tile that begins at this row and column, in the output."""
        width = self.shared.slots.shape[-1]
        at = pl.ds(multiple(row, TMA_ROWS), ROWS), pl.ds(multiple(column, DEPTH) + k * width, width)
        return out.at[at if self.multiply.out_axis == 0 else at[::-1]]


def interpret_params(gpu: Gpu) -> Any:
    """What runs the kernels: Pallas' GPU interpreter, or None for the GPU itself."""
    return plgpu.InterpretGPUParams(detect_races=True) if gpu.interpreted else None  # type: ignore[attr-defined]


def _copies(shared: _Shared, multiply: Multiply, left, right, work: Work) -> None:
    """What the copying warpgroup does: it copies every step of every tile as soon as the step's stage is free."""
    stages, limit, size, buffers = multiply.tiles.stages, work.sum.limit, multiply.gather, (shared.left, shared.right)
    shared_left, shared_right = ("cluster", None) if multiply.tiles.across else (None, "cluster")

    def tile(at, first_step, steps):
        origin = work.sum.origin(*at)
        row = multiple(origin.row, TMA_ROWS if multiply.left_axis else DEPTH)
        left_inner, right_inner = multiple(origin.left_inner, DEPTH), multiple(origin.right_inner, DEPTH)
        columns = pl.ds(multiple(origin.column, DEPTH), multiply.tiles.columns)

        def step(k, carry):
            i = first_step + k
            slot = remainder(i, stages)
            parts = DEPTH // size
            # loaded before the wait, which hides that they come from memory
            along = [x if origin.listed is None else origin.listed(x) for x in (k * parts + j for j in range(parts))]
            pl.when(i >= stages)(lambda: plgpu.barrier_wait(shared.free.at[slot]))
            full = shared.full.at[slot]
            for j, at in enumerate(along):
                inner = left_inner + at * size
                if limit is not None:
                    inner = multiple(jnp.where(inner < limit, inner, OUTSIDE), size)
                of_left = pl.ds(row, BLOCK), pl.ds(multiple(inner, size), size)
                of_right = columns, pl.ds(multiple(right_inner + at * size, size), size)
                to_left, to_right = (x.at[slot] if parts == 1 else x.at[slot, pl.ds(j * size, size)] for x in buffers)
                left_part = left.at[of_left if multiply.left_axis else of_left[::-1]]
                plgpu.copy_gmem_to_smem(left_part, to_left, full, collective_axes=shared_left)
                right_part = right.at[of_right if multiply.right_axis else of_right[::-1]]
                plgpu.copy_gmem_to_smem(right_part, to_right, full, collective_axes=shared_right)
            return carry

        lax.fori_loop(jnp.int32(0), steps, step, None)

    def drain(i, carry):  # a program must not end while its pair's other program still copies into its shared memory
        plgpu.barrier_wait(shared.free.at[remainder(i, stages)])
        return carry

    total = over_tiles(work, tile)
    lax.fori_loop(jnp.maximum(total - stages, 0), total, drain, None)


def _product(warpgroup: Warpgroup, first_step, steps, near_end: Callable[[], None] | None = None) -> jax.Array:
    """This warpgroup's rows of a tile that is the sum of so many steps, (ROWS, columns), float32.

    first_step: the steps of the program's tiles before this one.
    near_end: called once, two steps before the last. It may wait until the tile before this one has been written, and
    the matmul waits with it. So earlier is slower: a sum of dc over 512 tokens, 8 steps, took 1.31, 1.23 and 1.18 ms
    where near_end came in step 1, 4 and 6.
    """
    multiply, shared, number = warpgroup.multiply, warpgroup.shared, warpgroup.number
    stages = multiply.tiles.stages
    own = pl.ds(number * ROWS, ROWS)

    def run(accumulator):
        def step(k, carry):
            i = first_step + k
            slot = remainder(i, stages)
            plgpu.barrier_wait(shared.full.at[slot])
            left = shared.left.at[slot, own] if multiply.left_axis else shared.left.at[slot, :, own].transpose((1, 0))
            right = shared.right.at[slot].transpose((1, 0)) if multiply.right_axis else shared.right.at[slot]
            plgpu.wgmma(accumulator, left, right)
            plgpu.wgmma_wait(1)
            pl.when(k > 0)(lambda: plgpu.barrier_arrive(shared.free.at[remainder(i + stages - 1, stages)]))
            if near_end is not None:
                pl.when(k == jnp.maximum(steps - 2, 0))(near_end)
            if multiply.tiles.lead:
                pl.when((number == 0) & (i == multiply.tiles.lead))(lambda: plgpu.barrier_arrive(shared.started))
            return carry

        lax.fori_loop(jnp.int32(0), steps, step, None)
        return accumulator[...]

    if near_end is not None:
        pl.when(steps == 0)(near_end)
    accumulator = plgpu.ACC((ROWS, multiply.tiles.columns), jnp.float32)  # type: ignore[reportPrivateImportUsage]
    product = pl.run_scoped(run, accumulator)
    pl.when(steps > 0)(lambda: plgpu.barrier_arrive(shared.free.at[remainder(first_step + steps - 1 + stages, stages)]))
    return product


def _body(left, right, multiply: Multiply, work_of, compute, shared: _Shared) -> None:
    number = lax.axis_index("warpgroup")
    work = work_of(lax.axis_index("pair"), lax.axis_index("cluster"))

    @pl.when(number < COPYING)
    def _():
        plgpu.set_max_registers(REGISTERS["computing"], action="increase")
        warpgroup = Warpgroup(number, multiply, shared)
        if multiply.tiles.lead:
            pl.when(number == 1)(lambda: plgpu.barrier_wait(shared.started))
        steps = compute(warpgroup, work, partial(_product, warpgroup))
        if multiply.tiles.lead:
            pl.when((number == 0) & (steps <= multiply.tiles.lead))(lambda: plgpu.barrier_arrive(shared.started))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(number == COPYING)
    def _():
        plgpu.set_max_registers(REGISTERS["copying"], action="decrease")
        _copies(shared, multiply, left, right, work)


def launch(
    operands: tuple[jax.Array, jax.Array],
    others: Any,
    outputs: Sequence[jax.Array | jax.ShapeDtypeStruct | None],
    multiply: Multiply,
    kernel: Callable[..., tuple[Callable[..., Work], Callable[..., Any]]],
    *,
    pairs: int,
    name: str,
    gpu: Gpu,
) -> list[jax.Array | None]:
    """Runs a kernel in `pairs` pairs of programs, and returns its outputs.

    operands: left and right. others: a tree of arrays. outputs: an array is written in place.
    kernel(others, *outputs) gets refs, or None for None. It returns work_of(pair, program) -> Work, where program is 0
    or 1, and compute(warpgroup, work, product), which must call product(first_step, steps) once for each tile, in
    order, and returns the steps of all its tiles.
    """
    given = operands, others, tuple(outputs)
    started = jax.tree.map(lambda x: lax.empty(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, given)
    arrays, tree = jax.tree.flatten(started)
    inputs = len(arrays) - len(jax.tree.leaves(outputs))
    dtype = operands[0].dtype
    axes = {"grid": (pairs,), "grid_names": ("pair",), "cluster": (2,), "cluster_names": ("cluster",)}
    mesh = plgpu.Mesh(**axes, num_threads=3, thread_name="warpgroup")

    def tile(rows: int, axis: int):
        shape = (rows, DEPTH) if axis else (DEPTH, rows)
        return plgpu.SMEM((multiply.tiles.stages, *shape), dtype, transforms=_swizzled(dtype))

    stages = multiply.tiles.stages
    written = multiply.written
    slots = 2, multiply.tiles.slots, ROWS, 128 // jnp.dtype(dtype if written is None else written).itemsize
    scratch = [
        tile(BLOCK, multiply.left_axis),
        tile(multiply.tiles.columns, multiply.right_axis),
        None if written is None else plgpu.SMEM(slots, written, transforms=_swizzled(written)),
        plgpu.Barrier(num_arrivals=2 * DEPTH // multiply.gather, num_barriers=stages),
        plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=multiply.tiles.slots, num_barriers=2),
    ]

    @jax.custom_batching.sequential_vmap
    def request(*arrays):
        def stateful(refs):
            (left, right), of_others, of_outputs = jax.tree.unflatten(tree, refs)

            def body(*_):
                work_of, compute = kernel(of_others, *of_outputs)

                def scoped(*shared):
                    _body(left, right, multiply, work_of, compute, _Shared(*shared))

                pl.run_scoped(scoped, *scratch, collective_axes="warpgroup")

            options = {"name": name, "interpret": interpret_params(gpu), "compiler_params": PARAMETERS}
            run_on_mesh(body, mesh, **options)

        return pl.run_state(stateful)(arrays)[inputs:]

    found = iter(request(*arrays))
    return [None if x is None else next(found) for x in outputs]


def _swizzled(dtype) -> tuple[Any, ...]:
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)

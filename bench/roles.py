"""What bench/tune.py times: for each role of a kernel its candidate tiles, its program and what that runs on."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bench.data import Shape, trained
from cce_kernels import forward
from cce_kernels.call import Call
from cce_kernels.contract import MEMORY_BUDGET
from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Engine
from cce_kernels.engines.hopper import HOPPER, units_of
from cce_kernels.engines.hopper.tiles import PairTiles
from cce_kernels.engines.order import cdiv, vocabulary_splits
from cce_kernels.engines.triton import TRITON, dz, products, saved
from cce_kernels.engines.triton.tiles import INTERPRETED, SAVED_DZ, TileConfig, other_tiles, tiles_for
from cce_kernels.engines.xla import XLA
from cce_kernels.gradients import FormDz, Products, over_groups
from cce_kernels.head import Head
from cce_kernels.numbers import Cotangents, Inputs, Wanted
from cce_kernels.plan import Plan, plan_of
from cce_kernels.plan.budget import Bytes
from cce_kernels.plan.plan import Step
from cce_kernels.tokens import Rows
from cce_kernels.windows import Groups

SIXTEEN_BIT = [
    TileConfig(*sizes)
    for sizes in (
        (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 256, 128, 8, 2), (256, 128, 64, 8, 3), (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4), (128, 128, 64, 4, 3), (128, 128, 64, 4, 4), (64, 256, 64, 4, 3),
    )
]  # fmt: skip
FLOAT32 = [
    TileConfig(*sizes)
    for sizes in (
        (128, 128, 32, 8, 3), (128, 128, 32, 8, 4), (128, 128, 32, 4, 3), (128, 256, 32, 8, 3), (64, 128, 32, 4, 3),
        (64, 64, 32, 8, 3),
    )
]  # fmt: skip
SAVED = [TileConfig(rows, columns, 16, warps, 1)
         for rows, columns, warps in itertools.product((16, 32), (256, 512, 1024), (4, 8))]  # fmt: skip
TINY = [INTERPRETED, TileConfig(32, 32, 16, 4, 1)]
SAVED_TINY = [other_tiles(SAVED_DZ, interpret=True), TileConfig(32, 32, 16, 4, 1)]
PAIRS = [
    PairTiles(256, stages=4, slots=2, lead=2), PairTiles(256, 4, 2), PairTiles(256, 4, 1, lead=2),
    PairTiles(256, 3, 2, lead=2), PairTiles(192, 4, 3, lead=2), PairTiles(192, 4, 3), PairTiles(128, 5, 2, lead=2),
    PairTiles(128, 5, 2),
]  # fmt: skip
MATMUL = {"statistics": "z = e·cᵀ", "dz": "z = e·cᵀ", "de": "de = dz·c", "dc": "dc = dzᵀ·e", "saved dz": "z = e·cᵀ"}
ON_HOPPER = {"statistics, Hopper": "statistics", "dz, Hopper": "dz", "de, Hopper": "de", "saved de, Hopper": "saved_de",
             "dc, Hopper": "dc"}  # fmt: skip
MATMUL |= {role: MATMUL[of.removeprefix("saved_")] for role, of in ON_HOPPER.items()}
ROLES = tuple(MATMUL)
HEAD = Head()
WANTED = Wanted(e=True, c=True, bias=False)
Candidate = TileConfig | PairTiles
Program = Callable[..., Any]


def call_of(shape: Shape, dtype, wanted: Wanted | None = WANTED) -> Call:
    return Call(*shape, jnp.dtype(dtype).name, HEAD, False, False, wanted, MEMORY_BUDGET)


class Given(NamedTuple):
    """What the kernels are run on."""

    inputs: Inputs
    lse: jax.Array
    cotangents: Cotangents
    kept: jax.Array  # (1,), how many tokens are kept: all

    @classmethod
    def of(cls, shape: Shape, dtype, gpu: Gpu) -> "Given":
        e, c, targets = trained(shape, dtype)
        inputs = Inputs(e, c, None, targets)
        plan = plan_of(call_of(shape, dtype, None), gpu, "cce")
        numbers, _ = jax.jit(partial(forward.statistics, plan=plan))(inputs)
        share = jnp.full(shape.tokens, 1 / shape.tokens)
        count = jnp.full(1, shape.tokens, jnp.int32)
        return cls(inputs, numbers.lse, Cotangents(share, -share, None), count)

    @property
    def shape(self) -> Shape:
        e, c = self.inputs.e, self.inputs.c
        return Shape(e.shape[0], e.shape[1], c.shape[0])

    @property
    def call(self) -> Call:
        return call_of(self.shape, self.inputs.e.dtype)


def candidates(role: str, shape: Shape, dtype, gpu: Gpu) -> Sequence[Candidate]:
    """saved dz is of bfloat16 alone; the kernels for Hopper are for calls that they serve."""
    if role in ON_HOPPER:
        return PAIRS if HOPPER.serves(call_of(shape, dtype), gpu) else []
    if role == "saved dz" and jnp.dtype(dtype) != jnp.bfloat16:
        return []
    if gpu.interpreted:
        return SAVED_TINY if role == "saved dz" else TINY
    if role == "saved dz":
        return SAVED
    return FLOAT32 if jnp.dtype(dtype).itemsize == 4 else SIXTEEN_BIT


def shipped(role: str, given: Given, gpu: Gpu) -> Candidate:
    call = given.call
    if role in ON_HOPPER:
        return _shipped_on_hopper(ON_HOPPER[role], given, gpu)
    if role == "saved dz":
        return TRITON.tile("saved_dz", call, gpu)
    return getattr(tiles_for(call.itemsize, call.width, gpu), role)


def _shipped_on_hopper(kernel: str, given: Given, gpu: Gpu) -> PairTiles:
    call = given.call
    if kernel in ("statistics", "dz"):
        return HOPPER.tile("sums" if kernel == "statistics" else "form_dz", call, gpu)
    if kernel == "saved_de":
        return HOPPER.tile("de_of_saved", call, gpu, call.tokens)
    how = HOPPER.multiplying(call, call.tokens, groups_of(given, HOPPER, gpu), gpu)
    return getattr(how, kernel)


def groups_of(given: Given, engine: Engine, gpu: Gpu) -> Groups:
    """The groups of a backward pass that saves nothing, with the default budget and the tiles that are shipped."""
    call = given.call
    count = Bytes(call, gpu, call.tokens, engine, engine if engine.multiplies_fastest else XLA)
    column = count.column(call.tokens, copies=not count.products.in_place)
    return engine.groups(call, call.tokens, MEMORY_BUDGET - count.always, column, gpu)


def _engine(role: str) -> Engine:
    return HOPPER if role in ON_HOPPER else TRITON


def buffer(role: str, given: Given, gpu: Gpu) -> jax.Array | None:
    """What the role's kernels read besides what is given: dz of a group, or the exponentials of all."""
    tokens, vocabulary, dtype = given.shape.tokens, given.shape.vocabulary, given.inputs.e.dtype
    if role == "saved dz":
        return jnp.ones((tokens, vocabulary), dtype)
    if role == "saved de, Hopper":
        return jnp.exp(jax.random.normal(jax.random.key(0), (tokens, vocabulary), dtype))
    if role.split(",")[0] in ("de", "dc"):
        columns = groups_of(given, _engine(role), gpu).columns
        return jax.random.normal(jax.random.key(0), (tokens, columns), dtype) / tokens
    return None


def program(role: str, given: Given, read: jax.Array | None, tiles: Candidate, gpu: Gpu) -> tuple[Program, tuple]:
    """A function that launches the role's kernels for all of the vocabulary, and its arguments; read: its buffer."""
    inputs, lse, cotangents, kept = given
    groups = groups_of(given, _engine(role), gpu)
    if isinstance(tiles, PairTiles):
        return _program_on_hopper(ON_HOPPER[role], given, read, tiles, groups, gpu)
    if role == "statistics":
        return partial(forward.statistics, plan=_plan_with(tiles, given, gpu)), (inputs,)
    options: dict[str, Any] = {"head": HEAD, "tiles": tiles, "interpret": gpu.interpreted}

    def of_logits(inputs, lse, cotangents):
        return every_group(dz.former(inputs, lse, cotangents, None, groups=groups, with_sums=False, **options), groups)

    def of_saved(read, inputs, lse, cotangents):
        form = saved.former_of_saved(read, inputs, lse, lse, cotangents, groups=groups, with_sums=False, **options)
        return every_group(form, groups)

    def multiply(e, c, read, kept):
        of = products.products(e, c, head=HEAD, unit=None, count=kept, de=tiles, dc=tiles, splits=1,
                               interpret=gpu.interpreted)  # fmt: skip
        return of_all(of, role, e, c, read, groups)

    if role == "dz":
        return of_logits, (inputs, lse, cotangents)
    if role == "saved dz":
        return of_saved, (read, inputs, lse, cotangents)
    return multiply, (inputs.e, inputs.c, read, kept)


def _plan_with(tiles: TileConfig, given: Given, gpu: Gpu) -> Plan:
    """The plan of an evaluation by Triton's kernels with these tiles."""
    shape = given.shape
    plan = plan_of(call_of(shape, given.inputs.e.dtype, None), gpu, "cce")
    step, looks = Step(TRITON, tiles), plan.forward.scattered is not None
    blocks = cdiv(shape.tokens, tiles.rows), cdiv(shape.vocabulary, tiles.columns)
    splits = 2 if gpu.interpreted else vocabulary_splits(*blocks, shape.tokens, gpu.multiprocessors)
    steps = {"sums": step, "rescue": step, "scattered": step if looks else None}
    return replace(plan, forward=replace(plan.forward, splits=splits, **steps))


def _program_on_hopper(
    kernel: str, given: Given, read: jax.Array | None, tiles: PairTiles, groups: Groups, gpu: Gpu
) -> tuple[Program, tuple]:  # fmt: skip
    from cce_kernels.engines.hopper import dz, products, statistics  # which name Mosaic GPU

    call, options = given.call, {"head": HEAD, "interpret": None}
    splits = vocabulary_splits(cdiv(call.tokens, HOPPER.blocks(tiles)[0]), cdiv(call.vocabulary, tiles.columns),
                               call.tokens, gpu.multiprocessors)  # fmt: skip
    of_units = {**options, "units": units_of(gpu)}

    def sums(inputs, lse, kept):
        return statistics.sums(inputs, Rows(count=kept), lse, False, tiles=tiles, splits=splits, **options).lse

    def of_logits(inputs, lse, cotangents, kept):
        return every_group(dz.former(inputs, lse, cotangents, kept, groups=groups, tiles=tiles, **of_units), groups)

    def multiply(e, c, read, kept):
        of = products.products(e, c, unit=None, count=kept, de_tiles=tiles, dc_tiles=tiles, splits=1, groups=groups,
                               **of_units)  # fmt: skip
        return of_all(of, kernel, e, c, read, groups)

    def saved_de(e, c, p, share, kept):
        return products.de_of_saved(p, share, c, kept, e, tiles=tiles, **of_units)

    inputs, lse, cotangents, kept = given
    if kernel == "statistics":
        return sums, (inputs, lse, kept)
    if kernel == "saved_de":
        return saved_de, (inputs.e, inputs.c, read, cotangents.lse, kept)
    if kernel == "dz":
        return of_logits, (inputs, lse, cotangents, kept)
    return multiply, (inputs.e, inputs.c, read, kept)


def every_group(form: FormDz, groups: Groups) -> jax.Array:
    """One element of each group's dz, summed: every group is computed, and no dz is kept."""
    return over_groups(lambda total, window: total + form(window)[0][0, 0].astype(jnp.float32), jnp.float32(0), groups)


def of_all(products: Products, role: str, e, c, dz, groups: Groups) -> jax.Array:
    """de or dc, with the same dz for every group."""
    if role == "de":
        begun = jnp.zeros(e.shape, jnp.float32)
        return over_groups(lambda de, window: products.add_de(de, dz, window), begun, groups)
    begun = jax.lax.empty(c.shape, c.dtype)
    return over_groups(lambda dc, window: products.put_dc(dc, dz, window), begun, groups)


def spilled(function: Program, arguments: Sequence[Any], gpu: Gpu) -> int:
    """Bytes of registers that the role's kernels spill on this GPU; 0 where nothing can tell."""
    if gpu.interpreted:
        return 0
    try:
        from tests.lowering import kernels, resources

        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tuple(arguments))
        return max(resources(kernel, gpu.compute_capability).stack for kernel in kernels(function, *shapes))
    except Exception:  # no Triton, or one that does not know this GPU or these tiles: XLA will say
        return 0

"""What bench/tune.py times: for each role of a kernel its candidate tiles, its program and what that runs on."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bench.data import Shape, trained
from cce_kernels import backward, forward, hopper_kernels
from cce_kernels.budget import group_of
from cce_kernels.config import (
    HOPPER,
    INTERPRETER,
    PAIR_ROWS,
    Gpu,
    HopperTiles,
    PairTiles,
    TileConfig,
    Tiles,
    local_gpu,
    target_of,
)
from cce_kernels.contract import MEMORY_BUDGET
from cce_kernels.groups import Products, Wanted, over_groups
from cce_kernels.logits import Head
from cce_kernels.products import kernel_products
from cce_kernels.saved import DZ_TILES, dz_of_saved
from cce_kernels.tiles import cdiv, for_hopper, vocabulary_splits
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
TINY = [INTERPRETER, TileConfig(32, 32, 16, 4, 1)]
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


class Given(NamedTuple):
    """What the kernels are run on."""

    e: jax.Array
    c: jax.Array
    targets: jax.Array
    lse: jax.Array
    cotangents: jax.Array
    kept: jax.Array  # (1,), how many tokens are kept: all

    @classmethod
    def of(cls, shape: Shape, dtype, interpret: bool) -> "Given":
        e, c, targets = trained(shape, dtype)
        lse, _ = jax.jit(partial(run_statistics, tiles=None, interpret=interpret))(e, c, targets)
        share = jnp.full(shape.tokens, 1 / shape.tokens)
        count = jnp.full(1, shape.tokens, jnp.int32)
        return cls(e, c, targets, lse, jnp.stack([share, -share]), count)

    @property
    def shape(self) -> Shape:
        return Shape(self.e.shape[0], self.e.shape[1], self.c.shape[0])

    def target(self, interpret: bool) -> tuple[Gpu, Tiles]:
        return target_of(self.e.dtype, self.e.shape[1], interpret)


def candidates(role: str, shape: Shape, dtype, interpret: bool) -> Sequence[Candidate]:
    """saved dz is of bfloat16 alone; the kernels for Hopper are for calls that they serve."""
    if role in ON_HOPPER:
        e, c = (jax.ShapeDtypeStruct((rows, shape.width), dtype) for rows in (shape.tokens, shape.vocabulary))
        gpu, _ = target_of(dtype, shape.width, interpret)
        return PAIRS if for_hopper(e, c, None, False, gpu, interpret) else []
    if role == "saved dz" and jnp.dtype(dtype) != jnp.bfloat16:
        return []
    if interpret:
        return TINY
    if role == "saved dz":
        return SAVED
    return FLOAT32 if jnp.dtype(dtype).itemsize == 4 else SIXTEEN_BIT


def shipped(role: str, given: Given, interpret: bool) -> Candidate:
    gpu, tiles = given.target(interpret)
    if role in ON_HOPPER:
        return _shipped_on_hopper(ON_HOPPER[role], given, gpu)
    if role == "saved dz":
        return INTERPRETER if interpret else DZ_TILES
    return getattr(tiles, role)


def _shipped_on_hopper(kernel: str, given: Given, gpu: Gpu) -> PairTiles:
    if kernel in ("statistics", "dz"):
        return HOPPER.logits
    rows = groups_of(given, None, interpret=False).columns if kernel == "dc" else len(given.e)
    return hopper_kernels.cheapest(
        getattr(HOPPER, kernel), cdiv(rows, PAIR_ROWS), given.e.shape[1], gpu.multiprocessors // 2
    )


def groups_of(given: Given, tiles: TileConfig | None, interpret: bool) -> Groups:
    """The groups of a backward pass that saves nothing, with the default budget.

    tiles: those of Triton's dz; None for the kernels for Hopper.
    """
    (tokens, width), vocabulary, on_hopper = given.e.shape, given.c.shape[0], tiles is None
    return group_of(tokens, tokens=tokens, saved=0, width=width, vocabulary=vocabulary, dtype=given.e.dtype,
                    wanted=WANTED, memory_budget=MEMORY_BUDGET, direct=on_hopper, copies=not on_hopper,
                    on_hopper=on_hopper, tiles=tiles or given.target(interpret)[1].dz,
                    interpret=interpret)  # fmt: skip


def _dz_tiles(role: str, given: Given, interpret: bool) -> TileConfig | None:
    """What the groups that the role's kernels run on are of."""
    return None if role in ON_HOPPER else given.target(interpret)[1].dz


def buffer(role: str, given: Given, interpret: bool) -> jax.Array | None:
    """What the role's kernels read besides what is given: dz of a group, or the exponentials of all."""
    tokens, vocabulary = given.e.shape[0], given.c.shape[0]
    if role == "saved dz":
        return jnp.ones((tokens, vocabulary), given.e.dtype)
    if role == "saved de, Hopper":
        return jnp.exp(jax.random.normal(jax.random.key(0), (tokens, vocabulary), given.e.dtype))
    if role.split(",")[0] in ("de", "dc"):
        groups = groups_of(given, _dz_tiles(role, given, interpret), interpret)
        return jax.random.normal(jax.random.key(0), (tokens, groups.columns), given.e.dtype) / tokens
    return None


def program(
    role: str, given: Given, read: jax.Array | None, tiles: Candidate, interpret: bool
) -> tuple[Program, tuple]:  # fmt: skip
    """A function that launches the role's kernels for all of the vocabulary, and its arguments; read: its buffer."""
    e, c, targets, lse, cotangents, kept = given
    if isinstance(tiles, PairTiles):
        return _program_on_hopper(ON_HOPPER[role], given, read, HopperTiles(tiles, *[(tiles,)] * 3))
    if role == "statistics":
        return partial(run_statistics, tiles=tiles, interpret=interpret), (e, c, targets)
    groups = groups_of(given, tiles if role == "dz" else _dz_tiles(role, given, interpret), interpret)
    options: dict[str, Any] = {"groups": groups, "tiles": tiles, "interpret": interpret}
    if role == "dz":
        return partial(run_dz, **options), (e, c, lse, targets, cotangents)
    if role == "saved dz":
        return partial(run_saved_dz, **options), (read, lse, targets, cotangents)
    return partial(run_product, role, **options), (e, c, read, kept)


def _program_on_hopper(
    kernel: str, given: Given, read: jax.Array | None, tiles: HopperTiles
) -> tuple[Program, tuple]:  # fmt: skip
    (tokens, _), vocabulary, gpu = given.e.shape, given.c.shape[0], given.target(interpret=False)[0]
    groups = groups_of(given, None, interpret=False)
    splits = vocabulary_splits(cdiv(tokens, PAIR_ROWS // 2), cdiv(vocabulary, tiles.logits.columns), tokens,
                               gpu.multiprocessors)  # fmt: skip

    def statistics(e, c, lse, kept):
        return hopper_kernels.statistics(e, c, lse, None, kept, None, head=HEAD, splits=splits, tiles=tiles)[0]

    def dz(e, c, targets, lse, cotangents, kept):
        form = hopper_kernels.dz_of_groups(e, c, lse, targets, cotangents, kept, head=HEAD, groups=groups, gpu=gpu,
                                           tiles=tiles)  # fmt: skip
        return over_groups(lambda total, window: total + one_of(form(window)), jnp.float32(0), groups)

    def multiply(e, c, dz, kept):
        of = hopper_kernels.products(e, c, head=HEAD, unit=None, count=kept, groups=groups, gpu=gpu, tiles=tiles)
        return of_all(of, kernel, e, c, dz, groups)

    def saved_de(e, c, p, share, kept):
        return hopper_kernels.de_of_saved(p, share, c, kept, e, head=HEAD, gpu=gpu, tiles=tiles)

    e, c, targets, lse, cotangents, kept = given
    if kernel == "statistics":
        return statistics, (e, c, lse, kept)
    if kernel == "saved_de":
        return saved_de, (e, c, read, cotangents[0], kept)
    if kernel == "dz":
        return dz, (e, c, targets, lse, cotangents, kept)
    return multiply, (e, c, read, kept)


def run_statistics(e, c, targets, *, tiles: TileConfig | None, interpret: bool) -> tuple[jax.Array, jax.Array]:
    lse, target, *_ = forward.statistics(e, c, None, targets, None, head=HEAD, with_sum=False, interpret=interpret,
                                         tiles=tiles)  # fmt: skip
    return lse, target


def run_dz(e, c, lse, targets, cotangents, *, groups: Groups, tiles: TileConfig, interpret: bool) -> jax.Array:
    def add(total, window):
        dz, _ = backward.dz_of_group(e, c, None, lse, targets, cotangents, None, None, window, head=HEAD,
                                     groups=groups, wanted=WANTED, tiles=tiles, interpret=interpret)  # fmt: skip
        return total + one_of(dz)

    return over_groups(add, jnp.float32(0), groups)


def run_saved_dz(saved, lse, targets, cotangents, *, groups: Groups, tiles: TileConfig, interpret: bool) -> jax.Array:
    def add(total, window):
        dz, _ = dz_of_saved(saved, lse, lse, targets, cotangents, None, window, head=HEAD, groups=groups,
                            wanted=WANTED, tiles=tiles, interpret=interpret)  # fmt: skip
        return total + one_of(dz)

    return over_groups(add, jnp.float32(0), groups)


def run_product(role: str, e, c, dz, kept, *, groups: Groups, tiles: TileConfig, interpret: bool) -> jax.Array:
    of = kernel_products(e, c, head=HEAD, unit=None, count=kept, tiles=Tiles.same(tiles), interpret=interpret)
    return of_all(of, role, e, c, dz, groups)


def of_all(products: Products, role: str, e, c, dz, groups: Groups) -> jax.Array:
    """de or dc, with the same dz for every group."""
    if role == "de":
        begun = jnp.zeros(e.shape, jnp.float32)
        return over_groups(lambda de, window: products.add_de(de, dz, window), begun, groups)
    begun = jax.lax.empty(c.shape, c.dtype)
    return over_groups(lambda dc, window: products.put_dc(dc, dz, window), begun, groups)


def one_of(dz: jax.Array) -> jax.Array:
    """One element, so that the group is computed and its dz not kept."""
    return dz[0, 0].astype(jnp.float32)


def spilled(function: Program, arguments: Sequence[jax.Array]) -> int:
    """Bytes of registers that the role's kernels spill on this GPU; 0 where nothing can tell."""
    gpu = local_gpu()
    if gpu is None:
        return 0
    try:
        from tests.lowering import kernels, resources

        found = kernels(function, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments))
        return max(resources(kernel, gpu.compute_capability).stack for kernel in found)
    except Exception:  # no Triton, or one that does not know this GPU or these tiles: XLA will say
        return 0

"""The interface of an engine. forward.py and backward.py know engines by this file alone.

An engine is a folder beside this file and one object of a class derived from Engine. The object says which calls it
serves. It has the methods that its class overrides; plan/choose.py takes a method that one engine lacks from the next
engine. The methods of the second half launch kernels or trace array code and decide nothing: tiles, groups and splits
come from the plan.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from cce_kernels.call import Call
from cce_kernels.device import Gpu
from cce_kernels.gradients import FormDz, Products
from cce_kernels.head import Head
from cce_kernels.numbers import Cotangents, Inputs, Wanted
from cce_kernels.tokens import Kept, Rows
from cce_kernels.windows import Groups

Tile = Any  # an engine's own type, hashable


class Sums(NamedTuple):
    """The sums over columns of the forward pass. A part is the sum over one run of the vocabulary."""

    lse: jax.Array  # (parts, rows): log-sum-exps
    target: jax.Array | None  # (rows,): the target's logit; None unless the engine `finds_target`
    sum: jax.Array | None  # (parts, rows): weighted sums of the logits
    saved: jax.Array | None  # (rows, V): exponentials (cce_kernels/exponentials.py)


@dataclass(frozen=True)
class Multiplying:
    """How the two matmuls of a group run: the engine, its tiles for de and dc, and the number of partial sums of de."""

    engine: "Engine"
    de: Tile
    dc: Tile
    splits: int = 1


class Engine:
    name: str
    finds_target: bool  # whether `sums` also finds the targets' logits, works in groups and needs no reference
    stops: bool  # whether its kernels stop at the last kept token
    in_place: bool  # whether `products` reads c_g in c and writes dc_g in dc, without copies of them
    multiplies_fastest: bool  # whether `products` takes no longer than XLA's matmuls
    depth: int = 1  # a matmul that sums over tokens reads so many in a step, unless it masks those that do not count

    def offers(self, method: str) -> bool:
        """Whether the engine has this method of the second half."""
        return getattr(type(self), method) is not getattr(Engine, method)

    # The first half: what a plan asks.

    def refuses(self, call: Call, gpu: Gpu | None) -> str:
        """Why the engine does not compute this call's logits on this GPU, in words for a user; "" if it does.

        gpu: None for a device that is no CUDA GPU.
        """
        raise NotImplementedError

    def serves(self, call: Call, gpu: Gpu | None) -> bool:
        return not self.refuses(call, gpu)

    def tile(self, role: str, call: Call, gpu: Any, tokens: int = 0) -> Any:
        """The tile of a kernel. role: the method that launches it; tokens: how many it computes, for "de_of_saved"."""
        raise NotImplementedError

    def splits(self, call: Call, rows: int, gpu: Any) -> int:
        """The number of runs into which `sums` cuts the vocabulary."""
        raise NotImplementedError

    def blocks(self, tiles: Any) -> tuple[int, int]:
        """The tokens in a block of `sums`, and the columns in a tile: each run of the vocabulary is whole tiles.

        `sums` skips a block whose tokens are not consecutive rows of e. `again` must then write the same blocks of the
        same runs.
        """
        raise NotImplementedError

    def dz_bytes(self, call: Call, tokens: int, gpu: Any) -> int:
        """The bytes that `form_dz` holds for one column of so many tokens."""
        raise NotImplementedError

    def groups(self, call: Call, tokens: int, room: int, column: int, gpu: Any) -> Groups:
        """The cheapest groups of columns.

        tokens: the rows of dz; room: the bytes that a group may take; column: the bytes of one column of a group.
        """
        raise NotImplementedError

    def multiplying(self, call: Call, tokens: int, groups: Groups, gpu: Any) -> Multiplying:
        """How `products` is to run."""
        raise NotImplementedError

    def de_of_chunk(self, call: Call, tokens: int, gpu: Any) -> Multiplying:
        """How de of a chunk of so many tokens is computed from what it stores, over the whole vocabulary at once.

        de of so few tokens may be computed as several partial sums.
        """
        raise NotImplementedError

    # The second half: what the two passes run.

    def target(self, inputs: Inputs, order: jax.Array | None, *, head: Head, tiles: Any, gpu: Any) -> jax.Array:
        """The logit of each token's target, (rows,): the reference of `sums`."""
        raise NotImplementedError

    def sums(
        self, inputs: Inputs, at: Rows, reference: Any, save: bool, *, head: Head, with_sum: bool,
        tiles: Any, splits: int, gpu: Any,
    ) -> Sums:  # fmt: skip
        """The sums, and the exponentials if these are to be saved.

        A log-sum-exp is inf where the sum of exp(z − reference) overflows.
        """
        raise NotImplementedError

    def again(
        self, inputs: Inputs, at: Rows, reference: jax.Array | None, before: jax.Array, *, head: Head, tiles: Any,
        gpu: Any,
    ) -> jax.Array:  # fmt: skip
        """before, (parts, rows), with some log-sum-exps written again.

        With a reference: the log-sum-exps of the blocks that `sums` skipped, as their tokens are scattered in e. With
        None: the log-sum-exps that are inf or NaN, now with a running maximum.
        """
        raise NotImplementedError

    def replaced(
        self, inputs: Inputs, lse: jax.Array, by_lse: jax.Array, saved: jax.Array, *, head: Head, tiles: Any,
        splits: int, gpu: Any,
    ) -> jax.Array:  # fmt: skip
        """saved, with exp(z − lse) written for the tokens where by_lse is true."""
        raise NotImplementedError

    def form_dz(
        self, inputs: Inputs, lse: jax.Array, cotangents: Cotangents, count: Any, *, head: Head,
        groups: Groups, wanted: Wanted, tiles: Any, gpu: Any,
    ) -> FormDz:  # fmt: skip
        """Forms dz of a group from logits that are computed again. Rows of dz from `count` on are arbitrary."""
        raise NotImplementedError

    def form_dz_of_saved(
        self, saved: jax.Array, inputs: Inputs, reference: jax.Array, lse: jax.Array, cotangents: Cotangents, *,
        head: Head, groups: Groups, wanted: Wanted, tiles: Any, gpu: Any,
    ) -> FormDz:  # fmt: skip
        """Forms dz of a group from saved exponentials."""
        raise NotImplementedError

    def form_dz_in_place(
        self, saved: jax.Array, inputs: Inputs, reference: jax.Array, lse: jax.Array, cotangents: Cotangents, *,
        head: Head, vocabulary: int, tiles: Any, gpu: Any,
    ) -> jax.Array:  # fmt: skip
        """dz of the whole vocabulary, in the memory of the saved exponentials. Ignored tokens' rows are 0."""
        raise NotImplementedError

    def products(
        self, e: jax.Array, c: jax.Array, *, head: Head, unit: jax.Array | None, count: jax.Array, how: Multiplying,
        groups: Groups, gpu: Any,
    ) -> Products:  # fmt: skip
        """The two matmuls with dz of the first `count` tokens, or of all tokens if the engine does not stop.

        unit: the number that dz was divided by.
        """
        raise NotImplementedError

    def sum_dc(
        self, dc: jax.Array, steps: jax.Array | None, left: jax.Array, e: jax.Array, unit: jax.Array | None,
        count: jax.Array, factor: jax.Array | None, *, head: Head, tiles: Any, gpu: Any,
    ) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
        """dc + unit · leftᵀ·e of the first `count` tokens, in place, and its steps (cce_kernels/block_floats.py).

        steps: None where dc is summed in float32. factor: None, or (1,) for the last sum: the result is then
        factor · (dc + unit · leftᵀ·e) in dc's type.
        """
        raise NotImplementedError

    def de_of_saved(
        self, saved: jax.Array, r: jax.Array, c: jax.Array, count: jax.Array, place: jax.Array, *, head: Head,
        tiles: Any, gpu: Any,
    ) -> jax.Array:  # fmt: skip
        """place, (rows, D), with r·(P·c) of the first `count` tokens, rounded, written into it."""
        raise NotImplementedError

    def ready(
        self, saved: jax.Array, targets: jax.Array, at_target: jax.Array, clear: jax.Array | None, *, vocabulary: int,
        gpu: Any,
    ) -> jax.Array:  # fmt: skip
        """saved, in place, with at_target at the targets, and 0 for ignored tokens in the first `clear` rows."""
        raise NotImplementedError

    def restored(self, x: jax.Array, kept: Kept, *, gpu: Any) -> jax.Array:
        """tokens.Kept.restored(x), computed in place."""
        raise NotImplementedError

"""What an engine offers. The orchestration in forward.py and backward.py knows engines by this alone.

An engine is a folder beside this file, and one object of a class derived from Engine. It says which calls it serves;
plan/choose.py takes the methods that one engine lacks from the next. Every method launches or traces
array code; none decides anything: tiles, groups and splits come from the plan.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from cce_kernels.call import Call
from cce_kernels.device import Gpu
from cce_kernels.gradients import Beside, FormDz, Products
from cce_kernels.head import Head
from cce_kernels.numbers import Cotangents, Inputs, Wanted
from cce_kernels.tokens import Kept, Rows
from cce_kernels.windows import Groups

Tile = Any  # an engine's own type, hashable


class Sums(NamedTuple):
    """What the forward pass sums over columns, each in parts, (parts, rows): one a run of the vocabulary."""

    lse: jax.Array  # log-sum-exps
    target: jax.Array | None  # (rows,): the target's logit, where an engine finds it on the way
    sum: jax.Array | None  # weighted sums of the logits
    saved: jax.Array | None  # exponentials of the first tokens (cce_kernels/exponentials.py)


@dataclass(frozen=True)
class Multiplying:
    """How the two matmuls of a group are to run: an engine's tiles, and as how many parts de is summed."""

    engine: "Engine"
    de: Tile
    dc: Tile
    splits: int = 1


class Engine:
    name: str
    finds_target: bool  # whether `sums` finds the targets' logits on the way, in groups, and needs no reference
    stops: bool  # whether it stops at the last kept token
    in_place: bool  # whether `products` read c_g and write dc_g where they lie, and hold nothing beside them
    multiplies_fastest: bool  # whether `products` take no longer than XLA's matmuls

    def offers(self, method: str) -> bool:
        """Whether it has a method of those below that need not be there."""
        return getattr(type(self), method) is not getattr(Engine, method)

    # What a plan asks.

    def serves(self, call: Call, gpu: Gpu | None) -> bool:
        """Whether it computes this call's logits on this GPU, None for another device."""
        raise NotImplementedError

    def tile(self, role: str, call: Call, gpu: Any, tokens: int = 0) -> Any:
        """The tile of a method's kernel."""
        raise NotImplementedError

    def splits(self, call: Call, rows: int, gpu: Any) -> int:
        """Into how many runs `sums` cuts the vocabulary."""
        raise NotImplementedError

    def blocks(self, tiles: Any) -> tuple[int, int]:
        """Of how many tokens `sums` asks whether they lie side by side in e, and of how many columns its runs of the
        vocabulary are multiples. `again` must write the same rows of the same runs.
        """
        raise NotImplementedError

    def dz_bytes(self, call: Call, tokens: int, gpu: Any) -> int:
        """What `form_dz` holds of a column."""
        raise NotImplementedError

    def groups(self, call: Call, tokens: int, of_dc: int, room: int, column: int, gpu: Any) -> Groups:
        """The cheapest groups of columns, of so many bytes each, in so much room.

        tokens: those that dz is formed of; of_dc: those that dc sums over.
        """
        raise NotImplementedError

    def multiplying(self, call: Call, tokens: int, groups: Groups, split: bool, gpu: Any) -> Multiplying:
        """How `products` are to run; split: whether de of few tokens may be summed in several parts."""
        raise NotImplementedError

    # What the two passes run.

    def target(self, inputs: Inputs, order: jax.Array | None, *, head: Head, tiles: Any, gpu: Any) -> jax.Array:
        """The logit of each token's target, (rows,): what `sums` are relative to."""
        raise NotImplementedError

    def sums(
        self, inputs: Inputs, at: Rows, reference: Any, saved_tokens: int, *, head: Head, with_sum: bool,
        tiles: Any, splits: int, gpu: Any,
    ) -> Sums:  # fmt: skip
        """Log-sum-exps, inf where one relative to the reference overflows; and exponentials of the first tokens."""
        raise NotImplementedError

    def again(
        self, inputs: Inputs, at: Rows, reference: jax.Array | None, before: jax.Array, *, head: Head, tiles: Any,
        gpu: Any,
    ) -> jax.Array:  # fmt: skip
        """before, (parts, rows), with the log-sum-exps that `sums` left out: of scattered tokens, given the reference;
        of those that overflowed without it."""
        raise NotImplementedError

    def replaced(
        self, inputs: Inputs, lse: jax.Array, by_lse: jax.Array, saved: jax.Array, *, head: Head, tiles: Any,
        splits: int, gpu: Any,
    ) -> jax.Array:  # fmt: skip
        """saved with exponentials relative to lse where by_lse."""
        raise NotImplementedError

    def form_dz(
        self, inputs: Inputs, lse: jax.Array, cotangents: Cotangents, count: Any, *, head: Head,
        groups: Groups, wanted: Wanted, tiles: Any, gpu: Any,
    ) -> FormDz:  # fmt: skip
        """dz of a group from logits that are computed again; of tokens from count on anything."""
        raise NotImplementedError

    def form_dz_of_saved(
        self, saved: jax.Array, inputs: Inputs, reference: jax.Array, lse: jax.Array, cotangents: Cotangents, *,
        head: Head, groups: Groups, wanted: Wanted, tiles: Any, gpu: Any,
    ) -> FormDz:  # fmt: skip
        """dz of a group from saved exponentials."""
        raise NotImplementedError

    def products(
        self, e: jax.Array, c: jax.Array, *, head: Head, unit: jax.Array | None, count: jax.Array, how: Multiplying,
        groups: Groups, adding: bool = False, beside: Beside | None = None, gpu: Any,
    ) -> Products:  # fmt: skip
        """The matmuls with dz of the first count tokens, or of all if the engine does not stop.

        unit: dz was divided by it. adding: put_dc adds to dc. beside: a second term of dc, where the engine is
        in_place.
        """
        raise NotImplementedError

    def de_of_saved(
        self, saved: jax.Array, r: jax.Array, c: jax.Array, count: jax.Array, place: jax.Array, *, head: Head,
        tiles: Any, gpu: Any,
    ) -> jax.Array:  # fmt: skip
        """r·(P·c) of the first tokens, rounded, in the first rows of place, (rows, D)."""
        raise NotImplementedError

    def ready(
        self, saved: jax.Array, targets: jax.Array, at_target: jax.Array, clear: jax.Array | None, *, vocabulary: int,
        gpu: Any,
    ) -> jax.Array:  # fmt: skip
        """saved, in place, with at_target at the targets, and zeros for ignored tokens among the first clear rows."""
        raise NotImplementedError

    def restored(self, x: jax.Array, kept: Kept, *, gpu: Any) -> jax.Array:
        """tokens.Kept.restored of x, in place."""
        raise NotImplementedError

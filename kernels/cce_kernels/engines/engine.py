"""The interface of an engine. A plan and the passes know engines by this file alone.

An engine is a folder beside this file and one object of a class derived from Engine. `Planned` is what a plan asks
before a call runs. `Launched` is what the passes run: its methods launch kernels or trace array code, and decide
nothing. An engine names the methods of Launched that it has; plan/choose.py takes a method that one engine lacks from
the next engine.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import jax

from cce_kernels.call import Call
from cce_kernels.device import Gpu
from cce_kernels.divergence_terms import Pass, Static, Whole
from cce_kernels.gradients import FormDz, Left, Products
from cce_kernels.head import Head
from cce_kernels.numbers import Cotangents, Inputs, Statistics
from cce_kernels.tokens import Kept, Rows
from cce_kernels.windows import Groups


@dataclass(frozen=True)
class Step:
    """One method of Launched, planned: the engine that has it, and how it runs."""

    engine: "Engine"
    tiles: Any = None  # of the engine's own type, hashable; None where the engine has no choice
    splits: int = 1  # runs of the vocabulary, each with sums of its own
    groups: Any = None  # windows.Groups: of the vocabulary, computed one after another; None: all at once


@dataclass(frozen=True)
class Multiplying:
    """The step `products`: the engine, its tiles for de and dc, and the number of partial sums of de."""

    engine: "Engine"
    de: Any
    dc: Any
    groups: Groups
    splits: int = 1


class Problem(NamedTuple):
    """The call whose arrays a launch computes with."""

    call: Call
    gpu: Any  # device.Gpu; None: no CUDA device
    inputs: Inputs

    @property
    def head(self) -> Head:
        return self.call.head

    def with_e(self, e: jax.Array) -> "Problem":
        return self._replace(inputs=self.inputs._replace(e=e))


class Block(NamedTuple):
    """The size of what a program of `sums` computes at a time: tokens, and columns of the vocabulary."""

    rows: int
    columns: int


class Sums(NamedTuple):
    """The sums over columns of the forward pass. A part is the sum over one run of the vocabulary.

    They are relative to a reference ρ.
    """

    log_mass: jax.Array  # (parts, rows): log Σ exp(z − ρ)
    target: jax.Array | None  # (rows,): the target's logit; None unless the engine `finds_target`
    sum: jax.Array | None  # (parts, rows): weighted sums of z − ρ, with the ρ that `sums` got
    saved: jax.Array | None  # (rows, V): exponentials (cce_kernels/exponentials.py)
    masses: jax.Array | None = None  # (parts of V, rows): sums of the exponentials (cce_kernels/block_sparse.py)
    mean: jax.Array | None = None  # (parts, rows): means of z − ρ, any finite number where log_mass is −inf
    reference: jax.Array | None = None  # (parts, rows): ρ; None: the one that `sums` got


class Planned:
    name: str
    finds_target: bool  # whether `sums` also finds the targets' logits, works in groups and needs no reference
    stops: bool  # whether kernels stop at the last kept token; `products` then copies no part of c or dc
    multiplies_fastest: bool  # whether `products` takes no longer than XLA's matmuls
    block_sparse: bool = False  # whether products and sum_dc leave out blocks (cce_kernels/block_sparse.py)
    whole_stops: bool = False  # whether `whole_logits` stops at the last kept token
    depth: int = 1  # a matmul that sums over tokens reads so many in a step, unless it masks those that do not count
    workspace: int = 0  # bytes that its matmuls hold besides operands and results

    def refuses(self, call: Call, gpu: Gpu | None) -> str:
        """Why the engine does not compute this call's logits on this GPU, in words for a user; "" if it does.

        gpu: None for a device that is no CUDA GPU.
        """
        raise NotImplementedError

    def serves(self, call: Call, gpu: Gpu | None) -> bool:
        return not self.refuses(call, gpu)

    def step(self, method: str, call: Call, gpu: Any, rows: int = 0, block: Block | None = None) -> Step:
        """The step that runs this method of Launched for so many rows.

        block: for `recomputed`, of the step whose sums it computes again. With rows = 0 any number will do.
        """
        return Step(self)  # type: ignore[arg-type]

    def block(self, sums: Step) -> Block:
        """The block of a step of `sums`. Each run of the vocabulary is a whole number of its columns."""
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
        """How `products` computes de of a chunk of so many tokens, over the whole vocabulary at once.

        de of so few tokens may be computed as several partial sums.
        """
        raise NotImplementedError

    def dz_bytes(self, call: Call, tokens: int, gpu: Any) -> int:
        """The bytes that `form_dz` holds for one column of so many tokens."""
        return call.itemsize * tokens


class Launched:
    """What the passes run: each method is the function of this name in `kernels`, a module of the engine's folder."""

    launches: tuple[str, ...]  # the methods that the engine has

    @property
    def kernels(self) -> Any:
        """The module with these functions. It is imported at the first launch: a plan needs no kernel."""
        return import_module(f"{type(self).__module__}.kernels")

    def target(self, step: Step, problem: Problem, order: jax.Array | None) -> jax.Array:
        """The logit of each token's target, (rows,): the reference of `sums`. order: tokens.Rows.order."""
        return self.kernels.target(step, problem, order)

    def sums(self, step: Step, problem: Problem, at: Rows, reference: Any, save: bool) -> Sums:
        """The sums, and the exponentials if these are to be saved, with masses if the call has a gradient_tolerance.

        log_mass is inf where the sum of exp(z − reference) overflows, or the sum for the mean. A block whose
        tokens are not consecutive rows of e is not computed if at.starts says so.
        """
        return self.kernels.sums(step, problem, at, reference, save)

    def recomputed(self, step: Step, problem: Problem, at: Rows, reference: jax.Array | None, before: Sums) -> Sums:
        """before, with some log-masses and their means computed again.

        With a reference: those of the blocks that `sums` skipped, as their tokens are scattered in e. With None: where
        log_mass is inf or NaN, now relative to a running maximum, which becomes their reference.
        """
        return self.kernels.recomputed(step, problem, at, reference, before)

    def saved_again(
        self, step: Step, problem: Problem, reference: jax.Array, others: jax.Array, saved: jax.Array
    ) -> jax.Array:
        """saved, with exp(z − reference) written for the tokens where `others` is true."""
        return self.kernels.saved_again(step, problem, reference, others, saved)

    def form_dz(self, step: Step, problem: Problem, numbers: Statistics, of: Cotangents, count: Any) -> FormDz:
        """Forms dz of a group from logits that are computed again. Rows of dz from `count` on are arbitrary.

        numbers: the reference is FLOAT32_MAX for ignored tokens. of: mean.relative.
        """
        return self.kernels.form_dz(step, problem, numbers, of, count)

    def form_dz_of_saved(self, step: Step, problem: Problem, saved: jax.Array, of: Cotangents) -> FormDz:
        """Forms dz of a group from saved exponentials. of: mean.relative."""
        return self.kernels.form_dz_of_saved(step, problem, saved, of)

    def dz_in_place(self, step: Step, problem: Problem, saved: jax.Array, of: Cotangents) -> jax.Array:
        """dz of the whole vocabulary, in the memory of the saved exponentials. Ignored tokens' rows are 0."""
        return self.kernels.dz_in_place(step, problem, saved, of)

    def mass_and_moment(self, problem: Problem, saved: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Σ_v P_iv and Σ_v P_iv·log P_iv of the saved exponentials, (rows,) float32; arbitrary for ignored tokens."""
        return self.kernels.mass_and_moment(problem, saved)

    def whole_logits(self, step: Step, problem: Problem, count: jax.Array) -> Whole:
        """The logits of the first `count` tokens, or of all. Those of the others are arbitrary."""
        return self.kernels.whole_logits(step, problem, count)

    def logits_and_maxima(self, step: Step, problem: Problem, count: jax.Array) -> tuple[Whole, jax.Array]:
        """`whole_logits`, and the largest of each block of columns, (n, blocks), as wide as `block` says.

        The maxima are after the temperature. A NaN logit counts as −inf for the maxima, and makes log_mass NaN.
        """
        return self.kernels.logits_and_maxima(step, problem, count)

    def divergence_pass(
        self,
        step: Step,
        problem: Problem,
        of: Pass,
        count: jax.Array,
        dz: tuple[jax.Array, jax.Array] | None,
        static: Static,
    ) -> tuple[list[jax.Array], jax.Array | None]:
        """The sums that `static` asks for, (n,) each; and dz with the rows from start on written.

        0 for tokens from `count` on. dz: an array of at least V columns, which is 0 beyond V, and start, (); or None.
        What dz needs of the sums is found here: of.of_student is not read.
        """
        return self.kernels.divergence_pass(step, problem, of, count, dz, static)

    def saved_targets(
        self, step: Step, problem: Problem, saved: jax.Array, at_target: jax.Array, clear: jax.Array | None
    ) -> jax.Array:
        """saved, in place, with at_target at the targets, and 0 for ignored tokens in the first `clear` rows."""
        return self.kernels.saved_targets(step, problem, saved, at_target, clear)

    def products(
        self,
        step: Multiplying,
        problem: Problem,
        unit: jax.Array | None,
        count: jax.Array,
        blocks: jax.Array | None = None,
    ) -> Products:
        """The two matmuls with dz of the first `count` tokens, or of all tokens if the engine does not stop.

        unit: the number that dz was divided by. blocks: of dz, that add_de multiplies (block_sparse.Blocks.de);
        an engine that is not block_sparse multiplies all.
        """
        return self.kernels.products(step, problem, unit, count, blocks)

    def de_of_saved(
        self, step: Step, problem: Problem, saved: jax.Array, r: jax.Array, count: jax.Array, out: jax.Array
    ) -> jax.Array:
        """out, (rows, D), with r·(P·c) of the first `count` tokens, rounded, written into it."""
        return self.kernels.de_of_saved(step, problem, saved, r, count, out)

    def thresholds(self, step: Step, gpu: Any, masses: jax.Array, scores: jax.Array, most: jax.Array) -> jax.Array:
        """block_sparse.Thresholds."""
        return self.kernels.thresholds(step, gpu, masses, scores, most)

    def sum_dc(
        self, step: Step, call: Call, gpu: Any, dc: jax.Array, steps: Any, left: Left, factor: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """dc + unit · leftᵀ·e of the first `count` tokens, in place, and its steps (cce_kernels/block_floats.py).

        steps: None where dc is summed in float32. factor: None, or (1,) for the last sum: the result is then
        factor · (dc + unit · leftᵀ·e) in dc's type.
        """
        return self.kernels.sum_dc(step, call, gpu, dc, steps, left, factor)

    def restored(self, step: Step, gpu: Any, x: jax.Array, kept: Kept) -> jax.Array:
        """tokens.Kept.restored(x), computed in place."""
        return self.kernels.restored(step, gpu, x, kept)


class Engine(Planned, Launched):
    def offers(self, method: str, call: Call) -> bool:
        """Whether the engine has this method of Launched for a call that it serves."""
        return method in self.launches

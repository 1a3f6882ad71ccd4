"""The interface of an engine. A plan and the passes know engines by this file alone.

An engine is a folder beside this file and one object of a class derived from Engine. `Planned` is what a plan asks
before a call runs. `Launched` is what the halves of a block run: its methods launch kernels or trace array code, and
decide nothing. An engine names the methods of Launched that it has; plan/schedules.py takes a method that one engine
lacks from the next engine.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.device import Gpu
from cce_kernels.divergence_terms import Pass, Static, Whole
from cce_kernels.head import Head
from cce_kernels.numbers import Cotangents, Inputs, Numbers
from cce_kernels.request import Request
from cce_kernels.windows import FormDz, Window, Windows


@dataclass(frozen=True)
class Step:
    """One method of Launched, planned: the engine that has it, and how it runs."""

    engine: "Engine"
    tiles: Any = None  # of the engine's own type, hashable; None where the engine has no choice
    splits: int = 1  # runs of the vocabulary, each with sums of its own
    windows: Any = None  # windows.Windows: of the vocabulary, computed one after another; None: all at once


@dataclass(frozen=True)
class Multiplying:
    """The step `products`: the engine, its tiles for de and dc, and the number of partial sums of de."""

    engine: "Engine"
    de: Any
    dc: Any
    windows: Windows
    splits: int = 1


class Problem(NamedTuple):
    """The call whose arrays a launch computes with."""

    request: Request
    gpu: Any  # device.Gpu; None: no CUDA device
    inputs: Inputs

    @property
    def head(self) -> Head:
        return self.request.head

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
    saved: jax.Array | None  # (rows, V): exponentials (cce_kernels/exponentials.py)
    masses: jax.Array | None = None  # (parts of V, rows): sums of the exponentials (cce_kernels/block_sparse.py)
    mean: jax.Array | None = None  # (parts, rows): means of z − ρ, any finite number where log_mass is −inf
    reference: jax.Array | None = None  # (parts, rows): ρ; None: the one that `sums` got
    sum: jax.Array | None = None  # (parts, rows): weighted sums of z − ρ, if Request.sums_logits


class Products(NamedTuple):
    """The two matmuls of a window: dz (N, V_g) by the window's part of c, and dzᵀ by e."""

    # (de, dz, window) -> de, as partial sums (splits·n, D); None for 0: rows of ignored tokens may then be arbitrary
    add_de: Callable[[jax.Array | None, jax.Array, Window], jax.Array]
    put_dc: Callable[[jax.Array, jax.Array, Window], jax.Array]  # (dc, dz, window) -> dc


class Part(NamedTuple):
    """A chunk's part of dc: unit · leftᵀ·e, over the first `count` rows."""

    left: jax.Array  # (n, V): exponentials, or dz
    e: jax.Array  # (n, D)
    unit: jax.Array | None
    count: jax.Array  # type: ignore[assignment]  # (1,) int32
    blocks: jax.Array | None = None  # the blocks of `left` that are multiplied (block_sparse.Blocks.dc); None: all


def over_windows(body: Callable[[Any, Window], Any], carry: Any, windows: Windows) -> Any:
    """Runs body(carry, window) -> carry for each window; the window's fields are int32.

    A scan over a table of windows would copy a row of the table at each step. With that copy XLA does not make the loop
    part of a CUDA graph.
    """
    return lax.fori_loop(0, windows.count, lambda i, carry: body(carry, windows.window(i.astype(jnp.int32))), carry)


class Costs(NamedTuple):
    """The times of an engine's matmuls over XLA's, and of what a way adds, in floating-point operations of a matmul."""

    logits: float  # the matmul of the logits, over XLA's
    products: float  # the engine's own matmuls for de and dc of a chunk, over XLA's
    byte: float  # read or written where a matmul runs at the same time
    logit: float  # each time that it is computed
    launches: float  # the small kernels of a chunk or a window
    multiple: int  # tokens of a chunk: the rows of a tile of the kernels
    new: float = 0.0  # a byte of a chunk's logits beyond plan/schedules.KEPT, which the operating system clears


class Planned:
    name: str
    finds_target: bool  # whether `sums` also finds the targets' logits, works in windows and needs no reference
    stops: bool  # whether kernels stop at the last kept token; `products` then copies no part of c or dc
    multiplies_fastest: bool  # whether `products` takes no longer than XLA's matmuls
    block_sparse: bool = False  # whether products and sum_dc leave out blocks (cce_kernels/block_sparse.py)
    whole_stops: bool = False  # whether `whole_logits` stops at the last kept token
    depth: int = 1  # a matmul that sums over tokens reads so many in a step, unless it masks those that do not count

    def refuses(self, request: Request, gpu: Gpu | None) -> str:
        """Why the engine does not compute this call's logits on this GPU, in words for a user; "" if it does.

        gpu: None for a device that is no CUDA GPU.
        """
        raise NotImplementedError

    def serves(self, request: Request, gpu: Gpu | None) -> bool:
        return not self.refuses(request, gpu)

    def step(self, method: str, request: Request, gpu: Any, rows: int = 0, block: Block | None = None) -> Step:
        """The step that runs this method of Launched for so many rows.

        block: for `rescued`, of the step whose sums it computes again. With rows = 0 any number will do.
        """
        return Step(self)  # type: ignore[arg-type]

    def costs(self, request: Request, gpu: Gpu | None) -> Costs:
        """What the plan predicts times with."""
        raise NotImplementedError

    def block(self, sums: Step) -> Block:
        """The block of a step of `sums`. Each run of the vocabulary is a whole number of its columns."""
        raise NotImplementedError

    def columns_of_a_step(self, step: Step) -> int:
        """How many columns of D share a step in `sum_dc` by this step, in block floating point."""
        return step.tiles.columns

    def windows(self, request: Request, tokens: int, room: int, column: int, gpu: Any) -> Windows:
        """The cheapest windows of columns.

        tokens: the rows of dz; room: the bytes that a window may take; column: the bytes of one column of a window.
        """
        raise NotImplementedError

    def multiplying(self, request: Request, tokens: int, windows: Windows, gpu: Any) -> Multiplying:
        """How `products` is to run."""
        raise NotImplementedError

    def de_of_chunk(self, request: Request, tokens: int, gpu: Any) -> Multiplying:
        """How `products` computes de of a chunk of so many tokens, over the whole vocabulary at once.

        de of so few tokens may be computed as several partial sums.
        """
        raise NotImplementedError

    def dz_bytes(self, request: Request, tokens: int, gpu: Any) -> int:
        """The bytes that `form_dz` holds for one column of so many tokens."""
        return request.itemsize * tokens


class Launched:
    """What the halves of a block run: each method is the function of this name in a file of the engine's folder."""

    launches: ClassVar[Mapping[str, str]]  # the methods that the engine has: the file of each

    def launched(self, method: str) -> Any:
        """The function. Its file is imported at the first launch: a plan needs no kernel."""
        return getattr(import_module(f"{type(self).__module__}.{self.launches[method]}"), method)

    def target(self, step: Step, problem: Problem) -> jax.Array:
        """The logit of each token's target, (rows,): the reference of `sums`."""
        return self.launched("target")(step, problem)

    def sums(self, step: Step, problem: Problem, count: jax.Array | None, reference: Any, save: bool) -> Sums:
        """The sums, and the exponentials if these are to be saved, with masses if the call has a gradient_tolerance.

        Of the first `count` tokens; None: of all. log_mass is inf where the sum of exp(z − reference) overflows, or the
        sum for the mean.
        """
        return self.launched("sums")(step, problem, count, reference, save)

    def rescued(self, step: Step, problem: Problem, count: jax.Array | None, before: Sums) -> Sums:
        """before, with log-masses and means computed again where log_mass is inf or NaN: relative to a running maximum,
        which becomes their reference.
        """
        return self.launched("rescued")(step, problem, count, before)

    def saved_again(
        self, step: Step, problem: Problem, reference: jax.Array, others: jax.Array, saved: jax.Array
    ) -> jax.Array:
        """saved, with exp(z − reference) written for the tokens where `others` is true."""
        return self.launched("saved_again")(step, problem, reference, others, saved)

    def form_dz(self, step: Step, problem: Problem, numbers: Numbers, of: Cotangents, count: Any) -> FormDz:
        """Forms dz of a window from logits that are computed again. Rows of dz from `count` on are arbitrary.

        numbers: the reference is FLOAT32_MAX for ignored tokens. of: mean.relative.
        """
        return self.launched("form_dz")(step, problem, numbers, of, count)

    def form_dz_of_saved(self, step: Step, problem: Problem, saved: jax.Array, of: Cotangents) -> FormDz:
        """Forms dz of a window from saved exponentials. of: mean.relative."""
        return self.launched("form_dz_of_saved")(step, problem, saved, of)

    def dz_in_place(self, step: Step, problem: Problem, saved: jax.Array, of: Cotangents) -> jax.Array:
        """dz of the whole vocabulary, in the memory of the saved exponentials. Ignored tokens' rows are 0."""
        return self.launched("dz_in_place")(step, problem, saved, of)

    def mass_and_moment(self, problem: Problem, saved: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Σ_v P_iv and Σ_v P_iv·log P_iv of the saved exponentials, (rows,) float32; arbitrary for ignored tokens."""
        return self.launched("mass_and_moment")(problem, saved)

    def whole_logits(self, step: Step, problem: Problem, count: jax.Array) -> Whole:
        """The logits of the first `count` tokens, or of all. Those of the others are arbitrary."""
        return self.launched("whole_logits")(step, problem, count)

    def logits_and_maxima(self, step: Step, problem: Problem, count: jax.Array) -> tuple[Whole, jax.Array]:
        """`whole_logits`, and the largest of each block of columns, (n, blocks), as wide as `block` says.

        The maxima are after the temperature. A NaN logit counts as −inf for the maxima, and makes log_mass NaN.
        """
        return self.launched("logits_and_maxima")(step, problem, count)

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
        return self.launched("divergence_pass")(step, problem, of, count, dz, static)

    def saved_targets(
        self, step: Step, problem: Problem, saved: jax.Array, at_target: jax.Array, clear: jax.Array | None
    ) -> jax.Array:
        """saved, in place, with at_target at the targets, and 0 for ignored tokens in the first `clear` rows."""
        return self.launched("saved_targets")(step, problem, saved, at_target, clear)

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
        return self.launched("products")(step, problem, unit, count, blocks)

    def thresholds(self, step: Step, gpu: Any, masses: jax.Array, scores: jax.Array, most: jax.Array) -> jax.Array:
        """block_sparse.Thresholds."""
        return self.launched("thresholds")(step, gpu, masses, scores, most)

    def sum_dc(
        self, step: Step, request: Request, gpu: Any, dc: jax.Array, steps: Any, part: Part
    ) -> tuple[jax.Array, jax.Array | None]:
        """dc + unit · leftᵀ·e of the first `count` tokens, in place, and its steps (cce_kernels/block_floats.py).

        steps: None where dc is summed in float32.
        """
        return self.launched("sum_dc")(step, request, gpu, dc, steps, part)


class Engine(Planned, Launched):
    def lacks(self, method: str, request: Request) -> str:
        """Why the engine does not have this method of Launched for a call that it serves, in words; "" if it has it."""
        return "" if method in self.launches else f"it has no {method}"

    def offers(self, method: str, request: Request) -> bool:
        return not self.lacks(method, request)

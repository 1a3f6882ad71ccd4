"""The vocabulary split over processes, where the forward pass forms the gradients: held to float64 of all columns."""

import contextlib
import dataclasses
import functools
import gc
import itertools
import weakref
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from cce_torch import VocabParallel, linear_cross_entropy
from cce_torch.on_jax import bridge
from tests import gloo
from tests.call_torch import assert_same_bits, in_chunks
from tests.gloo import Collectives, gathered_objects, in_processes, rows_of, shard_of
from tests.search import run_torch
from tests.search.bounds import checks
from tests.search.calls import CROSS_ENTROPY, SHARED, TOKEN_LOSS, Call, Data, Program, draw
from tests.search.data import drawn_arrays
from tests.search.truth import truth

pytestmark = gloo.needed

TOLERANCE = 2.0**-7
SHARDS = 111, 111, 203  # where each of three processes ends: the second holds no column


def example(tokens: int = 50, width: int = 24, vocabulary: int = 203, dtype=torch.bfloat16) -> tuple:
    draw = torch.Generator().manual_seed(0)
    e = torch.randn(tokens, width, generator=draw).to(dtype)
    c = torch.randn(vocabulary, width, generator=draw).to(dtype)
    targets = torch.randint(0, vocabulary, (tokens,), generator=draw)
    return e, c, torch.where(torch.rand(tokens, generator=draw) < 0.3, -100, targets)


def leaves_of(dtype: torch.dtype = torch.bfloat16, tokens: int = 50, **more: Any) -> tuple:
    """e, this process' rows of c, targets, and what says so, for SHARDS."""
    e, c, targets = example(tokens, dtype=dtype)
    shard = shard_of(SHARDS, **more)
    options = {"impl": "chunked", "vocab_parallel": shard}
    return e.requires_grad_(), c[rows_of(shard)].clone().requires_grad_(), targets, options


def run_held(call: Call, chunk: int | None) -> set[str]:
    """Holds a call to float64, whose chunks have so many tokens. Returns the programs that ran in any process."""
    arrays, group = drawn_arrays(call), dist.group.WORLD
    with in_chunks(chunk) if chunk else contextlib.nullcontext([]) as ran:
        own = run_torch._in_process(group, call, arrays)
        if torch.cuda.is_available():
            again = run_torch._in_process(group, call, arrays)
            assert all(x.tobytes() == again[name].tobytes() for name, x in own.items()), f"{call}: other bits"
    both = gathered_objects((own, ran))
    joined = run_torch._joined(call.program, [own for own, _ in both])
    wrong = [x.words for x in checks(joined, truth(arrays, call.program), call.program) if not x.ratio <= 1]
    assert not wrong, f"{call}: {wrong}"
    return {name for _, ran in both for name in ran}


FORMED, AGAIN = "torch_chunk_gradients", {"torch_loss", "torch_gradients"}


def check_drawn() -> None:
    """Drawn calls, in chunks of a few tokens: of many options, and one by the kernels, whose interpreter is slow."""
    calls = (draw(1, k, "processes") for k in itertools.count(0, SHARED))
    calls = (x for x in calls if x.program.function in (CROSS_ENTROPY, TOKEN_LOSS) and x.program.dtype != "float64")
    for number, (impl, call) in enumerate(zip(["chunked"] * 6 + ["cce"], calls, strict=False)):
        program = dataclasses.replace(
            call.program,
            impl=impl,
            split="vocabulary",
            processes=dist.get_world_size(),
            transformation="gradient",
            dtype="bfloat16" if impl == "cce" else call.program.dtype,
            wanted=tuple(dict.fromkeys((("e", "c")[number % 2], *call.program.wanted))),
            reduction=("mean", "sum")[number % 2],
            num_items=None,
            objective=("loss",),
            return_lse=False,
        )
        ran = run_held(dataclasses.replace(call, program=program), (8, 24)[number % 2])
        assert ran & {FORMED, *AGAIN} == {FORMED}, f"{call}: {ran}"


OF_GPUS = Program("torch", split="vocabulary", leading=(1000,), width=256, vocabulary=9001, dtype="bfloat16")
WIDE = dataclasses.replace(OF_GPUS, mixed=True, softcap=10.0, leading=(777,))
EVERYTHING = dataclasses.replace(
    OF_GPUS,
    leading=(4, 300),
    arrays=("bias", "class_weight", "token_weight"),
    wanted=("e", "c", "bias", "token_weight"),
    label_smoothing=0.1,
    z_loss=0.01,
    shift=1,
)


def check_gpus() -> None:
    """The kernels on GPUs: right, and the same bits again. The shards of the seeds have other sizes."""
    ways: list[tuple[Any, tuple[str, ...]]] = [(2**20, ()), ("all", ()), (2**30, ("e",)), (2**30, ("c",))]
    for seed, (program, (budget, wanted)) in enumerate(itertools.product((OF_GPUS, WIDE, EVERYTHING), ways)):
        call = dataclasses.replace(program, memory_budget=budget, wanted=wanted or program.wanted)
        call = dataclasses.replace(call, processes=dist.get_world_size(), reduction=("none", "sum")[seed % 2])
        run_held(Call(call, Data(seed, ignored="few")), None)
        if wanted and program is not EVERYTHING:
            formed = dataclasses.replace(call, reduction="sum")
            assert FORMED in run_held(Call(formed, Data(seed, ignored="few")), 256)


def check_autograd() -> None:
    """A backward pass exchanges nothing and computes no logits. In one process: test_torch_calls.py."""
    for dtype in (torch.float32, torch.bfloat16):
        e, c, targets, options = leaves_of(dtype)
        call = functools.partial(linear_cross_entropy, e, c, targets, **options)
        with in_chunks(16) as ran:
            want, loss = torch.autograd.grad(call(), (e, c)), call()
            ran.clear()
            with Collectives() as backward:
                for kept in (True, False):
                    assert_same_bits(torch.autograd.grad(loss, (e, c), retain_graph=kept), want)
            assert not backward.seen, backward.seen
            assert set(ran) <= {"torch_chunk_finish"}, ran
            for kept in (False, True):
                loss = call(reduction="sum")
                formed = [x.data_ptr() for x in loss.grad_fn.saved_tensors[5:] if x is not None and x.numel()]
                found = torch.autograd.grad(loss, (e, c), retain_graph=kept)
                assert all((x.data_ptr() in formed) != kept for x in found if x.numel()), "the memory of the gradients"
            left = [weakref.ref(x) for x in call(reduction="sum").grad_fn.saved_tensors[5:] if x is not None]
            gc.collect()
            assert not any(x() is not None for x in left), "a graph that is gone"
            created = torch.autograd.grad(call(), (e, c), create_graph=True)
            with pytest.raises(NotImplementedError, match="first derivatives in reverse mode"):
                torch.autograd.grad(created[0].sum(), e)


def check_weights_in_float16() -> None:
    """The mean of weights that float16 does not hold: a power of two in all of them changes no bit."""
    weight = torch.linspace(0.5, 2, 52)
    for sequence in (False, True):
        e, c, targets, options = leaves_of(torch.float16, 52, **{"sequence_axis": 0} if sequence else {})
        if sequence:
            e = e.detach().chunk(dist.get_world_size())[dist.get_rank()].requires_grad_()
        run = functools.partial(linear_cross_entropy, e, c, targets, **options)
        with in_chunks(16):
            want, *others = (torch.autograd.grad(run(token_weight=k * weight), (e, c)) for k in (1, 2.0**-24, 2.0**24))
        assert want[0].any()
        for found in others:
            assert_same_bits(found, want, f"{sequence=}")


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Of the blocks of de the first column of blocks is left out, of those of dc the first row of blocks.

    As kernels of a GPU find and leave out blocks: the first program of a chunk says which, the second leaves them out.
    """
    import jax.numpy as jnp

    from cce_kernels import blocks
    from cce_kernels.block_sparse import DC_BLOCK, DE_BLOCK, Blocks
    from cce_kernels.plan import residuals

    numbers, gradients, shapes = blocks.numbers_of, blocks.gradients_of, residuals.shapes_of_blocks

    def shapes_of(request: Any, n: int) -> Any:
        return shapes(dataclasses.replace(request, gradient_tolerance=TOLERANCE), n)

    def numbers_of(chunk: Any, plan: Any) -> tuple:
        own, columns = numbers(chunk, plan)
        de, dc = (jnp.ones(x.shape, bool) for x in shapes_of(plan.request, len(columns.values)))
        return own, columns._replace(blocks=Blocks(de.at[:, 0].set(False), dc.at[0].set(False)))

    def gradients_of(chunk: Any, columns: Any, *others: Any) -> tuple:
        (n, width), stores = columns.values.shape, others[-1].forward is not None

        def found(kept: Any, shape: Any) -> tuple:
            kept = jnp.repeat(jnp.repeat(kept, shape.tokens, 0), shape.columns, 1)[:n, :width]
            return gradients(chunk, columns._replace(values=jnp.where(kept, columns.values, gone)), *others)

        gone = 0 if stores else -jnp.inf
        return found(columns.blocks.de, DE_BLOCK)[0], *found(columns.blocks.dc, DC_BLOCK)[1:]

    with (
        mock.patch.object(blocks, "numbers_of", numbers_of),
        mock.patch.object(blocks, "gradients_of", gradients_of),
        mock.patch.object(residuals, "shapes_of_blocks", shapes_of),
    ):
        yield


def check_blocks_that_are_left_out() -> None:
    """Each process leaves out those that it found. Where c is the identity, de is dz; where e is, dc is dz."""
    tokens, vocabulary = 64, 300
    shard = shard_of((130, 130, vocabulary))
    rows, logits = rows_of(shard), torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(0))
    targets = torch.full((tokens,), 129)
    p, of_targets = torch.softmax(logits.double(), 1), torch.nn.functional.one_hot(targets, vocabulary)
    without_columns, without_rows = p.clone(), p.clone()
    for first in (0, 130):  # of each process that has columns
        without_columns[:, first : first + 64] = 0
    for first in (0, 32):  # of each chunk
        without_rows[first : first + 16] = 0
    for e, c, of_c in ((logits, torch.eye(vocabulary), False), (torch.eye(tokens), logits.T, True)):
        leaves = [x.contiguous().requires_grad_() for x in (e, c[rows])]
        with left_out(), in_chunks(32):
            loss = linear_cross_entropy(*leaves, targets, impl="chunked", reduction="sum", vocab_parallel=shard)
            de, dc = torch.autograd.grad(loss, leaves)
        found, want = (dc.T, (without_rows - of_targets)[:, rows]) if of_c else (de, without_columns - of_targets)
        torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-5)


def check_which_way() -> None:
    e, c, targets, options = leaves_of()
    call = functools.partial(linear_cross_entropy, e, c, targets, **options)
    with in_chunks(16) as ran:
        want = torch.autograd.grad(call(), (e, c))
        formed = 4 * ["torch_chunk_statistics", FORMED] + ["torch_chunk_finish"]
        formed = formed if len(c) else []
        assert ran == formed, ran
        ran.clear()
        loss = checkpoint(lambda e: linear_cross_entropy(e, c, targets, **options), e, use_reentrant=False)
        first = ["torch_loss"] if len(c) else []
        assert ran == first, ran
        assert_same_bits(torch.autograd.grad(loss, (e, c)), want, "checkpoint")
        assert ran == first + formed, ran
        for more in ({"return_lse": True}, {"reduction": "none"}):
            ran.clear()
            value = call(**more)
            torch.autograd.grad((value[0] if "return_lse" in more else value).sum(), (e, c))
            assert not len(c) or set(ran) == AGAIN, ran
        ran.clear()
        with torch.no_grad():
            call()
        assert ran == first, ran
        weight = torch.rand(50, requires_grad=True)
        linear_cross_entropy(e.detach(), c.detach(), targets, token_weight=weight, **options).backward()
        assert not any("chunk" in x for x in ran), ran


def check_exchanged() -> None:
    """Of the tokens, 16 at a time; the second process has no column. No array has an element for each logit."""
    numbers = [f"all_gather_into_tensor (3, {n}) float32" for n in (16, 16, 16, 2)]
    of_e = [f"all_reduce ({n}, 24) float32" for n in (16, 16, 16, 2)]
    both = [x for pair in zip(numbers, of_e, strict=True) for x in pair]
    of_targets = ["all_reduce (50,) float32"]
    for impl, dtype in (("chunked", torch.bfloat16), ("chunked", torch.float32), ("cce", torch.bfloat16)):
        e, c, targets, options = leaves_of(dtype)
        call, sizes = functools.partial(linear_cross_entropy, targets=targets, **{**options, "impl": impl}), []
        part = dataclasses.replace(options["vocab_parallel"], reduce_e_grad=False)
        run = bridge.run

        def measured(program: Any, inputs: Any, outputs: Any, *more: Any, run: Any = run, sizes: Any = sizes) -> Any:
            sizes.extend(x.shape for x in (*inputs, *outputs) if isinstance(x, torch.Tensor) and x.dim() == 2)
            return run(program, inputs, outputs, *more)

        ways = (
            ((e, c), {}, (of_targets if impl == "cce" else []) + both),
            ((e, c), {"gradient_tolerance": TOLERANCE}, both),
            ((e, c.detach()), {}, both),
            ((e.detach(), c), {}, numbers),
            ((e, c), {"vocab_parallel": part}, numbers),
        )
        with in_chunks(16), mock.patch.object(bridge, "run", measured):
            for own, given, want in ways[: 1 if impl == "cce" else 5]:  # the kernels' interpreter is slow
                with Collectives() as seen:
                    call(*own, **given).backward()
                assert seen.seen == want, (impl, given, seen.seen)
        assert not any(x[0] > 16 and x[1] == len(c) for x in sizes), sizes
    shard = dataclasses.replace(options["vocab_parallel"], sequence_axis=0)
    part = e.detach().chunk(3)[dist.get_rank()].requires_grad_()
    with in_chunks(16), Collectives() as seen:
        linear_cross_entropy(part, c, targets, vocab_parallel=shard, impl="chunked").backward()
    gathered, scattered = "all_gather_into_tensor (17, 24) bfloat16", "reduce_scatter_tensor (3, 17, 24) float32"
    assert seen.seen == [gathered, *numbers, scattered], seen.seen
    whole = torch.autograd.grad(linear_cross_entropy(e, c, targets, **options), e)[0]
    assert torch.equal(part.grad, whole.chunk(3)[dist.get_rank()])


def check_shards_of_any_size() -> None:
    """All processes take the same chunks, also where none knows how many rows the others hold: vocabulary is given.

    Within the budget a shard of one column would take all tokens at once, and one of 200 columns takes chunks.
    """
    e, c, targets = example(300, dtype=torch.float32)
    leaves = e.requires_grad_(), c.requires_grad_()
    de, dc = torch.autograd.grad(linear_cross_entropy(*leaves, targets, impl="reference"), leaves)
    for stops, told in itertools.product(((1, 3, 203), SHARDS), (False, True)):
        shard = shard_of(stops, **{} if told else {"vocabulary": 203})
        assert shard.largest == (max(b - a for a, b in pairwise((0, *stops))) if told else 68)
        assert dataclasses.replace(shard, reduce_e_grad=False).largest == shard.largest
        own = c.detach()[rows_of(shard)].requires_grad_()
        for chunk, budget in ((48, None), (None, 220_000)):
            with in_chunks(chunk) as ran:
                options: Any = {"impl": "chunked", "vocab_parallel": shard, "memory_budget": budget}
                found = torch.autograd.grad(linear_cross_entropy(e, own, targets, **options), (e, own))
            torch.testing.assert_close(found, (de, dc[rows_of(shard)]), rtol=1e-4, atol=1e-6)
            assert ran.count("torch_chunk_statistics") > 1 or not len(own), ran
    assert VocabParallel(None, 0, 3, vocabulary=203, largest=100).largest == 100


def test_three_processes():
    in_processes(
        3,
        check_drawn,
        check_autograd,
        check_weights_in_float16,
        check_blocks_that_are_left_out,
        check_which_way,
        check_exchanged,
        check_shards_of_any_size,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 4])
def test_kernels_on_gpus(count):
    in_processes(count, check_gpus, gpus=True)

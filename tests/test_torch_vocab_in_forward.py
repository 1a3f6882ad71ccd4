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
from tests import truth as of_tests
from tests.call_torch import array, assert_same_bits, in_chunks
from tests.search import run_torch
from tests.search.bounds import checks
from tests.search.calls import CROSS_ENTROPY, SHARED, TOKEN_LOSS, draw
from tests.search.data import drawn_arrays
from tests.search.truth import truth
from tests.test_torch_distributed import Collectives, in_processes
from tests.tolerance import assert_rounded

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")

DTYPES = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = 2.0**-7
SHARDS = 111, 111, 203  # where each of three processes ends: the second holds no column


def held(stops: tuple[int, ...]) -> slice:
    """The rows of this process."""
    rank = dist.get_rank()
    return slice((0, *stops)[rank], stops[rank])


def assert_close(found: torch.Tensor, want: torch.Tensor, rounded: torch.Tensor, what: str, roundings: int = 3) -> None:
    """See tests/tolerance.py. Besides the result dz is rounded, and de before its factor. What is 0 in truth is 0."""
    if not want.any():
        assert not found.any(), what
    else:
        assert_rounded(array(found), array(want), array(rounded), what, roundings=roundings)


def example(tokens=50, width=24, vocabulary=203, dtype=torch.bfloat16, seed=0, ignored=0.3, wide=False) -> tuple:
    draw = torch.Generator().manual_seed(seed)
    e = torch.randn(tokens, width, generator=draw).to(dtype)
    c = torch.randn(vocabulary, width, generator=draw).to(torch.float32 if wide else dtype)
    targets = torch.randint(0, vocabulary, (tokens,), generator=draw)
    return e, c, torch.where(torch.rand(tokens, generator=draw) < ignored, -100, targets), draw


def gradients_of(function: Any, leaves: dict, how: dict, **options: Any) -> tuple[torch.Tensor, dict]:
    own = {k: x.detach().requires_grad_(k not in how["frozen"]) for k, x in leaves.items()}
    value = function(**own, **options)
    value = value[0] if isinstance(value, tuple) else value
    wanted = [k for k in own if k not in how["frozen"]]
    found = torch.autograd.grad(how["factor"] * value, [own[k] for k in wanted])
    return value.detach(), dict(zip(wanted, found, strict=True))


def check_drawn() -> None:
    """Drawn calls, in chunks of a few tokens: of many options, and one by the kernels, whose interpreter is slow."""
    group: Any = dist.group.WORLD
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
        call = dataclasses.replace(call, program=program)
        arrays = drawn_arrays(call)
        with in_chunks((8, 24)[number % 2]) as ran:
            own = run_torch._in_process(group, call, arrays)
        assert not {"torch_loss", "torch_gradients"}.intersection(ran), f"{call}: {ran}"
        parts: list = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (own, ran))
        assert any("torch_chunk_gradients" in ran for _, ran in parts), f"{call}: {parts}"
        joined = run_torch._joined(call.program, [own for own, _ in parts])
        wrong = [x.words for x in checks(joined, truth(arrays, call.program), call.program) if not x.ratio <= 1]
        assert not wrong, f"{call}: {wrong}"


def leaves_of(dtype: torch.dtype = torch.bfloat16, tokens: int = 50, **more: Any) -> tuple:
    """e, this process' rows of c, targets, and what says so, for SHARDS."""
    e, c, targets, _ = example(tokens, dtype=dtype)
    rows = held(SHARDS)
    shard = VocabParallel(None, rows.start, rows.stop, **more)
    return e.requires_grad_(), c[rows].clone().requires_grad_(), targets, {"impl": "chunked", "vocab_parallel": shard}


def check_autograd() -> None:
    """Every way through autograd gives the same bits."""
    exact: dict = {}
    for dtype, tolerance in (*((x, 0.0) for x in DTYPES[:2]), (torch.bfloat16, TOLERANCE)):
        e, c, targets, options = leaves_of(dtype)
        options["gradient_tolerance"] = tolerance
        call = functools.partial(linear_cross_entropy, targets=targets, **options)
        with in_chunks(16) as ran:
            want, doubled = (torch.autograd.grad(k * call(e, c), (e, c)) for k in (1, 2))
            assert_same_bits(want, exact.setdefault(dtype, want), "a tolerance")
            loss = call(e, c)
            ran.clear()
            with Collectives() as backward:
                assert_same_bits(torch.autograd.grad(loss, (e, c), retain_graph=True), want, "a kept graph")
                assert_same_bits(torch.autograd.grad(loss, c, retain_graph=True), want[1:], "dc alone")
                assert_same_bits(torch.autograd.grad(2 * loss, (e, c), retain_graph=True), doubled, "twice the loss")
                assert_same_bits(torch.autograd.grad(loss, (e, c)), want, "the last backward pass")
            assert not backward.seen, backward.seen
            assert set(ran) <= {"torch_chunk_finish"}, ran
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                torch.autograd.grad(loss, (e, c))
            created = torch.autograd.grad(call(e, c), (e, c), create_graph=True)
            assert_same_bits([x.detach() for x in created], want, "create_graph")
            with pytest.raises(NotImplementedError, match="first derivatives in reverse mode"):
                torch.autograd.grad(created[0].sum(), e)
            with torch.autograd.graph.save_on_cpu():
                loss = call(e, c)
            assert_same_bits(torch.autograd.grad(loss, (e, c)), want, "save_on_cpu")
            for kept in (False, True):
                loss = call(e, c, reduction="sum")
                formed = [x.data_ptr() for x in loss.grad_fn.saved_tensors[5:] if x is not None and x.numel()]
                found = torch.autograd.grad(loss, (e, c), retain_graph=kept)
                assert all((x.data_ptr() in formed) != kept for x in found if x.numel()), "the memory of the gradients"
            left = [weakref.ref(x) for x in call(e, c, reduction="sum").grad_fn.saved_tensors[5:] if x is not None]
            gc.collect()
            assert not any(x() is not None for x in left), "a graph that is gone"
            de, _ = torch.autograd.grad(torch.inf * call(e, c), (e, c))
            assert not de[targets == -100].any()
            assert not de[targets != -100].isfinite().all(1).any()


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


def check_tolerance() -> None:
    """On a CPU nothing is left out, and nothing more is exchanged."""
    e, c, targets, options = leaves_of()
    exact = functools.partial(linear_cross_entropy, targets=targets, reduction="sum", **options)
    call = functools.partial(exact, gradient_tolerance=TOLERANCE)
    with in_chunks(16):
        with Collectives() as exchanged:
            want = torch.autograd.grad(exact(e, c), (e, c))
        with Collectives() as more:
            assert_same_bits(torch.autograd.grad(call(e, c), (e, c)), want, "a tolerance")
    assert more.seen == exchanged.seen, more.seen


@contextlib.contextmanager
def left_out(tolerance: float) -> Iterator[None]:
    """The two halves of a chunk leave out blocks, as they do by kernels of a GPU: those of a CPU leave out nothing."""
    import jax.numpy as jnp

    from cce_kernels import blocks
    from cce_kernels.block_sparse import DC_BLOCK, DE_BLOCK, MULTIPLE, PART, Tokens, kept_blocks
    from cce_kernels.plan import residuals

    numbers, gradients, shapes = blocks.numbers_of, blocks.gradients_of, residuals.shapes_of_blocks

    def shapes_of(call: Any, n: int) -> Any:
        return shapes(dataclasses.replace(call, gradient_tolerance=tolerance), n)

    def stores(plan: Any) -> bool:
        return plan.forward is not None

    def thresholds(masses: Any, scores: Any, most: Any) -> Any:
        scores = jnp.repeat(scores, masses.shape[1] // scores.shape[1], axis=1)
        order = jnp.argsort(scores, axis=0)
        masses, scores = (jnp.take_along_axis(x, order, 0) for x in (masses, scores))
        may = (jnp.cumsum(masses, 0) <= most) & jnp.isfinite(scores)
        return jnp.where(most < jnp.inf, jnp.where(may, scores, -1).max(0), jnp.inf)

    def numbers_of(chunk: Any, plan: Any) -> tuple:
        own, columns = numbers(chunk, plan)
        (n, padded), vocabulary, targets = columns.values.shape, plan.request.vocabulary, chunk.inputs.targets
        p = columns.values.astype(jnp.float32)
        p = p if stores(plan) else jnp.exp(p - p.max(1, keepdims=True))
        p = jnp.where(chunk.live[:, None] & (jnp.arange(padded) < vocabulary), p, 0)
        here = (targets >= 0) & (targets < vocabulary)
        of_target = jnp.where(here, p[jnp.arange(n), jnp.where(here, targets, 0)], 0)
        p = jnp.pad(p, [(0, -size % MULTIPLE) for size in p.shape])
        masses, tokens = p.reshape(len(p), -1, PART).sum(2).T, Tokens(targets, of_target, chunk.count)
        return own, columns._replace(blocks=kept_blocks(masses, tokens, tolerance, thresholds))

    def gradients_of(chunk: Any, columns: Any, *others: Any) -> tuple:
        (n, padded), plan = columns.values.shape, others[-1]

        def found(blocks: Any, shape: Any) -> tuple:
            kept = jnp.repeat(jnp.repeat(blocks, shape.tokens, 0), shape.columns, 1)[:n, :padded]
            values = jnp.where(kept, columns.values, 0 if stores(plan) else -jnp.inf)
            return gradients(chunk, columns._replace(values=values), *others)

        return found(columns.blocks.de, DE_BLOCK)[0], *found(columns.blocks.dc, DC_BLOCK)[1:]

    with (
        mock.patch.object(blocks, "numbers_of", numbers_of),
        mock.patch.object(blocks, "gradients_of", gradients_of),
        mock.patch.object(residuals, "shapes_of_blocks", shapes_of),
    ):
        yield


def check_the_bound() -> None:
    """Each process keeps to the bound over its columns, so it holds over all.

    Where c is the identity, de is dz; where e is, dc is dz. One of the processes has no column.
    """
    tolerance, tokens = 0.25, 60
    for name, impl, vocabulary, first in (("e", "chunked", 256, 130), ("c", "cce", 1040, 520)):
        draw, rows = torch.Generator().manual_seed(0), held((first, first, vocabulary))
        logits = torch.randn(tokens, vocabulary, generator=draw)
        for start in (0, first + 10):  # likely tokens stand together
            logits[:, start : start + 30] += 6
        targets = torch.randint(0, 30, (tokens,), generator=draw)
        targets[3], targets[::20] = vocabulary - 6, -100
        live, logits = targets >= 0, logits.bfloat16()
        e, c = (logits, torch.eye(vocabulary)) if name == "e" else (torch.eye(tokens), logits.T)
        exact = torch.softmax(logits.double(), 1) - torch.nn.functional.one_hot(targets.clamp(0), vocabulary)
        exact = torch.where(live[:, None], exact, 0)
        leaves = [x.bfloat16().contiguous().requires_grad_() for x in (e, c[rows])]
        options: dict = {"impl": impl, "reduction": "sum", "gradient_tolerance": tolerance}
        options["vocab_parallel"] = VocabParallel(None, rows.start, rows.stop)
        with left_out(tolerance), in_chunks(16):
            loss = linear_cross_entropy(*leaves, targets, **options)
            de, dc = torch.autograd.grad(loss, leaves)
        dz, own, column = de.double(), exact, targets
        if name == "c":
            dz, own, column = dc.double().T, exact[:, rows], targets - rows.start
        gone, here = (dz == 0) & live[:, None], live & (column >= 0) & (column < dz.shape[1])
        assert gone.sum() > gone.numel() / 8 or not gone.numel(), f"{gone.sum()} are left out"
        assert not gone[here, column[here]].any(), "the target never is"
        left = torch.where(gone, own, 0).abs().sum(1)
        if name == "c":
            dist.all_reduce(left)
        assert (left <= tolerance * exact.abs().sum(1)).all(), left
        torch.testing.assert_close(dz[~gone], own[~gone], rtol=2**-6, atol=2**-9)


def check_which_way() -> None:
    e, c, targets, options = leaves_of()
    call, again = functools.partial(linear_cross_entropy, e, c, targets, **options), "torch_gradients"
    with in_chunks(16) as ran:
        want = torch.autograd.grad(call(), (e, c))
        formed = 4 * ["torch_chunk_statistics", "torch_chunk_gradients"] + ["torch_chunk_finish"]
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
            assert not len(c) or again in ran, ran
            assert not any("chunk" in x for x in ran), ran
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
        first = of_targets if impl == "cce" else []
        part = dataclasses.replace(options["vocab_parallel"], reduce_e_grad=False)
        run = bridge.run

        def measured(program: Any, inputs: Any, outputs: Any, *more: Any, run: Any = run, sizes: Any = sizes) -> Any:
            sizes.extend(x.shape for x in (*inputs, *outputs) if isinstance(x, torch.Tensor) and x.dim() == 2)
            return run(program, inputs, outputs, *more)

        ways = (
            ((e, c), {}, first + both),
            ((e, c.detach()), {}, both),
            ((e.detach(), c), {}, numbers),
            ((e, c), {"vocab_parallel": part}, numbers),
        )
        with in_chunks(16), mock.patch.object(bridge, "run", measured):
            for own, given, want in ways[: 1 if impl == "cce" else 4]:  # the kernels' interpreter is slow
                with Collectives() as seen:
                    call(*own, **given).backward()
                assert seen.seen == want, (impl, given, seen.seen)
        assert not any(x[0] > 16 and x[1] == len(c) for x in sizes), sizes
    shard = dataclasses.replace(options["vocab_parallel"], sequence_axis=0)
    parts, rank = e.detach().chunk(3), dist.get_rank()
    part = parts[rank].requires_grad_()
    with in_chunks(16), Collectives() as seen:
        linear_cross_entropy(part, c, targets, vocab_parallel=shard, impl="chunked").backward()
    gathered, scattered = "all_gather_into_tensor (17, 24) bfloat16", "reduce_scatter_tensor (3, 17, 24) float32"
    assert seen.seen == [gathered, *numbers, scattered], seen.seen
    options["vocab_parallel"] = dataclasses.replace(shard, sequence_axis=None)
    whole = torch.autograd.grad(linear_cross_entropy(e, c, targets, **options), e)[0]
    assert torch.equal(part.grad, whole.chunk(3)[rank])


def check_rows_that_nobody_told() -> None:
    """With vocabulary given, no process knows how many rows the others hold: all still take the same chunks."""
    e, c, targets, _ = example(dtype=torch.float32)
    want = torch.autograd.grad(linear_cross_entropy(e.requires_grad_(), c, targets, impl="reference"), e)[0]
    for stops in ((1, 3, 203), SHARDS):
        rows = held(stops)
        shard = VocabParallel(None, rows.start, rows.stop, vocabulary=203)
        assert shard.largest == 68
        assert dataclasses.replace(shard, reduce_e_grad=False).largest == 68
        with in_chunks(16):
            loss = linear_cross_entropy(e, c[rows].requires_grad_(), targets, impl="chunked", vocab_parallel=shard)
            torch.testing.assert_close(torch.autograd.grad(loss, e)[0], want, rtol=1e-4, atol=1e-6)
        assert VocabParallel(None, rows.start, rows.stop).largest == max(b - a for a, b in pairwise((0, *stops)))
    assert VocabParallel(None, 0, 3, vocabulary=203, largest=100).largest == 100


def check_planned() -> None:
    """Within this budget a shard of one column would take all tokens at once, and one of 200 columns takes chunks."""
    rows = held((1, 3, 203))
    e, c, targets, _ = example(300, dtype=torch.float32)
    want = torch.autograd.grad(linear_cross_entropy(e, c.requires_grad_(), targets, impl="reference"), c)[0][rows]
    c = c.detach()[rows].requires_grad_()
    with in_chunks(None) as ran:
        loss = linear_cross_entropy(
            e,
            c,
            targets,
            impl="chunked",
            memory_budget=220_000,
            vocab_parallel=VocabParallel(None, rows.start, rows.stop),
        )
        torch.testing.assert_close(torch.autograd.grad(loss, c)[0], want, rtol=1e-4, atol=1e-6)
    assert ran.count("torch_chunk_statistics") > 3, ran


def check_gpus() -> None:
    """The kernels on GPUs: programs write their results into the memory that they were given, and twice the same."""
    vocabulary, tokens, count = 4096, 1000, dist.get_world_size()
    for stops, softcap, wide in (([1024 * k for k in range(1, 4)], None, False), ([64, 64, 832], 20.0, True)):
        rows = held((*stops[: count - 1], vocabulary))
        for frozen in ((), ("c",), ("e",)):
            e, c, targets, _ = example(tokens, 256, vocabulary, wide=wide)
            own = {"e": e, "c": c[rows]}
            own = {k: x.cuda().requires_grad_(k not in frozen) for k, x in own.items()}
            shard = VocabParallel(None, rows.start, rows.stop)
            wanted = [k for k in own if k not in frozen]
            with in_chunks(256) as ran:
                loss = linear_cross_entropy(
                    **own, targets=targets.cuda(), softcap=softcap, impl="cce", vocab_parallel=shard
                )
                again = torch.autograd.grad(3 * loss, [own[k] for k in wanted], retain_graph=True)
                found = torch.autograd.grad(3 * loss, [own[k] for k in wanted])
            assert_same_bits(found, again, "twice")
            assert ("torch_chunk_gradients" in ran) == (len(own["c"]) > 0)
            how = {"frozen": set(frozen), "factor": 3.0}
            leaves = {"e": e, "c": c}
            more = {"targets": targets, "softcap": softcap}
            rounded = gradients_of(linear_cross_entropy, leaves, how, impl="reference", **more)[1]
            want = gradients_of(of_tests.losses, {k: x.double() for k, x in leaves.items()}, how, **more)[1]
            for k, x in zip(wanted, found, strict=True):
                part = slice(None) if k == "e" else rows
                dtype = torch.bfloat16
                assert_close(
                    x.cpu().to(dtype), want[k][part], rounded[k][part].to(dtype), f"d{k}, {stops}, {frozen}", 4
                )


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 4])
def test_kernels_on_gpus(count):
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    in_processes(count, check_gpus, gpus=True)


def test_three_processes():
    in_processes(
        3,
        check_drawn,
        check_autograd,
        check_weights_in_float16,
        check_tolerance,
        check_the_bound,
        check_which_way,
        check_exchanged,
        check_rows_that_nobody_told,
        check_planned,
    )

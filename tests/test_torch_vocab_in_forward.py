"""The vocabulary split over processes, where the forward pass forms the gradients: held to float64 of all columns."""

import contextlib
import dataclasses
import functools
import gc
import weakref
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from cce_kernels.plan import Chunks, choose
from cce_kernels.plan.chunks import sums_in_16_bits
from cce_torch import VocabParallel, linear_cross_entropy
from cce_torch.on_jax import bridge
from tests import truth
from tests.call_torch import array
from tests.test_torch_distributed import Collectives, assert_same_everywhere, in_processes
from tests.tolerance import assert_rounded

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")

DTYPES = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = 2.0**-7
SHARDS = 40, 111, 111, 203  # where each of four processes ends: the third holds no column


@contextlib.contextmanager
def in_chunks(size: int | None) -> Iterator[list[str]]:
    """Calls form their gradients in the forward pass, in chunks of so many tokens. Yields the programs that run.

    size: None for the chunks that the plan chooses.
    """
    ran, run = [], bridge.run

    def chunks_of(count: Any, last: int | None) -> Chunks:
        tokens, of_sum = count.call.tokens, sums_in_16_bits(count.call)
        whole = -(-tokens // size) - of_sum
        return Chunks(whole, size if whole else 0, size if of_sum else 0, 256)

    def recorded(program: Any, *arguments: Any, **options: Any) -> Any:
        ran.append(program.__wrapped__.__name__)
        return run(program, *arguments, **options)

    with (
        mock.patch.object(choose, "fastest_chunks", chunks_of if size else choose.fastest_chunks),
        mock.patch.object(choose, "_may_form_in_forward", return_value=True),
        mock.patch.object(choose, "_is_fastest_in_forward", return_value=True),
        mock.patch.object(bridge, "run", recorded),
    ):
        forget()
        yield ran
    forget()


def forget() -> None:
    from cce_torch.on_jax import chunk_programs, programs

    choose.plan_of.cache_clear()
    programs.handover_of.cache_clear()
    chunk_programs._chunks.cache_clear()
    chunk_programs._way.cache_clear()


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


def drawn(rng: np.random.Generator, impl: str) -> tuple[dict, dict, dict]:
    """What is differentiated, the options, and how the call is split. The same in all processes."""

    def yes() -> bool:
        return bool(rng.integers(2))

    dtype = DTYPES[rng.integers(3)] if impl == "chunked" else torch.bfloat16
    tokens, width, vocabulary = (int(rng.integers(1, n)) for n in (90, 40, 150))
    e, c, targets, draw = example(
        tokens,
        width,
        vocabulary,
        dtype,
        int(rng.integers(99)),
        float(rng.choice([0.0, 0.4, 0.9, 1.0])),
        dtype != torch.float32 and yes(),
    )
    leaves = {"e": e, "c": c}
    if yes():
        leaves["bias"] = torch.randn(vocabulary, generator=draw).to(c.dtype)
    if yes():
        leaves["token_weight"] = torch.rand(tokens, generator=draw)
    options = {
        "targets": targets,
        "reduction": ["mean", "sum"][yes()],
        "shift": tokens // 7 * yes(),
        "softcap": 9.0 if yes() else None,
        "logit_scale": 0.7 if yes() else None,
        "label_smoothing": 0.1 * yes(),
        "z_loss": 1e-3 * yes(),
    }
    if yes():
        options["class_weight"] = torch.rand(vocabulary, generator=draw) + 0.5
    if options["reduction"] == "mean" and yes():
        options["num_items"] = 37.0
    elif options["reduction"] == "mean" and "token_weight" in leaves:
        leaves["token_weight"] *= 10.0 ** int(rng.integers(-6, 7))
    frozen = [set(), set(), {"e"}, {"c"}, {"e", "bias"}, {"c", "bias"}][rng.integers(6)]
    factor = float(rng.choice([1.0, 0.3, -7.0, 0.0, 1.0 if dtype == torch.float16 else 2.0**16]))
    stops = (*sorted(int(x) for x in rng.integers(0, vocabulary + 1, dist.get_world_size() - 1)), vocabulary)
    how = {
        "impl": impl,
        "axis": int(yes()),
        "frozen": frozen,
        "factor": factor,
        "size": int(rng.choice([8, 24, 64])),
        "sequence": yes(),
        "reduced": yes(),
        "tolerance": TOLERANCE * yes(),  # on a CPU nothing is left out
        "stops": stops,
    }
    return leaves, options, how


def gradients_of(function: Any, leaves: dict, how: dict, **options: Any) -> tuple[torch.Tensor, dict]:
    own = {k: x.detach().requires_grad_(k not in how["frozen"]) for k, x in leaves.items()}
    value = function(**own, **options)
    value = value[0] if isinstance(value, tuple) else value
    wanted = [k for k in own if k not in how["frozen"]]
    found = torch.autograd.grad(how["factor"] * value, [own[k] for k in wanted])
    return value.detach(), dict(zip(wanted, found, strict=True))


def split(leaves: dict, how: dict) -> tuple[dict, dict]:
    """What this process holds, and the options that say so."""
    rows, leaves = held(how["stops"]), dict(leaves)
    c = leaves["c"][rows]
    leaves["c"] = c.T.contiguous() if how["axis"] else c
    if "bias" in leaves:
        leaves["bias"] = leaves["bias"][rows]
    if how["sequence"]:
        parts = [*leaves["e"].chunk(dist.get_world_size()), *[leaves["e"][:0]] * dist.get_world_size()]
        leaves["e"] = parts[dist.get_rank()]
    shard = VocabParallel(None, rows.start, rows.stop, how["reduced"], None, 0 if how["sequence"] else None)  # type: ignore[arg-type]
    return leaves, {
        "vocab_parallel": shard,
        "vocab_axis": how["axis"],
        "impl": how["impl"],
        "precision": "highest",
        "gradient_tolerance": how["tolerance"],
    }


def whole(name: str, x: torch.Tensor, how: dict) -> torch.Tensor:
    """The gradient that the processes have together."""
    if name == "token_weight" or (name == "e" and not how["sequence"] and how["reduced"]):
        assert_same_everywhere(x, name)
        return x
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x.T if name == "c" and how["axis"] else x)
    if name != "e" or how["sequence"]:
        return torch.cat(parts)
    return sum(part.float() for part in parts).to(x.dtype)  # type: ignore[attr-defined]


def check_drawn(impl: str, draws: int) -> None:
    for seed in range(draws):
        leaves, options, how = drawn(np.random.default_rng(seed), impl)
        what = f"draw {seed}, {how}, {leaves.keys()}, {options}"
        with in_chunks(how["size"]) as ran:
            own, more = split(leaves, how)
            value, found = gradients_of(linear_cross_entropy, own, how, **options, **more)
        formed = {"e", "c", *leaves} - how["frozen"] - {"token_weight"}
        assert not formed or not own["c"].numel() or "torch_chunk_gradients" in ran, f"{what}: {ran}"
        assert not {"torch_shard_statistics", "torch_shard_gradients"}.intersection(ran), f"{what}: {ran}"
        rounded = gradients_of(linear_cross_entropy, leaves, how, impl="reference", **options)
        wide = {
            k: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for k, x in options.items()
        }
        want = gradients_of(truth.losses, {k: x.double() for k, x in leaves.items()}, how, **wide)
        assert_close(value, want[0], rounded[0], f"loss, {what}", 2)
        assert_same_everywhere(value, what)
        for k, x in found.items():
            assert x.dtype == own[k].dtype, f"{k}, {what}"
            assert x.stride() == own[k].stride() or not x.numel(), f"{k}, {what}"
            # Of so few tokens dz is rounded to e's type even where c is float32. Besides dz and the result, de is
            # rounded before its factor, or dc to integers. Without the sum over the processes each rounds its de.
            dtype = own["e"].dtype if k in ("c", "bias") else x.dtype
            roundings = 4 if k != "e" or how["sequence"] or how["reduced"] else 6
            assert_close(whole(k, x, how).to(dtype), want[1][k], rounded[1][k].to(dtype), f"d{k}, {what}", roundings)


def check_plain() -> None:
    check_drawn("chunked", 8)


def check_kernels() -> None:
    check_drawn("cce", 2)


def leaves_of(dtype: torch.dtype = torch.bfloat16, tokens: int = 50, **more: Any) -> tuple:
    """e, this process' rows of c, targets, and what says so, for SHARDS."""
    e, c, targets, _ = example(tokens, dtype=dtype)
    rows = held(SHARDS)
    shard = VocabParallel(None, rows.start, rows.stop, **more)
    return e.requires_grad_(), c[rows].clone().requires_grad_(), targets, {"impl": "chunked", "vocab_parallel": shard}


def assert_equal(found: Any, want: Any, what: str) -> None:
    for x, y in zip(found, want, strict=True):
        assert x.dtype == y.dtype, what
        assert torch.equal(x, y), what


def check_autograd() -> None:
    """Every way through autograd gives the same bits."""
    exact: dict = {}
    for dtype, tolerance in (*((x, 0.0) for x in DTYPES[:2]), (torch.bfloat16, TOLERANCE)):
        e, c, targets, options = leaves_of(dtype)
        options["gradient_tolerance"] = tolerance
        call = functools.partial(linear_cross_entropy, targets=targets, **options)
        with in_chunks(16) as ran:
            want, doubled = (torch.autograd.grad(k * call(e, c), (e, c)) for k in (1, 2))
            assert_equal(want, exact.setdefault(dtype, want), "a tolerance")
            loss = call(e, c)
            ran.clear()
            with Collectives() as backward:
                assert_equal(torch.autograd.grad(loss, (e, c), retain_graph=True), want, "a kept graph")
                assert_equal(torch.autograd.grad(loss, c, retain_graph=True), want[1:], "dc alone")
                assert_equal(torch.autograd.grad(2 * loss, (e, c), retain_graph=True), doubled, "twice the loss")
                assert_equal(torch.autograd.grad(loss, (e, c)), want, "the last backward pass")
            assert not backward.seen, backward.seen
            assert set(ran) <= {"torch_chunk_finish"}, ran
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                torch.autograd.grad(loss, (e, c))
            created = torch.autograd.grad(call(e, c), (e, c), create_graph=True)
            assert_equal([x.detach() for x in created], want, "create_graph")
            with pytest.raises(NotImplementedError, match="first derivatives in reverse mode"):
                torch.autograd.grad(created[0].sum(), e)
            with torch.autograd.graph.save_on_cpu():
                loss = call(e, c)
            assert_equal(torch.autograd.grad(loss, (e, c)), want, "save_on_cpu")
            for kept in (False, True):
                loss = call(e, c, reduction="sum")
                formed = [x.data_ptr() for x in loss.grad_fn.saved_tensors[2:7] if x is not None and x.numel()]
                found = torch.autograd.grad(loss, (e, c), retain_graph=kept)
                assert all((x.data_ptr() in formed) != kept for x in found if x.numel()), "the memory of the gradients"
            left = [weakref.ref(x) for x in call(e, c, reduction="sum").grad_fn.saved_tensors[2:-2] if x is not None]
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
            assert_equal(found, want, f"{sequence=}")


def check_tolerance() -> None:
    """Each process leaves which blocks of its columns are multiplied: on a CPU all. Nothing more is exchanged."""
    for impl in ("chunked", "cce"):
        e, c, targets, options = leaves_of()
        options |= {"impl": impl, "reduction": "sum"}
        exact = functools.partial(linear_cross_entropy, targets=targets, **options)
        call = functools.partial(exact, gradient_tolerance=TOLERANCE)
        with in_chunks(16):
            with Collectives() as exchanged:
                want = torch.autograd.grad(exact(e, c), (e, c))
            with Collectives() as more:
                value = call(e, c)
                blocks = [x for x in value.grad_fn.saved_tensors if x is not None and x.dtype == torch.bool]
                blocks = [x for x in blocks if x.dim() == 2]
                assert_equal(torch.autograd.grad(value, (e, c)), want, impl)
            assert more.seen == exchanged.seen, more.seen
            assert len(blocks) == bool(len(c)), blocks
            assert all(x.all() for x in blocks), blocks
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        for x, y in zip(torch.autograd.grad(compiled(e, c), (e, c)), want, strict=True):
            torch.testing.assert_close(x, y, rtol=2**-6, atol=2**-6)


@contextlib.contextmanager
def left_out(tolerance: float) -> Iterator[None]:
    """The two halves of a chunk leave out blocks, as they do by kernels of a GPU: those of a CPU leave out nothing."""
    import jax.numpy as jnp

    from cce_kernels import in_forward
    from cce_kernels.block_sparse import DC_BLOCK, DE_BLOCK, MULTIPLE, PART, Tokens, kept_blocks

    numbers, gradients = in_forward.numbers_of, in_forward.gradients_of

    def stores(plan: Any) -> bool:
        return plan.in_forward.forward is not None

    def thresholds(masses: Any, scores: Any, most: Any) -> Any:
        scores = jnp.repeat(scores, masses.shape[1] // scores.shape[1], axis=1)
        order = jnp.argsort(scores, axis=0)
        masses, scores = (jnp.take_along_axis(x, order, 0) for x in (masses, scores))
        may = (jnp.cumsum(masses, 0) <= most) & jnp.isfinite(scores)
        return jnp.where(most < jnp.inf, jnp.where(may, scores, -1).max(0), jnp.inf)

    def numbers_of(chunk: Any, plan: Any) -> tuple:
        own, columns = numbers(chunk, plan)
        (n, padded), vocabulary, targets = columns.values.shape, plan.call.vocabulary, chunk.inputs.targets
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
        mock.patch.object(in_forward, "numbers_of", numbers_of),
        mock.patch.object(in_forward, "gradients_of", gradients_of),
    ):
        yield


def check_the_bound() -> None:
    """Each process keeps to the bound over its columns, so it holds over all.

    Where c is the identity, de is dz; where e is, dc is dz. Two of the processes have no column.
    """
    tolerance, tokens = 0.25, 60
    for name, impl, vocabulary, first in (("e", "chunked", 256, 130), ("c", "cce", 1040, 520)):
        draw, rows = torch.Generator().manual_seed(0), held((first, first, first, vocabulary))
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
            saved = [x for x in loss.grad_fn.saved_tensors if x is not None and x.dtype == torch.bool and x.dim() == 2]
            de, dc = torch.autograd.grad(loss, leaves)
        dz, own, column = de.double(), exact, targets
        if name == "c":
            dz, own, column = dc.double().T, exact[:, rows], targets - rows.start
            assert len(saved) == bool(dz.numel())
            assert all(x.any() and not x.all() for x in saved), "of the last chunk, for the backward pass"
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
    call, again = functools.partial(linear_cross_entropy, e, c, targets, **options), "torch_shard_gradients"
    with in_chunks(16) as ran:
        want = torch.autograd.grad(call(), (e, c))
        formed = 4 * ["torch_chunk_statistics", "torch_chunk_gradients"] + ["torch_chunk_finish"]
        formed = formed if len(c) else []
        assert ran == formed, ran
        ran.clear()
        loss = checkpoint(lambda e: linear_cross_entropy(e, c, targets, **options), e, use_reentrant=False)
        first = ["torch_shard_statistics"] if len(c) else []
        assert ran == first, ran
        assert_equal(torch.autograd.grad(loss, (e, c)), want, "checkpoint")
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
    """Of the tokens, 16 at a time; the third process has no column. No array has an element for each logit."""
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
    part = [*e.detach().chunk(4), e[:0].detach()][dist.get_rank()].requires_grad_()
    with in_chunks(16), Collectives() as seen:
        linear_cross_entropy(part, c, targets, vocab_parallel=shard, impl="chunked").backward()
    gathered, scattered = "all_gather_into_tensor (13, 24) bfloat16", "reduce_scatter_tensor (4, 13, 24) float32"
    assert seen.seen == [gathered, *numbers, scattered], seen.seen


def check_rows_that_nobody_told() -> None:
    """With vocabulary given, no process knows how many rows the others hold: all still take the same chunks."""
    e, c, targets, _ = example(dtype=torch.float32)
    want = torch.autograd.grad(linear_cross_entropy(e.requires_grad_(), c, targets, impl="reference"), e)[0]
    for stops in ((1, 2, 3, 203), SHARDS):
        rows = held(stops)
        shard = VocabParallel(None, rows.start, rows.stop, vocabulary=203)
        assert shard.largest == 51
        assert dataclasses.replace(shard, reduce_e_grad=False).largest == 51
        with in_chunks(16):
            loss = linear_cross_entropy(e, c[rows].requires_grad_(), targets, impl="chunked", vocab_parallel=shard)
            torch.testing.assert_close(torch.autograd.grad(loss, e)[0], want, rtol=1e-4, atol=1e-6)
        assert VocabParallel(None, rows.start, rows.stop).largest == max(b - a for a, b in pairwise((0, *stops)))
    assert VocabParallel(None, 0, 3, vocabulary=203, largest=100).largest == 100


def check_planned() -> None:
    """Within this budget a shard of one column would take all tokens at once, and one of 200 columns takes chunks."""
    rows = held((1, 2, 3, 203))
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
            assert_equal(found, again, "twice")
            assert ("torch_chunk_gradients" in ran) == (len(own["c"]) > 0)
            how = {"frozen": set(frozen), "factor": 3.0}
            leaves = {"e": e, "c": c}
            more = {"targets": targets, "softcap": softcap}
            rounded = gradients_of(linear_cross_entropy, leaves, how, impl="reference", **more)[1]
            want = gradients_of(truth.losses, {k: x.double() for k, x in leaves.items()}, how, **more)[1]
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


def test_drawn_calls():
    in_processes(4, check_plain, check_kernels)


def test_what_is_asked_of_one_process():
    in_processes(
        4,
        check_autograd,
        check_weights_in_float16,
        check_tolerance,
        check_the_bound,
        check_which_way,
        check_exchanged,
        check_rows_that_nobody_told,
        check_planned,
    )

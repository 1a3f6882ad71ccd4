"""The vocabulary split over processes, where the forward pass forms the gradients: held to float64 of all columns."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cce_kernels.plan import Chunks, choose
from cce_kernels.plan.chunks import sums_in_16_bits
from cce_torch import VocabParallel, bridge, linear_cross_entropy
from tests import truth
from tests.call_torch import array
from tests.test_torch_distributed import assert_same_everywhere, in_processes
from tests.tolerance import assert_rounded

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")

DTYPES = torch.float32, torch.bfloat16, torch.float16
SHARDS = 40, 111, 111, 203  # where each of four processes ends: the third holds no column


@contextlib.contextmanager
def in_chunks(size: int) -> Iterator[list[str]]:
    """Calls form their gradients in the forward pass, in chunks of so many tokens. Yields the programs that run."""
    ran, run = [], bridge.run

    def chunks_of(count: Any, last: int | None) -> Chunks:
        tokens, of_sum = count.call.tokens, sums_in_16_bits(count.call)
        whole = -(-tokens // size) - of_sum
        return Chunks(whole, size if whole else 0, size if of_sum else 0, 256)

    def recorded(program: Any, *arguments: Any, **options: Any) -> Any:
        ran.append(program.__wrapped__.__name__)
        return run(program, *arguments, **options)

    with (
        mock.patch.object(choose, "fastest_chunks", chunks_of),
        mock.patch.object(choose, "_may_form_in_forward", return_value=True),
        mock.patch.object(choose, "_is_fastest_in_forward", return_value=True),
        mock.patch.object(bridge, "run", recorded),
    ):
        forget()
        yield ran
    forget()


def forget() -> None:
    from cce_torch import chunk_programs

    choose.plan_of.cache_clear()
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
    e, c, targets, draw = example(tokens, width, vocabulary, dtype, int(rng.integers(99)),
                                  float(rng.choice([0.0, 0.4, 0.9, 1.0])), dtype != torch.float32 and yes())  # fmt: skip
    leaves = {"e": e, "c": c}
    if yes():
        leaves["bias"] = torch.randn(vocabulary, generator=draw).to(c.dtype)
    if yes():
        leaves["token_weight"] = torch.rand(tokens, generator=draw)
    options = {"targets": targets, "reduction": ["mean", "sum"][yes()], "shift": tokens // 7 * yes(),
               "softcap": 9.0 if yes() else None, "logit_scale": 0.7 if yes() else None,
               "label_smoothing": 0.1 * yes(), "z_loss": 1e-3 * yes()}  # fmt: skip
    if yes():
        options["class_weight"] = torch.rand(vocabulary, generator=draw) + 0.5
    if options["reduction"] == "mean" and yes():
        options["num_items"] = 37.0
    frozen = [set(), set(), {"e"}, {"c"}, {"e", "bias"}, {"c", "bias"}][rng.integers(6)]
    factor = float(rng.choice([1.0, 0.3, -7.0, 0.0, 1.0 if dtype == torch.float16 else 2.0**16]))
    stops = (*sorted(int(x) for x in rng.integers(0, vocabulary + 1, dist.get_world_size() - 1)), vocabulary)
    how = {"impl": impl, "axis": int(yes()), "frozen": frozen, "factor": factor, "size": int(rng.choice([8, 24, 64])),
           "sequence": yes(), "reduced": yes(), "stops": stops}  # fmt: skip
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
    return leaves, {"vocab_parallel": shard, "vocab_axis": how["axis"], "impl": how["impl"], "precision": "highest"}


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
    check_drawn("chunked", 14)


def check_kernels() -> None:
    check_drawn("cce", 2)


def test_drawn_calls():
    in_processes(4, check_plain, check_kernels)

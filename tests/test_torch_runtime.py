"""cce_torch among other things that run in the process: tensors, threads, the settings of JAX and of PyTorch."""

import contextlib
import ctypes
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor

import cce_torch
from cce_kernels.device import Gpu
from cce_torch import functional, linear_cross_entropy
from cce_torch.call import Call
from cce_torch.on_jax import bridge, compat, jax_devices, kinds, programs, settings, tensors
from tests.call_torch import assert_near, formed_in_forward, in_chunks, small_blocks
from tests.test_functions import CALLS


def example(tokens=24, width=16, vocabulary=70, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    e = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    c = torch.randn(vocabulary, width, generator=generator).to(dtype).requires_grad_()
    t = torch.randint(0, vocabulary, (tokens,), generator=generator)
    t[::5] = -100
    return e, c, t


def gradients(loss, *leaves):
    return torch.autograd.grad(loss, leaves)


class Named(torch.Tensor):
    """A subclass that only has a name: its memory is its own."""


def without(x: torch.Tensor, count: int | None = None) -> torch.Tensor:
    """x, a view or not, so many bytes of whose storage have been freed, or all."""
    storage = x.untyped_storage()
    storage.resize_(0 if count is None else storage.nbytes() - count)
    return x


@pytest.mark.parametrize(
    "x",
    [
        torch.rand(3, 4),
        torch.rand(3, 4).T,
        torch.rand(9)[3:],
        torch.rand(3, 1).expand(3, 4),
        torch.rand(4)[::2],
        torch.empty(0),
        without(torch.rand(3, 4)[:0]),
        torch.tensor(1.0),
        torch.nn.Parameter(torch.rand(3)),
        torch.rand(3).as_subclass(Named),
        FakeTensorMode().from_tensor(torch.rand(3)),
        torch.sparse_coo_tensor([[0]], [1.0], (3,)),
        None,
    ],
)
def test_tensors_that_can_be_read_are_taken(x):
    tensors.check({"e": x})


@pytest.mark.parametrize(
    "x",
    [
        without(torch.rand(3, 4)),
        without(torch.rand(9)[3:]),
        without(torch.rand(3, 4), 1),
        without(torch.rand(9)[::2], 1),
        without(torch.rand(3, 4).T),
        torch.nn.Parameter(without(torch.rand(3))),
        torch.empty(3, device="meta"),
    ],
)
def test_a_tensor_without_its_memory_is_named(x):
    with pytest.raises(TypeError, match=r"^c of shape .* has no memory.*forward of the module that FSDP wraps"):
        tensors.check({"e": torch.rand(2), "bias": None, "c": x})


def head(_, e, c, t):
    made = cce_torch.LinearCrossEntropyHead(c.ds_shape[1], c.ds_shape[0], bias=False)
    made.weight = c
    return made(e, t)


def of_functional(_, e, c, t):
    return functional.linear_cross_entropy(e, c, t)


def of_teacher(_, e, c, t):
    return cce_torch.linear_divergence(e, torch.rand(c.ds_shape), e, c)


OF_CLASSIFIER = [function for name, function in CALLS.items() if name != "divergence"]


@pytest.mark.parametrize("function", [*OF_CLASSIFIER, head, of_functional, of_teacher])
def test_a_weight_that_zero3_has_split_is_named(function):
    e, c, t = example()
    split: Any = torch.nn.Parameter(torch.empty(0))
    split.ds_shape = c.shape  # as DeepSpeed leaves it outside of the forward of its module
    name = {of_functional: "linear_weight", of_teacher: "teacher_c"}.get(function, "c")
    with pytest.raises(TypeError, match=rf"^{name} of shape \(0,\) is a weight .* DeepSpeed's ZeRO 3 has split"):
        function(cce_torch, e, split, t)


def test_subclasses_of_tensors_that_are_understood_and_one_that_is_not():
    def function(x):
        tensors.check({"e": x})
        return x.sum()

    torch.func.vmap(torch.func.grad(function))(torch.rand(2, 3))
    tensors.check({"e": AsyncCollectiveTensor(torch.rand(3))})
    with pytest.raises(TypeError, match=r"^bias is a TwoTensor.*forward of the module that FSDP wraps"):
        tensors.check({"e": torch.rand(2), "bias": TwoTensor(torch.rand(2), torch.rand(2))})


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_weight_that_is_freed_before_the_backward_pass_is_named(reduction):
    """Whether the forward pass forms its gradient or not."""
    e, c, t = example()
    with in_chunks(16):
        loss = linear_cross_entropy(e, c, t, impl="chunked", reduction=reduction).sum()
    without(c.detach())
    with pytest.raises(TypeError, match=r"^c of shape .* has no memory"):
        loss.backward()


@pytest.mark.parametrize("name", ["c", "targets", "class_weight", "token_weight", "num_items"])
@pytest.mark.parametrize("kind", [Named, "collective"])
def test_any_argument_may_be_of_a_subclass_that_is_understood(name, kind):
    wrapped = AsyncCollectiveTensor if kind == "collective" else lambda x: x.as_subclass(Named)
    e, c, t = example()
    given = {
        "c": c.detach(),
        "targets": t,
        "class_weight": torch.rand(70),
        "token_weight": torch.rand(24),
        "num_items": torch.tensor(3.0),
    }
    expected = linear_cross_entropy(e, **given, impl="chunked")
    actual = linear_cross_entropy(e, **given | {name: wrapped(given[name])}, impl="chunked")
    assert torch.equal(torch.Tensor(actual), expected)
    assert_near(gradients(actual, e), gradients(expected, e))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_storages_can_be_resized_after_a_call(dtype):
    e, c, t = example(dtype=dtype)
    leaves = [torch.nn.Parameter(x.detach().clone()) for x in (e, c)]
    loss, lse = linear_cross_entropy(*leaves, t, impl="chunked", return_lse=True)
    results = [loss.detach(), lse.detach(), *gradients(loss, *leaves)]
    for x in (*leaves, t, *results):
        before, storage = x.detach().clone(), x.untyped_storage()
        bytes_of = storage.nbytes()
        storage.resize_(0)
        storage.resize_(bytes_of)
        x.detach().copy_(before)
    again = linear_cross_entropy(*leaves, t, impl="chunked")
    assert torch.equal(again, results[0])
    assert again.detach().resize_(3).shape == (3,)


@pytest.mark.parametrize("ways", [("_loss_program", "_gradients_program"), ("_begin_program", "_finish_program")])
def test_programs_that_were_not_called_of_late_are_freed(ways, monkeypatch):
    """As are those of calls whose gradients the forward pass forms."""
    for name in (*ways, "handover_of"):
        monkeypatch.setattr(programs, name, lru_cache(maxsize=1)(getattr(programs, name).__wrapped__))
    e, c, t = example()
    client, forms = jax.devices("cpu")[0].client, "_begin_program" in ways

    def call(number):
        options: Any = {"logit_scale": 1.5 + number, "reduction": "sum" if forms else "none"}
        linear_cross_entropy(e, c, t, impl="chunked", **options).sum().backward()
        gc.collect()
        return len(client.live_executables()), len(kinds._kinds)

    with formed_in_forward(forms):
        call(0)
        before = call(1)
        assert call(2) == before


@pytest.mark.parametrize(("impl", "sizes"), [("cce", [20, 64, 64, 64, 64, 64]), ("chunked", [20, 64, 48, 64, 64, 64])])
def test_changing_numbers_of_tokens_compile_nothing_more(impl, sizes, monkeypatch):
    """A third size of an octave where kernels compute; for XLA each quarter of an octave has its own."""
    monkeypatch.setattr(kinds, "_kinds", {})
    monkeypatch.setattr(kinds, "SMALLEST", 16)
    monkeypatch.setattr(kinds, "EXACT", 1)
    e, c, t = example(tokens=64)

    def counted(tokens):
        linear_cross_entropy(e[:tokens], c, t[:tokens], impl=impl, reduction="none").sum().backward()
        return programs._loss_program.cache_info().misses + programs._gradients_program.cache_info().misses

    before = [counted(n) for n in (20, 50, 41, 64, 57, 49)]
    (kind,) = kinds._kinds.values()
    assert [kind.sizes(n) for n in (20, 50, 41, 64, 57, 49)] == sizes
    assert len(set(before)) == len(set(sizes))


USERS: dict[str, dict[str, Any]] = {
    "strict": {
        "jax_numpy_dtype_promotion": "strict",
        "jax_numpy_rank_promotion": "raise",
        "jax_debug_infs": True,
        "jax_default_matmul_precision": "bfloat16",
        "jax_transfer_guard": "disallow_explicit",
    },
    "without jit": {"jax_disable_jit": True},
    "debug_nans and 64 bits": {"jax_debug_nans": True, "jax_enable_x64": True},
    "a mesh": {},
}


@pytest.fixture
def users(request):
    """Some of the user's settings of JAX."""
    changed = USERS[request.param]
    before = {name: getattr(jax.config, name) for name in changed}
    with contextlib.nullcontext() if changed else jax.set_mesh(jax.make_mesh((1,), ("x",))):
        for name, value in changed.items():
            jax.config.update(name, value)
        yield request.param
        for name, value in before.items():
            jax.config.update(name, value)
    if "jax_transfer_guard" in changed:
        for direction in ("host_to_device", "device_to_device", "device_to_host"):
            jax.config.update(f"jax_transfer_guard_{direction}", None)


@pytest.mark.parametrize("users", USERS, indirect=True)
def test_the_users_jax_settings_change_nothing_and_stay(users, monkeypatch):
    e, c, t = example()
    monkeypatch.setattr(bridge, "_kept_constant", lru_cache(typed=True)(bridge._kept_constant.__wrapped__))
    weight = torch.rand(24, requires_grad=True)
    options = dict(shift=1, label_smoothing=0.1, z_loss=0.1, token_weight=weight, softcap=3.0, bias=torch.zeros(70))
    options |= {"impl": "chunked"}

    def call(budget):
        """By gradients that the forward pass forms, and from logits that are computed again."""
        losses = [linear_cross_entropy(e, c, t, **options, reduction=r, memory_budget=budget) for r in ("mean", "none")]
        return [y for x in losses for y in (x, *gradients(x.sum(), e, c, weight))]

    index = list(USERS).index(users)  # other budgets, so that the programs are traced here
    with in_chunks(16) as ran:
        with settings.defaults():
            expected = call(2**25 + index)
        before = [state.value for state in settings._STATES]
        assert not settings.are_default()
        for _ in range(2):
            assert all(torch.equal(x, y) for x, y in zip(call(2**26 + index), expected, strict=True))
        assert before == [state.value for state in settings._STATES]
        assert {"torch_begin", "torch_gradients"} < set(ran)
    if "debug_nans" in users:
        t[1] = 70  # outside the vocabulary: the loss is NaN
        assert linear_cross_entropy(e, c, t, impl="chunked", memory_budget=2**26).isnan()
        with pytest.raises(FloatingPointError):
            jax.numpy.log(-1.0 * jax.numpy.ones(3))


def test_settings_are_put_back_after_an_error():
    @settings.defaults()
    def fails():
        assert compat.post_hook.value is None
        raise ZeroDivisionError

    before = [state.get_local() for state in settings._STATES]
    with pytest.raises(ZeroDivisionError):
        fails()
    assert [state.get_local() for state in settings._STATES] == before


NEWER = {"tf32": False, "ieee": True, "none": True}
OLDER = {"highest": True, "high": False, "medium": False}


@pytest.mark.parametrize("place", [torch, torch.backends, torch.backends.cuda.matmul])
def test_pytorchs_settings_for_float32_matmuls_are_followed(place):
    e, c, t = example()
    before = torch.get_float32_matmul_precision()
    each = [(x, x.fp32_precision) for x in (torch.backends, torch.backends.cuda.matmul)]
    try:
        torch.set_float32_matmul_precision("high")  # the newer interface, where it sets something later, overrides it
        for x, _ in each:
            x.fp32_precision = "none"
        for setting, exact in (OLDER if place is torch else NEWER).items():
            if place is torch:
                torch.set_float32_matmul_precision(setting)
            else:
                place.fp32_precision = setting
            linear_cross_entropy(e, c, t, impl="chunked").backward()
            assert kinds.is_exact(None, torch.float32) is exact
            assert not kinds.is_exact(None, torch.bfloat16)
    finally:
        torch.set_float32_matmul_precision(before)
        for x, newer in each:
            x.fp32_precision = newer


def test_a_cuda_graph_is_refused(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True)
    jax_devices.check_can_run(torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"captured in a CUDA graph.*impl='torch_compile'"):
        jax_devices.check_can_run(torch.device("cuda", 0))


@pytest.mark.gpu
def test_a_cuda_graph_is_refused_on_a_gpu():
    e, c, t = (x.cuda() for x in example())
    with pytest.raises(RuntimeError, match="captured in a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        linear_cross_entropy(e, c, t)
    assert linear_cross_entropy(e, c, t).isfinite()


@pytest.mark.gpu
def test_a_pinned_number_of_items_may_be_changed_after_the_call():
    e, c, t = (x.detach().cuda() for x in example())
    expected = linear_cross_entropy(e, c, t, num_items=8.0)
    number = torch.tensor(8.0).pin_memory()
    torch.cuda._sleep(2**30)
    actual = linear_cross_entropy(e, c, t, num_items=number)
    number.fill_(1)
    assert torch.equal(actual, expected)


def test_what_was_lent_and_deleted_is_lent_again(monkeypatch):
    cpu = jax.devices("cpu")[0]
    monkeypatch.setattr(bridge, "gpu", lambda index: cpu)
    monkeypatch.setattr(bridge, "DLPACK_CUDA", bridge.DLPACK_CPU)
    x = torch.arange(12.0)
    key = x.data_ptr(), x.shape, x.dtype, 0
    bridge._at(*key).delete()
    assert np.array_equal(bridge._at(*key), x)
    assert bridge._at(*key) is bridge._at(*key)
    bridge._kept_at.cache_clear()


def test_a_call_is_planned_for_the_gpu_of_its_tensors(monkeypatch):
    """Not for the first GPU, and not for JAX's default: JAX_PLATFORMS=cpu,cuda makes that the CPU."""
    found = {"cuda:0": ("8.0", 108), "cuda:1": ("9.0", 132)}

    def jax_device(device):
        capability, multiprocessors = found[str(device)]
        return SimpleNamespace(platform="gpu", compute_capability=capability, core_count=multiprocessors)

    monkeypatch.setattr(jax_devices, "jax_device", jax_device)
    monkeypatch.setattr(jax_devices, "check_can_run", lambda device: None)
    call = Call(precision="highest", memory_budget=2**28)
    for name, (capability, multiprocessors) in found.items():
        kind = kinds.kind_of(call, torch.Size([4096, 256]), 0, torch.bfloat16, torch.device(name))
        assert kind.static.gpu == Gpu(capability, multiprocessors)


@pytest.mark.parametrize("impl", ["chunked", "torch_compile"])
def test_cotangents_of_any_strides_and_inputs_that_are_not_aligned(impl):
    e, c, t = example(20)
    run = partial(linear_cross_entropy, c=c, targets=t.view(4, 5), return_lse=True, reduction="none", impl=impl)
    shifted = torch.zeros(e.numel() + 1)[1:].view(e.shape).copy_(e.detach()).requires_grad_()
    with small_blocks():
        both, of_shifted = run(e.view(4, 5, -1)), run(shifted.view(4, 5, -1))
        for given in (
            torch.randn(4, 1).expand(4, 5),
            torch.randn(4, 10)[:, ::2],
            torch.randn(5, 4).T,
            torch._neg_view(torch.randn(4, 5)),
        ):
            dense = given.clone(memory_format=torch.contiguous_format).resolve_neg()
            want = torch.autograd.grad(both, (e, c), (dense, dense), retain_graph=True)
            found = torch.autograd.grad(both, (e, c), (given, given), retain_graph=True)
            assert all(map(torch.equal, found, want))
            assert_near(torch.autograd.grad(of_shifted, (shifted, c), (given, given), retain_graph=True), want)


def test_what_describes_a_lent_array_is_there_as_long_as_the_array(monkeypatch):
    """JAX reads it again when the array goes; by then the memory of Python's own objects would hold something else."""
    cpu = jax.devices("cpu")[0]
    monkeypatch.setattr(bridge, "gpu", lambda index: cpu)
    monkeypatch.setattr(bridge, "DLPACK_CUDA", 1)  # as DLPack numbers the CPU
    x = torch.arange(12.0).reshape(3, 4)
    lent = [bridge._lent(x, 0) for _ in range(100)]
    others = [ctypes.create_string_buffer(b"\xff" * (size - 1)) for size in (24, 32, 80) for _ in range(1000)]
    assert all(y.unsafe_buffer_pointer() == x.data_ptr() and np.array_equal(y, x) for y in lent)
    del lent  # while others lie where its descriptions might have been
    del others


def test_what_reaches_a_program_on_a_cpu_is_the_tensors_memory_and_holds_it():
    """The program runs on where Ctrl-C has ended the wait for it, and the tensors may be gone by then."""

    def holders():
        return torch._C._storage_Use_Count(x.untyped_storage()._cdata)

    x, out = torch.ones(64, dtype=torch.bfloat16), torch.empty(64, dtype=torch.bfloat16)
    doubled = jax.jit(lambda out, x: (2 * x,), keep_unused=True)
    reached, before = [], holders()
    (result,) = bridge.run(lambda *arrays: reached.extend(arrays) or doubled(*arrays), [x], [out])
    assert torch.equal(result, 2 * x)
    assert reached[1].unsafe_buffer_pointer() == x.data_ptr()
    assert holders() > before


def test_a_thousand_numbers_of_tokens_compile_few_programs_and_pad_little():
    random = np.random.default_rng(0).integers(1, 8193, 1000)
    chosen = kinds.Sizes(kinds.SPANS_OF_XLA)
    sizes = np.array([chosen(int(n)) for n in random])
    assert (sizes >= random).all()
    assert len(set(sizes.tolist())) <= 20
    assert 1 - random.sum() / sizes.sum() <= 0.15
    assert [chosen(int(n)) for n in random] == sizes.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_no_octave_compiles_a_third_size_of_kernels(seed):
    """200 random lengths. Padding costs kernels memory alone: there may be a third more rows, and few sizes."""
    chosen, sizes = kinds.Sizes(), {}
    lengths = np.random.default_rng(seed).integers(500, 8193, 200).tolist()
    for tokens in lengths:
        assert tokens <= chosen(tokens) < 2 * tokens
        sizes.setdefault((tokens - 1).bit_length(), set()).add(chosen(tokens))
    assert max(map(len, sizes.values())) <= 2
    assert sum(map(len, sizes.values())) <= len(sizes) + 2
    assert sum(map(chosen, lengths)) <= 1.34 * sum(lengths)
    assert [chosen(n) for n in (12000, 9000, 12001, 16384)] == [16384] * 4, "only the first two octaves have two sizes"


def test_threads_that_call_first_at_once_pad_alike(monkeypatch):
    """A backward pass looks up again, by then perhaps in another thread, to which size its forward pass padded."""
    threads, found = 8, jax_devices.jax_device
    all_here = threading.Barrier(threads)
    monkeypatch.setattr(jax_devices, "jax_device", lambda device: (all_here.wait(60), found(device))[1])
    monkeypatch.setattr(kinds, "_kinds", {})
    e, c, _ = example()

    def kind(_):
        return kinds.kind_of(Call(memory_budget=2**28, impl="chunked"), c.shape, 0, e.dtype, e.device)

    with ThreadPoolExecutor(threads) as pool:
        found_kinds = list(pool.map(kind, range(threads)))
    assert len({id(k) for k in found_kinds}) == 1

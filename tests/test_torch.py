"""cce_torch as a citizen of PyTorch: torch.compile, autocast, checkpointing, modules, strides, torch.func, start-up."""

import copy
import ctypes
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import numpy as np
import pytest
import torch

from cce_torch import LinearCrossEntropy, linear_cross_entropy, ops
from cce_torch.call import Call, Given, OfResults, Residuals, Saved, Scheduled
from cce_torch.operators import flat
from tests.call_torch import small_blocks
from tests.tolerance import error

SCHEDULED = Scheduled()
CALL_OF = Call(memory_budget=2**28, impl="chunked")


def example(tokens=24, width=16, vocabulary=70, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    e = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    c = torch.randn(vocabulary, width, generator=generator).to(dtype).requires_grad_()
    t = torch.randint(0, vocabulary, (tokens,), generator=generator)
    t[::5] = -100
    return e, c, t


def gradients(loss, *leaves):
    return torch.autograd.grad(loss, leaves)


def assert_same(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == y.dtype
        assert error(x.detach().float(), y.detach().float()) <= 1e-6


def test_inductor_compiles_one_graph_for_any_batch():
    """And one before, for the first batch. The gradient of a transposed classifier keeps its layout."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def step(e, c, t, weight):
        return linear_cross_entropy(e * 2, c, t, softcap=5.0, shift=1, token_weight=weight, impl="chunked")

    compiled = torch.compile(step, fullgraph=True)
    for tokens in (24, 31, 17):
        e, c, t = example(tokens)
        c = c.detach().T.contiguous().T.requires_grad_()
        weight = torch.rand(tokens, requires_grad=True)
        actual, expected = compiled(e, c, t, weight), step(e, c, t, weight)
        assert_same([actual], [expected])
        found = gradients(actual, e, c, weight)
        assert_same(found, gradients(expected, e, c, weight))
        assert found[1].stride() == c.stride()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize(
    "options",
    [{"shift": 1}, {"shift": 1, "smooths": True}, {"with_mean": True, "with_temperature": True, "ids": 4}],
    ids=["a loss", "smoothed, of a transposed classifier", "log-probabilities"],
)
def test_opcheck(options):
    e, c, t = (x.detach() for x in example())
    call = CALL_OF._replace(reduction="none", **options)
    c = c.T.contiguous().T if call.smooths else c
    inverse, weight = (torch.rand(24) + 0.5, None) if call.with_temperature else (None, torch.rand(24))
    ids = torch.randint(-1, len(c), (24, call.ids), dtype=torch.int32) if call.ids else None
    given, numbers = Given(e, c, None, t, None, weight, None, inverse, ids), Scheduled(0.1 * call.smooths)
    torch.library.opcheck(torch.ops.cce_torch.loss.default, tuple(flat(given, numbers, None, [], call)))
    _, statistics, _, left = ops.loss_of(given, numbers, None, [], call)
    assert left == Residuals()
    cotangents = OfResults(None if weight is None else torch.rand(24), torch.rand_like(statistics))
    wanted = [True, True, False, weight is not None]
    arguments = cotangents, given, numbers, Saved(statistics, Residuals(), []), wanted, call
    torch.library.opcheck(torch.ops.cce_torch.gradients.default, tuple(flat(*arguments)))


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
            assert_same(torch.autograd.grad(of_shifted, (shifted, c), (given, given), retain_graph=True), want)


@pytest.mark.parametrize("impl", ["chunked", "torch_compile"])
def test_a_hessian_is_an_error_that_names_the_reference(impl):
    e, c, t = (x.detach() for x in example(3))
    with small_blocks(), pytest.raises(NotImplementedError, match="impl='reference'"):
        torch.func.hessian(lambda e: linear_cross_entropy(e, c, t, impl=impl))(e)
    assert torch.func.hessian(lambda e: linear_cross_entropy(e, c, t, impl="reference"))(e).any()


def test_what_describes_a_lent_array_is_there_as_long_as_the_array(monkeypatch):
    """JAX reads it again when the array goes; by then the memory of Python's own objects would hold something else."""
    from cce_torch.on_jax import bridge

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
    from cce_torch.on_jax import bridge

    def holders():
        return torch._C._storage_Use_Count(x.untyped_storage()._cdata)

    x, out = torch.ones(64, dtype=torch.bfloat16), torch.empty(64, dtype=torch.bfloat16)
    doubled = jax.jit(lambda out, x: (2 * x,), keep_unused=True)
    reached, before = [], holders()
    (result,) = bridge.run(lambda *arrays: reached.extend(arrays) or doubled(*arrays), [x], [out])
    assert torch.equal(result, 2 * x)
    assert reached[1].unsafe_buffer_pointer() == x.data_ptr()
    assert holders() > before


def test_a_frozen_input_gets_no_gradient_and_costs_none(monkeypatch):
    from cce_torch.on_jax import programs

    asked = []
    original = programs._gradients_program
    monkeypatch.setattr(programs, "_gradients_program", lambda *key: asked.append(key[1]) or original(*key))
    e, c, t = example()

    def loss(e, c):  # a "mean" may form its gradients in the forward pass: tests/test_torch_in_forward.py
        return linear_cross_entropy(e, c, t, reduction="none").sum()

    expected = gradients(loss(e, c), e, c)
    assert_same(gradients(loss(e, c.detach()), e), expected[:1])
    assert_same(gradients(loss(e.detach(), c), c), expected[1:])
    assert [(w.e, w.c, w.bias) for w in asked] == [(True, True, False), (True, False, False), (False, True, False)]


def test_jit_trace_names_what_it_can_record():
    e, c, t = (x.detach() for x in example())
    for impl in ("auto", "cce", "chunked"):
        with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace cannot record.*impl='torch_compile'"):
            torch.jit.trace(lambda e, impl=impl: linear_cross_entropy(e, c, t, impl=impl), (e,))
    for impl in ("torch_compile", "reference"):
        traced = torch.jit.trace(lambda e, impl=impl: linear_cross_entropy(e, c, t, impl=impl), (e,))
        assert_same([traced(2 * e)], [linear_cross_entropy(2 * e, c, t)])


def test_the_module_is_the_function_and_copies_and_pickles():
    e, c, t = example()
    weight = torch.rand(70)
    expected = linear_cross_entropy(e, c, t, class_weight=weight, softcap=3.0, shift=2, label_smoothing=0.1)
    module = LinearCrossEntropy(softcap=3.0, shift=2, class_weight=weight, label_smoothing=0.1)
    for again in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(again(e, c, t), expected)
    assert "softcap=3.0" in repr(module)
    assert list(module.state_dict()) == ["class_weight"]
    with pytest.raises(TypeError, match="sofcap"):
        LinearCrossEntropy(sofcap=3.0)


def test_positional_arguments_are_those_of_cut_cross_entropy():
    e, c, t = example()
    bias, t = torch.randn(70), t.clamp(min=7)
    loss, lse = linear_cross_entropy(e, c, t, bias, 7, 2.0, "sum", 3, True)
    assert lse.shape == (21,)
    named = linear_cross_entropy(e, c, t, bias=bias, ignore_index=7, softcap=2.0, reduction="sum", shift=3)
    assert torch.equal(loss, named)


def test_a_thousand_numbers_of_tokens_compile_few_programs_and_pad_little():
    from cce_torch.on_jax import kinds

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
    from cce_torch.on_jax import kinds

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
    from cce_torch.on_jax import jax_devices, kinds

    threads, found = 8, jax_devices.jax_device
    all_here = threading.Barrier(threads)
    monkeypatch.setattr(jax_devices, "jax_device", lambda device: (all_here.wait(60), found(device))[1])
    monkeypatch.setattr(kinds, "_kinds", {})
    e, c, _ = example()

    def kind(_):
        return kinds.kind_of(CALL_OF, c.shape, 0, e.dtype, e.device)

    with ThreadPoolExecutor(threads) as pool:
        kinds = list(pool.map(kind, range(threads)))
    assert len({id(k) for k in kinds}) == 1


def run(code: str, *arguments: str) -> str:
    """What a process prints that runs the code."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("XLA_")}
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=own, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


FRESH = """
import sys, torch
before = set(sys.modules)
import cce_torch
new = {x.split(".")[0] for x in set(sys.modules) - before}
assert new == {"cce_torch", "cce_kernels"}, new
assert "jax" not in sys.modules, "JAX"
assert "torch._dynamo" not in sys.modules, "the compiler"
import cce_torch.in_torch.rule
assert "torch._inductor.compile_fx" not in sys.modules, "the compiler for in_torch"
torch.manual_seed(0)
e, c, t = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4), torch.arange(5)
cce_torch.linear_cross_entropy(e, c, t, impl="reference").backward()
assert "jax" not in sys.modules, "JAX for impl='reference'"
step = torch.compile(lambda: cce_torch.linear_cross_entropy(e, c, t, num_items=7), backend="aot_eager", fullgraph=True)
step().backward()
assert "jax" in sys.modules
"""


def test_import_is_fast_and_starts_no_backend_and_a_number_of_items_compiles_before_jax_is_imported():
    run(FRESH)


CALL = """
e, c = torch.ones(8, 16, dtype=torch.bfloat16).requires_grad_(), torch.ones(32, 16, dtype=torch.bfloat16)
cce_torch.linear_cross_entropy(e, c, torch.arange(8), impl={!r})
"""
DELETED = """
e, c, t = torch.ones(5, 4), torch.ones(9, 4), torch.arange(5)
for _ in range(3):
    cce_torch.linear_cross_entropy(e, c, t, shift=1, label_smoothing=0.1, impl="chunked")
    for x in jax.live_arrays():
        x.delete()
"""
ASKED = {  # what JAX is asked, by what ran before
    "jax_devices.start()": {"preallocate": False},
    "os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'true'; jax_devices.start()": None,
    "jax.config.update('jax_pjrt_client_create_options', {'preallocate': True}); jax_devices.start()": {
        "preallocate": True
    },
    "jax.devices(); jax_devices.start()": None,
    CALL.format("auto"): {"preallocate": False},
    CALL.format("chunked"): {"preallocate": False},
    DELETED: {"preallocate": False},  # the user may delete all arrays of JAX
}
EACH = """
import os, sys, jax, torch, cce_torch
from cce_torch.on_jax import bridge, jax_devices
def in_child(code):
    child = os.fork()
    if not child:
        try:
            exec(code)
            print(jax.config.jax_pjrt_client_create_options, flush=True)
        except RuntimeError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
codes = eval(sys.argv[1])
for code in codes:
    in_child(code)
exec(codes[-1])
in_child(codes[-1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_jax_is_asked_to_leave_memory_unless_the_user_said_otherwise_or_it_runs():
    """Also by a first call, before it looks for devices. A call in a process that was forked later says what to do."""
    *found, forked = run(EACH, repr(list(ASKED))).splitlines()
    assert found == [str(x) for x in ASKED.values()]
    for word in ("forked", "spawn", "impl='torch_compile'"):
        assert word in forked


def test_the_users_own_jax_is_as_it_was():
    before = {name: getattr(jax.config, name) for name in ("jax_enable_x64", "jax_default_matmul_precision")}
    e, c, t = example()
    linear_cross_entropy(e, c, t).backward()
    assert {name: getattr(jax.config, name) for name in before} == before
    assert jax.numpy.arange(3).sum() == 3


def test_ops_refuse_nothing_that_the_fakes_allow():
    """Fake and real results agree in shape, type and strides for every combination of wanted gradients."""
    e, c, t = (x.detach() for x in example())
    statistics = ops.loss_of(Given(e, c, None, t), SCHEDULED, None, [], CALL_OF).statistics
    for wanted in [(a, b, False, d) for a in (True, False) for b in (True, False) for d in (True, False)]:
        weight = torch.rand(24)
        given = Given(e, c.T.contiguous().T, None, t, token_weight=weight)
        held = Saved(statistics, Residuals(), [])
        arguments = OfResults(torch.ones(()), None), given, SCHEDULED, held, list(wanted), CALL_OF
        found, fakes = ops.gradients_of(*arguments), ops._fake_gradients(*arguments)
        assert [x is not None for x in found] == [y is not None for y in fakes] == list(wanted)
        for x, y in zip(found, fakes, strict=True):
            if x is not None and y is not None:
                assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())

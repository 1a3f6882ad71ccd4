"""cce_torch on a GPU: every hazard of two runtimes on one device. Run with `pytest -m gpu`.

What went wrong would be a wrong number, so each test compares bits with a run of which nothing is freed and no stream
but one is used.
"""

import os
import subprocess
import sys
import threading

import jax
import pytest
import torch

import cce_torch
from cce_torch.on_jax import bridge, jax_devices

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SLEEP = 2 * 10**8  # cycles: a tenth of a second


def make(seed: int = 0, tokens: int = 1024, width: int = 256, vocabulary: int = 8192, device: str = "cuda"):
    generator = torch.Generator(device).manual_seed(seed)
    e = torch.randn(tokens, width, device=device, generator=generator).bfloat16().requires_grad_()
    c = (torch.randn(vocabulary, width, device=device, generator=generator) / 16).bfloat16().requires_grad_()
    return e, c, torch.randint(vocabulary, (tokens,), device=device, generator=generator)


def step(e, c, t, **options):
    loss = cce_torch.linear_cross_entropy(e, c, t, **options)
    return (loss.detach(), *torch.autograd.grad(loss, (e, c)))


def expected(*arguments, **options):
    result = step(*make(*arguments, **options))
    torch.cuda.synchronize()
    return result


def assert_identical(actual, want):
    torch.cuda.synchronize()
    for x, y in zip(actual, want, strict=True):
        assert torch.equal(x, y.to(x.device))


def run_python(code: str, timeout: int = 200, launcher: tuple[str, ...] = (), **environment: str) -> str:
    ours = {k: v for k, v in os.environ.items() if not k.startswith("XLA_")}
    done = subprocess.run(
        [sys.executable, *launcher, *(("-c", code) if not launcher else ())],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=ours | environment,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_inputs_may_be_freed_and_overwritten_right_after_the_call():
    want = expected()
    for _ in range(5):
        e, c, t = make()
        torch.cuda._sleep(SLEEP)
        results = step(e, c, t)
        shapes = [(x.shape, x.dtype) for x in (e, c, t)]
        del e, c, t
        for shape, dtype in shapes:
            torch.full(shape, 7, dtype=dtype, device="cuda")
        assert_identical(results, want)


def test_outputs_may_be_dropped_while_another_stream_still_reads_them():
    want = expected()
    side = torch.cuda.Stream()
    for _ in range(3):
        loss, de, dc = step(*make())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP)
            copies = loss.clone(), de.clone(), dc.clone()
        for x in (loss, de, dc):
            x.record_stream(side)
        del loss, de, dc
        others = [step(*make(seed)) for seed in (1, 2)]  # JAX and torch both allocate
        assert_identical(copies, want)
        del others


def test_an_interrupted_call_ends_when_its_program_has():
    """What it read and wrote is freed by then, and torch's stream was not told to wait for the program."""
    doubled = jax.jit(lambda out, x: (2 * x,), donate_argnums=0, keep_unused=True)

    def interrupted(*arrays):
        doubled(*arrays)
        raise KeyboardInterrupt

    x, out = torch.arange(1024.0, device="cuda"), torch.empty(1024, device="cuda")
    bridge.run(doubled, [x], [out])  # compiles
    out.zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * SLEEP)
    with pytest.raises(KeyboardInterrupt):
        bridge.run(interrupted, [x], [out])
    assert torch.cuda.current_stream().query()  # the program came after the sleep
    assert torch.equal(out, 2 * x)


def test_results_are_torch_memory_which_record_stream_knows():
    e, c, t = make()
    before = torch.cuda.memory_allocated()
    _, de, dc = step(e, c, t)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before >= de.nbytes + dc.nbytes


def test_on_a_side_stream_whose_work_has_not_been_done_yet():
    want = expected()
    side = torch.cuda.Stream()
    e, c, t = make()
    late = torch.zeros_like(e)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP)
        late.copy_(e.detach())
        results = step(late.requires_grad_(), c, t)
        after = [x.clone() for x in results]
    side.synchronize()
    assert_identical(after, want)


def test_several_threads_at_once_each_on_its_own_stream():
    want = [expected(seed) for seed in range(4)]
    results: dict[int, list] = {}

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                results[seed] = step(*make(seed))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for seed in range(4):
        assert_identical(results[seed], want[seed])


def test_a_step_does_not_wait_for_the_gpu():
    e, c, t = make()
    for _ in range(2):  # XLA records its CUDA graphs in a program's second call. If one has a condition, the host waits
        step(e, c, t)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(10 * SLEEP)
        step(e, c, t)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not torch.cuda.current_stream().query(), "the GPU was not busy"


def test_unaligned_and_sliced_inputs():
    e, c, t = make(tokens=100)
    want = step(e, c, t)
    shifted = torch.zeros(e.numel() + 1, dtype=e.dtype, device="cuda")[1:].view_as(e).copy_(e.detach())
    odd = torch.zeros(101, dtype=torch.int64, device="cuda")[1:].copy_(t)
    assert shifted.data_ptr() % 16
    assert odd.data_ptr() % 16
    assert_identical(step(shifted.requires_grad_(), c, odd), want)
    wide = torch.cat([c.detach(), c.detach()], 1)[:, : c.shape[1]].requires_grad_()
    assert_identical(step(e, wide, t), want)
    turned = c.detach().T.contiguous().T.requires_grad_()
    loss, de, dc = step(e, turned, t)
    assert dc.stride() == turned.stride()
    for x, y in zip((loss, de, dc), want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_by_inductor(mode):
    torch._dynamo.reset()
    e, c, t = make()
    options = {"memory_budget": 2**20}  # nothing is saved, as under torch.compile; all of e is one block of evaluation
    want = step(e, c, t, **options)

    def loss_of(e, c, t):
        return cce_torch.linear_cross_entropy(e * 1, c, t, **options)

    compiled = torch.compile(loss_of, fullgraph=True, mode=mode)
    for _ in range(3):
        loss = compiled(e, c, t)
        results = (loss.detach().clone(), *torch.autograd.grad(loss, (e, c)))
    assert_identical(results, want)


def test_the_users_own_jax_code_on_the_same_gpu():
    import jax
    import jax.numpy as jnp

    want = expected()
    x = jax.random.normal(jax.random.key(0), (2048, 2048))
    total = float((x @ x).sum())
    e, c, t = make()
    for _ in range(5):
        results = step(e, c, t)
        assert float((x @ x).sum()) == total
        assert jnp.arange(3).dtype == jnp.int32
    assert_identical(results, want)


def test_a_graph_may_be_kept_while_its_inputs_storage_is_reused():
    """Saved tensors are saved: a second backward after much else has been allocated is the first."""
    e, c, t = make()
    loss = cce_torch.linear_cross_entropy(e * 1, c, t)
    first = torch.autograd.grad(loss, (e, c), retain_graph=True)
    junk = [torch.full_like(c, float("nan")).detach() for _ in range(8)]
    del junk
    assert_identical(torch.autograd.grad(loss, (e, c)), first)


MEMORY = """
import torch, cce_torch
e = torch.randn(512, 64, device="cuda").requires_grad_()
cce_torch.linear_cross_entropy(e, torch.randn(4096, 64, device="cuda"), torch.arange(512, device="cuda")).backward()
from cce_torch.on_jax import bridge, jax_devices
stats = jax_devices.gpu(0).memory_stats()
print(stats["pool_bytes"] / stats["bytes_limit"])
"""


def test_alone_jax_leaves_the_memory_to_others():
    assert float(run_python(MEMORY)) < 0.02
    assert float(run_python(MEMORY, XLA_PYTHON_CLIENT_PREALLOCATE="true", XLA_PYTHON_CLIENT_MEM_FRACTION=".1")) > 0.9


STARTED = """
import warnings, jax, torch
jax.devices()
import cce_torch
e = torch.randn(512, 64, device="cuda")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    cce_torch.linear_cross_entropy(e, e, torch.arange(512, device="cuda"))
print([str(w.message) for w in caught])
"""


def test_alone_memory_that_jax_had_reserved_before_is_told():
    environment = dict(XLA_PYTHON_CLIENT_PREALLOCATE="true", XLA_PYTHON_CLIENT_MEM_FRACTION=".1")
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in run_python(STARTED, **environment)


NO_MEMORY = """
import torch, cce_torch
e = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16).requires_grad_()
try:
    cce_torch.linear_cross_entropy(e, torch.randn(65536, 1024, device="cuda", dtype=torch.bfloat16),
                                   torch.arange(8192, device="cuda")).backward()
except torch.OutOfMemoryError as error:
    print("raised:", error)
torch.cuda.synchronize()
print(float(torch.ones(3, device="cuda").sum()), "and the process goes on")
"""


def test_no_memory_for_jax_is_an_out_of_memory_error_of_torch():
    said = run_python(NO_MEMORY, XLA_PYTHON_CLIENT_PREALLOCATE="false", XLA_PYTHON_CLIENT_MEM_FRACTION=".0005")
    assert "raised: linear_cross_entropy found no memory for its scratch on cuda:0, even after" in said
    assert "MiB are free" in said
    assert "3.0 and the process goes on" in said


CACHED = """
import torch, cce_torch
e = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16).requires_grad_()
c = torch.randn(65536, 1024, device="cuda", dtype=torch.bfloat16)
t = torch.arange(8192, device="cuda")
for_gradients = torch.empty(2**26, dtype=torch.uint8, device="cuda")  # torch takes the smallest block that fits
free, _ = torch.cuda.mem_get_info()
hoard = torch.empty(free - 600 * 2**20, dtype=torch.uint8, device="cuda")
del hoard, for_gradients
held = torch.cuda.memory_reserved()
# with a softcap and label smoothing nothing is saved in torch's memory, and all of the budget is JAX's
options = {"softcap": 1.0, "label_smoothing": 0.1, "memory_budget": 1200 * 2**20}
cce_torch.linear_cross_entropy(e, c, t, **options).backward()
print(bool(e.grad.isfinite().all()), torch.cuda.memory_reserved() < held / 2)
"""


def test_alone_memory_that_torch_only_keeps_is_given_to_jax():
    assert run_python(CACHED).split() == ["True", "True"]


ARRIVES = """
import sys, torch
free, total = torch.cuda.mem_get_info()
held = torch.empty(free - 2 * 2**30, dtype=torch.uint8, device="cuda")
print(held.nbytes / total, flush=True)
sys.stdin.read()  # until the other end closes it
"""

TRAINS = """
import subprocess, sys, torch, cce_torch
def train(between):
    torch.manual_seed(0)
    gain = torch.ones(1024, device="cuda", dtype=torch.bfloat16).requires_grad_()
    head = (torch.randn(32768, 1024, device="cuda") / 32).bfloat16().requires_grad_()
    optimizer = torch.optim.SGD([gain, head], lr=1.0)
    losses = []
    for i in range(10):
        if i == 5:
            between()
        tokens = 2048 if i < 5 else 3000  # another program, which needs more memory
        x, t = torch.randn(tokens, 1024, device="cuda").bfloat16(), torch.randint(32768, (tokens,), device="cuda")
        loss = cce_torch.linear_cross_entropy(x * gain, head, t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    return [*losses, gain.detach(), head.detach()]
other, share = None, None
def let_the_other_in():
    global other, share
    other = subprocess.Popen([sys.executable, "-c", arrives], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    share = float(other.stdout.readline())
beside = train(let_the_other_in)
assert other.poll() is None, "the other process still holds its memory"
other.communicate()
assert other.returncode == 0
alone = train(lambda: None)
assert len({float(x) for x in alone[:10]}) == 10 and all(x.isfinite().all() for x in alone)
assert all(torch.equal(x, y) for x, y in zip(beside, alone, strict=True))
print(share)
"""


def test_alone_another_process_takes_the_memory_in_the_middle_of_training():
    """Nearly all of it; and less where JAX reserves its 75 %, as it does where the user says so."""
    code = f"arrives = {ARRIVES!r}\n{TRAINS}"
    assert float(run_python(code)) > 0.8
    assert float(run_python(code, XLA_PYTHON_CLIENT_PREALLOCATE="true")) < 0.3


@two_gpus
def test_two_devices_with_the_current_one_elsewhere():
    want = expected()
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        with torch.cuda.device(0 if device == "cuda:1" else 1):
            e, c, t = (x.detach().to(device) for x in make())
            torch.cuda.synchronize(device)
            with torch.cuda.device(device):
                torch.cuda._sleep(SLEEP)
                e = e * 1
            results = step(e.requires_grad_(), c.requires_grad_(), t)
            assert {x.device for x in results} == {torch.device(device)}
        torch.cuda.synchronize(device)
        assert_identical([x.cpu() for x in results], [x.cpu() for x in want])
    assert jax_devices.gpu(0) != jax_devices.gpu(1)


RANK = """
import os, sys, warnings
rank = int(os.environ["LOCAL_RANK"])
if sys.argv[1] == "its own":
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import cce_torch
torch.cuda.set_device(0 if sys.argv[1] == "its own" else rank)
caught = warnings.catch_warnings(record=True).__enter__()
warnings.simplefilter("always")
dist.init_process_group("nccl")
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = torch.nn.Linear(64, 64), torch.nn.Linear(64, 1000, bias=False)
    def forward(self, x, t, items):
        return cce_torch.linear_cross_entropy(self.body(x), self.head.weight, t, num_items=items)
torch.manual_seed(1)
x, t = torch.randn(200, 64), torch.randint(1000, (200,))
t[:50] = -100
model = Model().cuda()
whole = model(x.cuda(), t.cuda(), 150)
want = torch.autograd.grad(whole, list(model.parameters()))
parallel = DistributedDataParallel(model)
half = slice(rank * 100, rank * 100 + 100)
for _ in range(3):
    parallel.zero_grad()
    loss = parallel(x[half].cuda(), t[half].cuda(), 150 / 2)  # DDP takes the mean over ranks
    loss.backward()
for actual, expected in zip((p.grad for p in model.parameters()), want):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
from cce_torch.on_jax import bridge, jax_devices
import jax
assert len(jax.local_devices()) == torch.cuda.device_count() == (1 if sys.argv[1] == "its own" else 2)
told = any("CUDA_VISIBLE_DEVICES=$LOCAL_RANK" in str(w.message) for w in caught)
assert told == (sys.argv[1] == "all"), [str(w.message) for w in caught]
print(f"rank {rank} agrees", flush=True)
dist.destroy_process_group()
"""


@two_gpus
@pytest.mark.parametrize("sees", ["its own", "all"])
def test_ddp_equals_one_gpu_whether_a_rank_sees_its_own_gpu_or_all(tmp_path, sees):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script), sees)
    said = run_python("", launcher=launcher)
    assert "rank 0 agrees" in said
    assert "rank 1 agrees" in said

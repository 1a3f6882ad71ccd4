"""cce_patch in two processes, which talk by gloo: DDP, both kinds of FSDP, tensor parallelism, and PEFT."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import Gemma2Config

from cce_torch.transformers import cce_patch, cce_unpatch
from tests.call_torch import array
from tests.causal_models import batch, small_config, small_model
from tests.causal_models import step as whole_step
from tests.test_torch_distributed import gathered, in_processes
from tests.tolerance import assert_close

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")

ROWS = 4
COUNT = int((batch(ROWS)["labels"][:, 1:] != -100).sum())


def model(saved: bool = False, **changes: Any) -> Any:
    """saved: PEFT trains a copy of the head, and adapters."""
    config = small_config(
        Gemma2Config, vocab_size=98, initializer_range=0.3, final_logit_softcapping=2.0,
        **{"tie_word_embeddings": False, **changes},
    )  # fmt: skip
    made = small_model(config)
    if not saved:
        return made
    torch.manual_seed(4)
    adapters = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False, r=4)
    return peft.get_peft_model(made, adapters).train()


def patched(*args: Any, **kwargs: Any) -> Any:
    return cce_patch(model(*args, **kwargs), impl="torch_compile")


@functools.cache
def expected(**options: Any) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Loss and gradients of the whole batch in one process, unpatched, in float64 and in float32."""
    return [whole_step(model(**options).to(dtype), **batch(ROWS)) for dtype in (torch.float64, torch.float32)]


def assert_as_in_one_process(what: str, wrapped: Any, gradients: Callable, split: bool = True, **options: Any) -> None:
    """split: each process has its part of the batch, and the gradients are means over the processes."""
    processes, rank = dist.get_world_size(), dist.get_rank()
    rows = slice(rank * ROWS // processes, (rank + 1) * ROWS // processes) if split else slice(None)
    inputs = {name: x[rows] for name, x in batch(ROWS).items()}
    output = wrapped(**inputs, num_items_in_batch=COUNT / processes if split else COUNT)
    assert output.logits is None, what
    output.loss.backward()
    (truth, truths), (reference, references) = expected(**options)
    mean = torch.stack(gathered(output.loss.detach())).mean()
    assert_close(array(mean), array(truth), array(reference), f"{what}: loss")
    with gradients(wrapped) as found:
        assert found.keys() == truths.keys(), what
        for name, x in found.items():
            assert_close(array(x), array(truths[name]), array(references[name]), f"{what}: {name}")


@contextmanager
def gradients(wrapped: Any) -> Iterator[dict[str, torch.Tensor]]:
    found = {name.removeprefix("module."): p.grad for name, p in wrapped.named_parameters() if p.requires_grad}
    yield {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}


@contextmanager
def gradients_of_fsdp1(wrapped: Any) -> Iterator[dict[str, torch.Tensor]]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
        named = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in wrapped.named_parameters()}
        yield {name: p.grad for name, p in named.items() if p.requires_grad}


def fsdp1(module: Any, parts: set) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy(parts)
    return FullyShardedDataParallel(
        module, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )


def fsdp2(module: Any, *parts: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in parts:
        fully_shard(part, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def check_data_parallel() -> None:
    layer = type(model().model.layers[0])
    for options in ({}, {"tie_word_embeddings": True}, {"saved": True}):
        what = f"{options}"
        check = functools.partial(assert_as_in_one_process, **options)
        check(f"DDP {what}", DistributedDataParallel(patched(**options)), gradients)
        check(f"FSDP1 {what}", fsdp1(patched(**options), {layer}), gradients_of_fsdp1)
        made = patched(**options)
        check(f"FSDP2 {what}", fsdp2(made, *[x for x in made.modules() if isinstance(x, layer)]), gradients)
        if "tie_word_embeddings" in options:
            continue  # the head cannot be a group of its own
        made = patched(**options)
        inner = made.base_model.model if options else made
        check(f"FSDP2, the head by itself {what}", fsdp2(made, inner.lm_head, *inner.model.layers), gradients)
        made = patched(**options)
        head = made.base_model.model.lm_head.modules_to_save["default"] if options else made.lm_head
        check(f"FSDP1, the head by itself {what}", fsdp1(made, {layer, type(head)}), gradients_of_fsdp1)

    made = model()
    made = fsdp2(made, made.lm_head, *made.model.layers)
    assert_as_in_one_process("FSDP2, patched after", cce_patch(made, impl="torch_compile"), gradients)
    made = model()
    made = cce_patch(fsdp1(made, {layer, type(made.lm_head)}), impl="torch_compile")
    assert_as_in_one_process("FSDP1, patched after", made, gradients_of_fsdp1)
    made = DistributedDataParallel(model())
    assert_as_in_one_process("DDP, patched after", cce_patch(made, impl="torch_compile"), gradients)


def check_unpatched_after_fsdp() -> None:
    made = patched()
    made = fsdp2(made, made.lm_head)
    assert cce_unpatch(made)(**batch()).logits is not None


def check_tensor_parallelism() -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = parallelize_module(patched(), mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    assert_as_in_one_process("columns of the head", made, gradients, split=False)


def test_two_processes():
    in_processes(2, check_data_parallel, check_unpatched_after_fsdp, check_tensor_parallelism)

"""cce_patch in two processes, which talk by gloo: DDP, both kinds of FSDP, tensor parallelism, and PEFT."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import Gemma2Config

from cce_torch import LinearCrossEntropyHead
from cce_torch.transformers import cce_patch, cce_unpatch
from tests import gloo
from tests.call_torch import array
from tests.causal_models import batch, small_config, small_model
from tests.causal_models import step as whole_step
from tests.gloo import fsdp1, in_processes

peft = pytest.importorskip("peft")
pytestmark = gloo.needed

ROWS = 4
COUNT = int((batch(ROWS)["labels"][:, 1:] != -100).sum())


def model(saved: bool = False, **changes: Any) -> Any:
    """saved: PEFT trains a copy of the head, and adapters."""
    config = small_config(
        Gemma2Config,
        vocab_size=98,
        initializer_range=0.3,
        final_logit_softcapping=2.0,
        **{"tie_word_embeddings": False, **changes},
    )
    made = small_model(config)
    if not saved:
        return made
    torch.manual_seed(4)
    adapters = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False, r=4)
    return peft.get_peft_model(made, adapters).train()


def patched(*args: Any, **kwargs: Any) -> Any:
    return cce_patch(model(*args, **kwargs), impl="torch_compile")


@functools.cache
def expected(**options: Any) -> list[dict[str, Any]]:
    """Loss and gradients of the whole batch in one process, unpatched, in float64 and in float32."""
    both = (whole_step(model(**options).to(dtype), **batch(ROWS)) for dtype in (torch.float64, torch.float32))
    return [{name: array(x) for name, x in {"loss": loss, **gradients}.items()} for loss, gradients in both]


def assert_as_in_one_process(what: str, wrapped: Any, split: bool = True, **options: Any) -> None:
    """split: each process has its part of the batch, and the gradients are means over the processes."""
    processes, rank = dist.get_world_size(), dist.get_rank()
    rows = slice(rank * ROWS // processes, (rank + 1) * ROWS // processes) if split else slice(None)
    inputs = {name: x[rows] for name, x in batch(ROWS).items()}
    wrapped.zero_grad()
    output = wrapped(**inputs, num_items_in_batch=COUNT / processes if split else COUNT)
    assert output.logits is None, what
    output.loss.backward()
    gloo.assert_as_one_process(what, output.loss, wrapped, *expected(**options))


def units_of_fsdp1(module: Any, parts: set | None, **options: Any) -> Any:
    """The modules of the given types are units, or, without types, all large modules are."""
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

    large: Any = functools.partial(size_based_auto_wrap_policy, min_num_params=3000)
    return fsdp1(module, auto_wrap_policy=ModuleWrapPolicy(parts) if parts else large, **options)


def fsdp2(module: Any, *parts: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in parts:
        fully_shard(part, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def check_data_parallel() -> None:
    layer = type(model().model.layers[0])
    for options in ({}, {"tie_word_embeddings": True}, {"saved": True}):
        made = [patched(**options) for _ in range(5)]
        inner = [x.base_model.model if "saved" in options else x for x in made]
        ways = {"DDP": DistributedDataParallel(made[0]), "FSDP1": units_of_fsdp1(made[1], {layer})}
        ways["FSDP2"] = fsdp2(made[2], *inner[2].model.layers)
        if "tie_word_embeddings" not in options:  # else the head cannot be a group of its own
            ways["FSDP2, the head by itself"] = fsdp2(made[3], inner[3].lm_head, *inner[3].model.layers)
            head = inner[4].lm_head.modules_to_save["default"] if options else inner[4].lm_head
            ways["FSDP1, the head by itself"] = units_of_fsdp1(made[4], {layer, type(head)})
        for how, wrapped in ways.items():
            assert_as_in_one_process(f"{how}, {options}", wrapped, **options)
        if "saved" not in options:
            assert cce_unpatch(ways["FSDP2"])(**batch()).logits is not None
    plain = [model() for _ in range(3)]
    after = {"FSDP2": fsdp2(plain[0], plain[0].lm_head, *plain[0].model.layers)}
    after["FSDP1"] = units_of_fsdp1(plain[1], {layer, type(plain[1].lm_head)})
    after["DDP"] = DistributedDataParallel(plain[2])
    for how, wrapped in after.items():
        assert_as_in_one_process(f"{how}, patched after", cce_patch(wrapped, impl="torch_compile"))


def check_mixed_precision_of_fsdp1() -> None:
    """The head is a unit of its own: its weights are trained, and those of a flat parameter too."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    rounded = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def losses(made: Any, patched: bool) -> torch.Tensor:
        assert isinstance(made.module.lm_head, FullyShardedDataParallel)
        optimizer, found = torch.optim.SGD(made.parameters(), lr=0.3), []
        for _ in range(4):
            optimizer.zero_grad()
            output = made(**batch(ROWS))
            assert (output.logits is None) == patched
            output.loss.backward()
            optimizer.step()
            found.append(output.loss.detach().float())
        return torch.stack(found)

    parts = {type(model().model.layers[0]), torch.nn.Linear}
    truth = losses(units_of_fsdp1(model(), parts), patched=False)
    reference = losses(units_of_fsdp1(model(), parts, mixed_precision=rounded), patched=False)
    allowed = 2 * (reference - truth).abs() + 2**-8
    for flat in (True, False):
        options = {"use_orig_params": not flat, "mixed_precision": rounded}
        for what, made in {
            "types": units_of_fsdp1(patched(), {*parts, type(patched().lm_head)}, **options),
            "sizes": units_of_fsdp1(patched(), None, **options),
            "patched after": cce_patch(units_of_fsdp1(model(), parts, **options), impl="torch_compile"),
        }.items():
            found = losses(made, patched=True)
            assert ((found - truth).abs() <= allowed).all(), (what, flat, found, reference, truth)
            assert type(cce_unpatch(made).lm_head) is FullyShardedDataParallel
            assert made(**batch()).logits is not None


def check_tensor_parallelism() -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made: Any = parallelize_module(patched(), mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    assert_as_in_one_process("columns of the head", made, split=False)
    made.lm_head.register_forward_hook(lambda *_: None)
    assert_as_in_one_process("and a hook", made, split=False)
    for reduction in ("mean", "none"):
        found = cce_patch(model(), impl="torch_compile", reduction=reduction)
        head = LinearCrossEntropyHead(4, 8, reduction=reduction)
        for style in (ColwiseParallel(), ColwiseParallel(output_layouts=Shard(0))):
            made = parallelize_module(copy.deepcopy(found), mesh, {"lm_head": style})
            with pytest.raises(ValueError, match=r"split .* ColwiseParallel\(output_layouts=Replicate\(\)\)"):
                made(**batch(ROWS))
            made = parallelize_module(nn.Sequential(copy.deepcopy(head)), mesh, {"0": style})
            with pytest.raises(ValueError, match=r"split .* VocabParallelStyle\(\)"):
                made[0](torch.ones(6, 4), torch.arange(6))


def check_tensor_parallelism_of_transformers(folder: str) -> None:
    from transformers.distributed.configuration_utils import DistributedConfig

    def load() -> Any:
        return type(model()).from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2)).train()

    with pytest.raises(ValueError, match=r'cce_patch\("llama"\), before from_pretrained'):
        cce_patch(load())
    cce_patch("gemma2", impl="torch_compile")
    try:
        made = load()
        assert_as_in_one_process("tp_plan", made, split=False)
        cce_patch(made, impl="torch_compile")
        assert_as_in_one_process("tp_plan, and the model patched too", made, split=False)
        cce_unpatch(made)
    finally:
        cce_unpatch("gemma2")
    assert made(**batch()).logits is not None


def test_two_processes(tmp_path):
    model().save_pretrained(tmp_path)
    of_transformers = functools.partial(check_tensor_parallelism_of_transformers, str(tmp_path))
    in_processes(2, check_data_parallel, check_mixed_precision_of_fsdp1, check_tensor_parallelism, of_transformers)

"""What is compared: the size of the model, and the methods, each of which patches a Llama of transformers in place."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple


class Size(NamedTuple):
    vocabulary: int
    width: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    batch: int
    context: int
    warm: int  # steps that are not counted
    steps: int


LLAMA = Size(128256, 2048, 8192, 16, 32, 8, batch=8, context=2048, warm=4, steps=8)  # Llama 3.2 1B
TINY = Size(1024, 64, 128, 2, 4, 2, batch=2, context=32, warm=1, steps=3)


def ours(model: Any, **options: Any) -> None:
    import_module("cce_torch.transformers").cce_patch(model, **options)


def liger(model: Any, *, loss: bool, others: bool, chunk_mem_const: int = 1) -> None:
    """others: its kernels for rotary embeddings, norms and SwiGLU, which work with any loss. chunk_mem_const: of the
    loss, for which its patch has no argument."""
    functional: Any = import_module("liger_kernel.transformers.functional")
    whole = functional.liger_fused_linear_cross_entropy
    functional.liger_fused_linear_cross_entropy = partial(whole, chunk_mem_const=chunk_mem_const)
    patch = import_module("liger_kernel.transformers").apply_liger_kernel_to_llama
    patch(model=model, fused_linear_cross_entropy=loss, rope=others, rms_norm=others, swiglu=others)


def ours_and_liger(model: Any, **options: Any) -> None:
    liger(model, loss=False, others=True)
    ours(model, **options)


def cut_cross_entropy(model: Any, **options: Any) -> None:
    """The release 25.1.1 has no cce_patch. Its loss is called where the cce_patch of its repository calls it."""
    loss = partial(import_module("cut_cross_entropy").linear_cross_entropy, shift=True, **options)

    def forward(self: Any, input_ids: Any, labels: Any) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        return SimpleNamespace(loss=loss(hidden, self.lm_head.weight, labels))

    model.forward = MethodType(forward, model)


METHODS: dict[str, Callable[[Any], None]] = {
    "unpatched": lambda model: None,
    "cce_patch": ours,
    "cce_patch, memory_budget=1.2e9": partial(ours, memory_budget=1.2e9),
    **{
        f"Liger, the loss alone, chunk_mem_const={x}": partial(liger, loss=True, others=False, chunk_mem_const=x)
        for x in (1, 4, 16)
    },
    "Liger, all of its patch, chunk_mem_const=16": partial(liger, loss=True, others=True, chunk_mem_const=16),
    "cce_patch, memory_budget=1.2e9, and Liger's other kernels": partial(ours_and_liger, memory_budget=1.2e9),
    "cut_cross_entropy": cut_cross_entropy,
    "cut_cross_entropy, exact": partial(cut_cross_entropy, filter_eps=None),
}
OURS = tuple(name for name in METHODS if name.startswith("cce_patch"))
ON_CPU = ("unpatched", *(name for name in OURS if "Liger" not in name))

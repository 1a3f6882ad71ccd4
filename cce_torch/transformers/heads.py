"""The head of a patched model: it gives LazyLogits while a loss is wanted, and then computes that loss.

The loss is computed inside the head's own forward, as FSDP gathers a module's weights for that time, and as other hooks
act there too.
"""

import threading
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cce_torch.api import linear_cross_entropy
from cce_torch.head import SPLIT, unfit
from cce_torch.on_jax import tensors
from cce_torch.transformers.classes import Swapped, origin, swap
from cce_torch.transformers.lazy_logits import LazyLogits
from cce_torch.transformers.settings import Settings

# Packages whose forward hooks may change what a head returns: they change where the loss lies, not the loss.
TRUSTED = ("torch", "deepspeed", "cce_torch")


class Recording:
    """One forward of a patched model with labels."""

    def __init__(self, head: nn.Module, settings: Settings) -> None:
        self.head = head  # as the model calls it, with what FSDP or PEFT has wrapped around it
        self.heads = lazy_heads(head, settings)
        self.settings = settings
        self.losses = 0

    def logits(self, h: Tensor, rows: int) -> LazyLogits:
        """The logits of h by a head whose weight has so many rows."""
        autocast = _autocast_of(h)
        return LazyLogits(h, rows, autocast or h.dtype, partial(self.loss, autocast, rows))

    def loss(
        self, autocast: torch.dtype | None, rows: int, logits: LazyLogits, targets: Tensor, **options: Any
    ) -> Tensor:
        """The loss, computed by a call of the head, under the autocast that the model called its head with."""
        self.losses += 1
        request, h = Request(logits, rows, targets, options, self.settings), logits.h
        same = autocast == _autocast_of(h)
        with nullcontext() if same else torch.autocast(h.device.type, autocast, enabled=autocast is not None):
            try:
                # By name: of the arguments without a name, hooks of tensor parallelism keep only the first.
                loss = self.head(h, cce_request=request)
            except Exception as error:
                if request.computed is None or not (_unknown_hooks(self.head) or isinstance(error, AssertionError)):
                    raise  # no hook of a user's, nor DTensor, which cannot split a number
                raise request.changed(self.head) from error
        request.check(loss, self.head)
        return loss


def _autocast_of(h: Tensor) -> torch.dtype | None:
    """The type of autocast on the device of h, or None without autocast."""
    device = h.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class _Recordings(threading.local):
    """The recording of each thread: threads may share a model."""

    def __init__(self) -> None:  # of each thread. An attribute of the class would break the guards of torch.compile
        self.now: Recording | None = None


recordings = _Recordings()


class Request:
    """What a head needs for the loss. FSDP's mixed precision does not look into a Request, and casts nothing in it."""

    computed: Any = None  # the loss, as the head's forward returns it
    version: int  # how often it had been written in place

    def __init__(
        self, logits: LazyLogits, rows: int, targets: Tensor, options: dict[str, Any], settings: Settings
    ) -> None:
        self.logits, self.rows, self.targets, self.options, self.settings = logits, rows, targets, options, settings

    def loss(self, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        logits, settings = self.logits, self.settings
        reduction = self.options["reduction"] if settings.reduction == "mean" else settings.reduction
        scale, softcap = logits.scale_and_softcap
        tensors.refuse_split("the weight of the head", weight)
        if self.rows != weight.shape[0]:
            raise ValueError(
                f"the head has {weight.shape[0]} rows for {self.rows} columns of logits: cce_patch takes a head that "
                "is split over processes only as a DTensor"
            )
        if logits.vocabulary < weight.shape[0]:
            weight = weight[: logits.vocabulary]
            bias = None if bias is None else bias[: logits.vocabulary]
        loss = linear_cross_entropy(
            h,
            weight,
            self.targets.to(h.device),
            bias,
            softcap=softcap,
            logit_scale=scale,
            **{**self.options, "reduction": reduction},
            **settings.of_loss(h),
        )
        self.computed = loss.reshape(logits.tokens) if reduction == "none" else loss
        self.version = _version(self.computed)
        return self.computed

    def check(self, loss: Any, head: nn.Module) -> None:
        """Raise a ValueError if a forward hook on the head changed the loss, which the hook takes for logits."""
        written = self.version != _version(self.computed)
        if loss is self.computed and not written:
            return
        split = getattr(loss, "shape", None) != self.computed.shape
        if split or (_unknown_hooks(head) and (written or not _equal(loss, self.computed))):
            raise self.changed(head)

    def changed(self, head: nn.Module) -> ValueError:
        """The error for a forward hook on the head that failed, or changed the loss."""
        hooks = _unknown_hooks(head)
        if hooks:
            return ValueError(
                f"a forward hook on the head ({', '.join(hooks)}) changed what the head returned, or failed. With "
                "labels the head of a patched model returns the loss, not the logits: remove the hook, or call "
                "cce_unpatch"
            )
        return ValueError(SPLIT)


def _unknown_hooks(head: nn.Module) -> list[str]:
    hooks = [origin(hook) for module in head.modules() for hook in module._forward_hooks.values()]
    return [name for name in hooks if name.partition(".")[0] not in TRUSTED]


def _equal(x: Any, y: Tensor) -> bool:
    """Whether x has y's value: the same memory, as most hooks leave it, or equal numbers, which a GPU waits for."""
    x, y = getattr(x, "_local_tensor", x), getattr(y, "_local_tensor", y)
    if torch.compiler.is_compiling() or not isinstance(x, Tensor) or x.shape != y.shape:
        return False
    return (x.data_ptr() == y.data_ptr() and x.dtype == y.dtype) or torch.equal(x, y.to(x.dtype))


def _version(x: Tensor) -> int:
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


class LazyCall(Swapped, nn.Module):
    """A head whose call gives LazyLogits while a model records."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """LazyLogits while a model records; what wraps the head, and its hooks, run once: when it computes the loss."""
        record = recordings.now
        if record is None or "cce_request" in kwargs or not any(x is self for x in record.heads):
            return super().__call__(*args, **kwargs)
        h = args[0] if args else next(iter(kwargs.values()))
        return record.logits(h, _rows(self))


def _rows(layer: Any) -> int:
    """The rows of a head's weight. out_features may say otherwise: of tied copies of PEFT, of an assigned weight."""
    for name in ("_fsdp_wrapped_module", "token_adapter", "base_layer"):
        layer = layer._modules.get(name, layer)
    shape = tensors.whole_shape(layer.weight)
    return shape[0] if len(shape) == 2 else layer.out_features  # FSDP 1 shows a flat part outside of its forward


class LazyHead(LazyCall):
    """The methods that `classes.swap` puts before those of a patched head's own class."""

    weight: Any
    bias: Any

    def forward(self, *args: Any, cce_request: Request | None = None, **kwargs: Any) -> Any:
        if cce_request is None:
            return super().forward(*args, **kwargs)
        return cce_request.loss(*self.cce_factors(args[0]))

    def cce_factors(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """e, c and bias: the logits of h are e @ c.T + bias."""
        return h, self.weight, self.bias


class LazyTokens(LazyHead):
    """A head of which PEFT trains some rows, by trainable_token_indices."""

    def cce_factors(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        layer: Any = self.token_adapter
        base, active = layer.base_layer, layer.active_adapters
        if _unused(layer) or not active:
            return h, base.weight, base.bias
        layer._check_overlapping_tokens(active)
        return h, layer.get_merged_weights(active), None  # PEFT's own forward leaves out the bias too


class LazyAdapter(LazyHead):
    """A LoRA layer of PEFT as a head.

    Its logits h·Wᵀ + s·dropout(h)·Aᵀ·Bᵀ are [h, s·dropout(h)·Aᵀ] · [W, B]ᵀ. The effective weight W + s·B·A is not
    formed, as 16 bits would round it.
    """

    def cce_factors(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        layer: Any = self
        base = layer.base_layer
        if _unused(layer):
            return h, base.weight, base.bias
        left, right = [h], [base.weight]
        for name in layer.active_adapters:
            if name in layer.lora_A:
                a, b, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
                left.append((a(dropout(h.to(a.weight.dtype))) * layer.scaling[name]).to(h.dtype))
                right.append(b.weight.to(base.weight.dtype))
        return torch.cat(left, -1), torch.cat(right, -1), base.bias


def _unused(layer: Any) -> bool:
    """Whether the logits are those of the layer below an adapter of PEFT: it is disabled, or merged into that layer."""
    if layer.disable_adapters and layer.merged:
        layer.unmerge()  # as PEFT's own forward does
    return layer.disable_adapters or bool(layer.merged)


def lazy_heads(head: Any, settings: Settings) -> list[LazyCall]:
    """Makes LazyHeads of the modules that compute the head's logits: of the head, or of those that it wraps.

    Returns the modules whose call gives LazyLogits. A wrapper of FSDP 1 is one: it counts how often it is called.

    Raises:
      ValueError: the head cannot be patched; the message says why.
    """
    wrapped = _wrapped(head)
    if wrapped:
        found = [found for x in wrapped for found in lazy_heads(x, settings)]
        return [swap(head, LazyCall)] if "_fsdp_wrapped_module" in head._modules else found
    if "token_adapter" in head._modules:
        reason = _unfit_linear(head.token_adapter.base_layer)
        if reason:
            raise ValueError(
                f"cce_patch cannot compute the loss of this head: PEFT trains rows of another layer: {reason}"
            )
        return [swap(head, LazyTokens)]
    adapter = hasattr(head, "base_layer") and hasattr(head, "active_adapters")
    if adapter and not settings.head_adapter:
        raise ValueError(
            f"the head has an adapter of PEFT ({type(head).__name__}), which computes logits of its own: "
            "cce_patch(model, head_adapter=True) computes the loss with it"
        )
    reason = _unfit_adapter(head) if adapter else _unfit_linear(head)
    if reason:
        raise ValueError(f"cce_patch cannot compute the loss of this head: {reason}")
    return [swap(head, LazyAdapter if adapter else LazyHead)]


def _wrapped(head: Any) -> list[nn.Module]:
    """The modules inside a wrapper: of PEFT for modules_to_save, of FSDP 1, of torch.compile, of checkpoints."""
    if hasattr(head, "modules_to_save") and hasattr(head, "original_module"):
        return [head.original_module, *head.modules_to_save.values()]
    for name in ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"):
        if name in head._modules:
            return [head._modules[name]]
    return []


def _unfit_linear(head: Any) -> str | None:
    return None if isinstance(head, LazyHead) else unfit(head)


def _unfit_adapter(layer: Any) -> str | None:
    from peft.tuners.lora.layer import Linear

    reason = _unfit_linear(layer.base_layer)
    if reason:
        return f"its adapter is on another layer: {reason}"
    if type(layer).forward not in (Linear.forward, LazyAdapter.forward):
        return f"its adapter is a {type(layer).__module__}.{type(layer).__name__}, not a LoRA layer"
    if layer.lora_variant or any(dict(layer.lora_bias).values()):
        return "its adapter is a variant of LoRA, such as DoRA, or has a bias"
    return None

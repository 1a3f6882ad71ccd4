"""The forward of a patched model: the model's own, while its head gives LazyLogits."""

import inspect
import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils.generic import ModelOutput

from cce_torch.transformers.heads import Recording, recordings
from cce_torch.transformers.lazy_logits import LazyLogits
from cce_torch.transformers.settings import Settings


def recording(model_type: type) -> Callable:
    """The forward of a class of models, with the loss computed without the logits if there are labels.

    Raises:
      ValueError: the forward takes no labels.
    """
    forward = model_type.forward
    signature = inspect.signature(forward)
    if "labels" not in signature.parameters:
        raise ValueError(f"cce_patch is for models that compute a loss: {model_type.__name__}.forward takes no labels")
    position = list(signature.parameters).index("labels") - 1  # among the arguments after self
    shifts = _calls_loss_function(model_type)

    @wraps(forward)
    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings: Settings | None = getattr(self, "cce_settings", None)  # a wrapper of accelerate outlives the patch
        labels = args[position] if position < len(args) else kwargs.get("labels")
        if settings is None or labels is None or not (self.training or settings.evaluation == "loss"):
            return forward(self, *args, **kwargs)
        head, before = self.get_output_embeddings(), recordings.now
        if before is not None and before.head is head:  # another model, whose forward this one is a part of, records
            return forward(self, *args, **kwargs)
        items = kwargs.get("num_items_in_batch")
        if settings.reduction != "mean":
            kwargs.pop("num_items_in_batch", None)
        elif items is not None:  # the model divides by it; with no items the mean is 0
            tensor = isinstance(items, torch.Tensor)
            kwargs["num_items_in_batch"] = torch.where(items == 0, math.inf, items) if tensor else items or math.inf
        if settings.reduction == "none":
            _refuse_router_loss(self, kwargs)
        record = recordings.now = Recording(head, settings)
        try:
            output = forward(self, *args, **kwargs)
        finally:
            recordings.now = before
        if not record.losses:
            raise ValueError(f"{type(self).__name__} got labels and computed no cross-entropy of its head's logits")
        output = _without_logits(output)
        padded = shifts and self.loss_function is ForCausalLMLoss and kwargs.get("shift_labels") is None
        return _without_padding(output, labels.shape) if settings.reduction == "none" and padded else output

    patched.__signature__ = signature  # type: ignore[attr-defined]  # Trainer reads it
    patched.cce_unpatched = forward  # type: ignore[attr-defined]
    del patched.__wrapped__  # accelerate's unwrap_model would follow it, and so remove the patch
    return patched


def _refuse_router_loss(model: Any, kwargs: dict[str, Any]) -> None:
    asked = kwargs.get("output_router_logits")
    if asked is None:
        asked = getattr(model.config.get_text_config(), "output_router_logits", False)
    if asked:
        raise ValueError(
            f'reduction="none" does not work with output_router_logits=True: {type(model).__name__} adds the loss of '
            "its router to the loss of each token. Give output_router_logits=False, or another reduction"
        )


def _calls_loss_function(model_type: type) -> bool:
    """Whether the class computes its loss by the loss_function that transformers gives it, which shifts the labels."""
    found = [x.__dict__["forward"] for x in model_type.__mro__ if "forward" in x.__dict__]
    forwards = [inspect.unwrap(getattr(x, "cce_unpatched", x)) for x in found]
    return any("loss_function" in forward.__code__.co_names for forward in forwards if hasattr(forward, "__code__"))


def _without_logits(x: Any) -> Any:
    """A model's output with None in place of LazyLogits, also in the outputs that are part of it."""
    if isinstance(x, ModelOutput):
        return type(x)(**{name: _without_logits(y) for name, y in x.items() if not isinstance(y, LazyLogits)})
    if type(x) is tuple:
        return tuple(map(_without_logits, x))
    return None if isinstance(x, LazyLogits) else x


def _without_padding(output: Any, padded: torch.Size) -> Any:
    """An output whose loss, if it has the shape `padded`, loses its last position."""
    loss = output[0]
    if loss.shape != padded:
        return output
    if isinstance(output, tuple):
        return loss[..., :-1], *output[1:]
    return type(output)(**{**output, "loss": loss[..., :-1]})

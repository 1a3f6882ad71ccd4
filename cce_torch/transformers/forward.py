"""The forward of a patched model: the model's own, while its head gives LazyLogits."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils.generic import ModelOutput

from cce_torch.transformers.heads import Recording, lazy_heads
from cce_torch.transformers.lazy_logits import LazyLogits
from cce_torch.transformers.settings import Settings


def recording(model_type: type) -> Callable:
    """The forward of a class of models, with the loss computed without the logits in training, if there are labels.

    Raises:
      ValueError: the forward takes no labels.
    """
    forward = model_type.forward
    signature = inspect.signature(forward)
    if "labels" not in signature.parameters:
        raise ValueError(f"cce_patch is for models that compute a loss: {model_type.__name__}.forward takes no labels")
    place = list(signature.parameters).index("labels") - 1  # among the arguments after self
    shifts = _calls_loss_function(model_type)

    @wraps(forward)
    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings: Settings | None = self.cce_settings
        labels = args[place] if place < len(args) else kwargs.get("labels")
        if settings is None or labels is None or not self.training:
            return forward(self, *args, **kwargs)
        head = self.get_output_embeddings()
        heads = lazy_heads(head, settings)
        if heads[0].cce_recording is not None:  # the class is patched, and the model too
            return forward(self, *args, **kwargs)
        if settings.reduction != "mean":
            kwargs["num_items_in_batch"] = None
        record = Recording(head, settings)
        for x in heads:
            x.cce_recording = record
        try:
            output = forward(self, *args, **kwargs)
        finally:
            for x in heads:
                x.cce_recording = None
        if not record.losses:
            raise ValueError(f"{type(self).__name__} got labels and computed no cross-entropy of its head's logits")
        padded = shifts and self.loss_function is ForCausalLMLoss and kwargs.get("shift_labels") is None
        return _without_logits(output, labels.shape if settings.reduction == "none" and padded else None)

    patched.__signature__ = signature  # type: ignore[attr-defined]  # Trainer reads it
    return patched


def _calls_loss_function(model_type: type) -> bool:
    """Whether the class computes its loss by the loss_function that transformers gives it, which shifts the labels."""
    forwards = [inspect.unwrap(x.__dict__["forward"]) for x in model_type.__mro__ if "forward" in x.__dict__]
    return any("loss_function" in forward.__code__.co_names for forward in forwards if hasattr(forward, "__code__"))


def _without_logits(output: Any, padded: Any) -> Any:
    """A model's output without LazyLogits. A loss of the shape `padded` loses its last position, which is padding."""

    def loss(x: Any) -> Any:
        return x[..., :-1] if padded is not None and isinstance(x, Tensor) and x.shape == padded else x

    if isinstance(output, ModelOutput):
        kept = {name: x for name, x in output.items() if not isinstance(x, LazyLogits)}
        return type(output)(**{name: loss(x) if name == "loss" else x for name, x in kept.items()})
    if isinstance(output, tuple):
        first, *rest = (x for x in output if not isinstance(x, LazyLogits))
        return loss(first), *rest
    return output

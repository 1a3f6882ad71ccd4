"""cce_patch and cce_unpatch: the loss without the logits for a model, or for a class of models."""

import warnings
from contextlib import suppress
from functools import wraps
from typing import Any, Literal

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cce_torch.options import Impl, Reduction
from cce_torch.transformers.classes import Swapped, origin, replaced, swap, swap_back
from cce_torch.transformers.forward import recording
from cce_torch.transformers.heads import LazyCall, lazy_heads
from cce_torch.transformers.settings import Settings

# The attributes named in SET that each patched class itself had before. Attributes that it inherited are not here.
_own: dict[type, dict[str, Any]] = {}
# The packages whose forwards, put in place of a model's, call the model's.
CALLING = ("torch.", "accelerate.", "cce_torch.")
SET = ("__init__", "__setattr__", "forward", "cce_settings")


class _PatchedModel(Swapped):
    """The first base of the class of a patched model."""

    cce_settings: Settings | None = None

    def __init_subclass__(cls) -> None:
        if "cce_made_from" in cls.__dict__:
            own: Any = cls.cce_made_from[0]
            cls.forward = recording(own)  # type: ignore[attr-defined]
            cls.__setattr__ = _warning(own.__setattr__)


def cce_patch(
    model_or_type: Any,
    impl: Impl = "auto",
    reduction: Reduction = "mean",
    *,
    memory_budget: float | Literal["all"] | None = None,
    precision: Literal["highest", "high", "medium"] | None = None,
    gradient_tolerance: float = 0.0,
    head_adapter: bool = False,
    evaluation: Literal["loss", "logits"] = "loss",
) -> Any:
    """Make a causal language model of transformers compute its loss without the logits.

        model = cce_patch(AutoModelForCausalLM.from_pretrained(name))

    A forward with labels returns the same loss and gradients, to rounding, and logits=None, in training and in
    evaluation. With return_dict=False None stands where the logits were. In every other forward nothing changes:
    generate() and calls without labels give the logits as before.

    The model's own forward runs. Its head gives an object that stands for the logits and records what the model does to
    them: a scale, a softcap, a slice. The model's own loss function receives the object, so labels, shift_labels,
    num_items_in_batch, ignore_index and logits_to_keep mean what they mean in the model that is not patched, with one
    exception: if all labels are ignored, or num_items_in_batch is 0, the mean is 0, not NaN. A label outside [0, V)
    that is not ignore_index makes the loss NaN.

    Args:
      model_or_type: a model, which is patched in place, also if PEFT, DDP or FSDP has wrapped it; or a type of models,
        of which all objects are patched: a class such as LlamaForCausalLM, its config, or the model_type that the
        config has, "llama". Patch a model before accelerate's prepare, and a type before from_pretrained with
        tensor parallelism.
      impl: as `cce_torch.linear_cross_entropy` takes it, and so are precision and gradient_tolerance.
      memory_budget: as `cce_torch.linear_cross_entropy` takes it, with another default: on a GPU a thirty-second of its
        memory, which is 2.5 GB of 80, or the loss's own default where that is more. For the least memory give 0.
      reduction: "mean": the model's own. "sum" and "none" replace it, and num_items_in_batch divides nothing then.
        "none" gives the loss of each token, (B, T-1); with output_router_logits=True it is an error.
      head_adapter: compute the loss with the LoRA adapter that PEFT put on the head. It is an option since it costs a
        copy of the head's weight and, in the backward pass, a gradient of that size. Without it such a head is an
        error.
      evaluation: "loss": a forward in evaluation mode with labels has a loss and no logits, as in training. "logits":
        it has both, as the model that is not patched. Trainer's compute_metrics and predict() need the logits.

    Returns:
      The model that was given, or the class.

    Raises:
      ValueError: the model cannot be patched; the message says why. For a type this error comes at the first
        forward of a model with labels. At such a forward: a hook on the head or a style of tensor parallelism changed
        the loss, which the head returns there.
      TypeError: model_or_type is no model and no type of models. At a forward with labels: the model does something
        with its logits that cannot be done without them; the message names the operation. Or DeepSpeed's ZeRO 3 has not
        gathered the head's weight.
    """
    settings = Settings(reduction, impl, memory_budget, precision, gradient_tolerance, head_adapter, evaluation)
    if isinstance(model_or_type, (str, type, PretrainedConfig)):
        return _patch_type(_class(model_or_type), settings)
    model: Any = _model(model_or_type)
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"cce_patch needs one head: {type(model).__name__}.get_output_embeddings() is None")
    if getattr(model, "tp_size", None) not in (None, 1) and type(head.weight).__name__ != "DTensor":
        raise ValueError(
            "cce_patch does not know how this version of transformers splits the head by tensor parallelism: it needs "
            "a weight that is a DTensor"
        )
    lazy_heads(head, settings)
    swap(model, _PatchedModel)
    model.cce_settings = settings
    return model_or_type


def cce_unpatch(model_or_type: Any) -> Any:
    """Undo `cce_patch` of the same model or type, and return it.

    Raises:
      ValueError: it is not patched.
    """
    if isinstance(model_or_type, (str, type, PretrainedConfig)):
        return _unpatch_type(_class(model_or_type))
    model: Any = _model(model_or_type)
    if "cce_settings" not in model.__dict__:
        raise ValueError(f"this {type(model).__name__} is not patched")
    del model.cce_settings
    swap_back(model)
    for module in model.get_output_embeddings().modules():
        if isinstance(module, LazyCall):
            swap_back(module)
    return model_or_type


def _patch_type(model_type: Any, settings: Settings) -> type:
    if model_type not in _own:
        forward, init = recording(model_type), _making_lazy_heads(model_type.__init__)
        _own[model_type] = {name: model_type.__dict__[name] for name in SET if name in model_type.__dict__}
        model_type.__setattr__ = _warning(model_type.__setattr__)
        model_type.forward, model_type.__init__ = forward, init
    model_type.cce_settings = settings
    return model_type


def _unpatch_type(model_type: type) -> type:
    if model_type not in _own:
        raise ValueError(f"{model_type.__name__} is not patched")
    own = _own.pop(model_type)
    for name in SET:
        delattr(model_type, name)
    for name, x in own.items():
        setattr(model_type, name, x)
    return model_type


def _making_lazy_heads(init: Any) -> Any:
    """An __init__ that makes the head lazy too: a training step would do so, but not under torch.compile."""

    @wraps(init)
    def patched(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        head = self.get_output_embeddings()
        if head is not None:
            with suppress(ValueError):  # a training step raises it
                lazy_heads(head, self.cce_settings)

    return patched


def _warning(own: Any) -> Any:
    """A model's __setattr__ that warns of a new forward, unless that is known to call the one that it replaces."""

    @wraps(own)
    def patched(self: Any, name: str, value: Any) -> None:
        own(self, name, value)
        if name == "forward" and self.cce_settings is not None and not origin(value).startswith(CALLING):
            advice = "the loss is computed without the logits only where the new forward calls the one that it replaced"
            warnings.warn(f"cce_patch may have no effect: {replaced(self, advice)}", stacklevel=2)

    return patched


def _class(name: str | type | PretrainedConfig) -> type:
    """The class of language models that transformers has for a model_type or a config; or the given class."""
    from transformers.models.auto import modeling_auto as auto

    names: Any = {**auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    name = name.model_type if isinstance(name, PretrainedConfig) else name
    if isinstance(name, str):
        if name not in names:
            raise ValueError(
                f"{name!r} is no model_type for which transformers has a language model, such as 'llama': give the "
                "model_type of its config, or the class"
            )
        import transformers

        return getattr(transformers, names[name])
    if not issubclass(name, PreTrainedModel):
        raise TypeError(f"cce_patch takes models and classes of transformers, got the class {name.__name__}")
    return name


def _model(model: Any) -> PreTrainedModel:
    """The model of transformers inside what PEFT, DDP, FSDP 1 and torch.compile wrap around it."""
    found: Any = model
    while not isinstance(found, PreTrainedModel) and isinstance(found, nn.Module):
        base: Any = getattr(found, "get_base_model", None)  # of PEFT
        inside: Any = found._modules
        if base is not None:
            found = base()
        else:
            found = next((inside[x] for x in ("module", "_fsdp_wrapped_module", "_orig_mod") if x in inside), None)
    if not isinstance(found, PreTrainedModel):
        raise TypeError(
            "cce_patch takes a model of transformers, its class, or a model_type such as 'llama', got a "
            f"{type(model).__name__}"
        )
    return found

"""cce_patch and cce_unpatch: the loss without the logits for a model, or for a class of models."""

from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from cce_kernels import contract
from cce_torch.api import Impl, Reduction
from cce_torch.transformers.classes import Swapped, swap, swap_back
from cce_torch.transformers.forward import recording
from cce_torch.transformers.heads import LazyHead, lazy_heads
from cce_torch.transformers.settings import Settings

# The forward that a patched class had, or None where it inherits one.
_own_forwards: dict[type, Any] = {}


class _PatchedModel(Swapped):
    """The first base of the class of a patched model."""

    cce_settings: Settings | None = None

    def __init_subclass__(cls) -> None:
        if "cce_made_from" in cls.__dict__:
            cls.forward = recording(cls.cce_made_from[0])  # type: ignore[attr-defined]


def cce_patch(
    model_or_type: Any,
    *,
    reduction: Reduction = "mean",
    impl: Impl = "auto",
    memory_budget: float | Literal["all"] = contract.MEMORY_BUDGET,
    precision: Literal["highest", "high", "medium"] | None = None,
    head_adapter: bool = False,
) -> Any:
    """Make a causal language model of transformers compute its training loss without the logits.

        model = cce_patch(AutoModelForCausalLM.from_pretrained(name))

    In training mode a forward with labels returns the same loss and gradients, to rounding, and logits=None: the output
    has no logits then. In every other forward nothing changes: evaluation, generate() and calls without labels give the
    logits as before.

    The model's own forward runs. Its head gives an object that stands for the logits and records what the model does to
    them: a scale, a softcap, a slice. The model's own loss function receives the object, so labels, shift_labels,
    num_items_in_batch, ignore_index and logits_to_keep mean what they mean in the model that is not patched, with one
    exception: if all labels are ignored the mean is 0, not NaN.

    Args:
      model_or_type: a model, which is patched in place, also if PEFT, DDP or FSDP has wrapped it; or a type of models,
        of which all objects are patched: a class such as LlamaForCausalLM, or its model_type in transformers, "llama".
        Patch a model before accelerate's prepare. Patch a model itself, and not its type, for torch.compile.
      reduction: "mean": the model's own. "sum" and "none" replace it, and num_items_in_batch divides nothing then.
        "none" gives the loss of each token, (B, T-1).
      impl, memory_budget, precision: as `cce_torch.linear_cross_entropy` takes them.
      head_adapter: compute the loss with the LoRA adapter that PEFT put on the head. It is an option since it costs a
        copy of the head's weight and, in the backward pass, a gradient of that size. Without it such a head is an error.

    Returns:
      What was given; for a name the class.

    Raises:
      ValueError: it cannot be patched; says why. Of a type this is found at the first training step of a model.
      TypeError: it is no model and no type of models. At a training step: the model does something with its logits that
        cannot be done without them; names the operation.
    """
    settings = Settings(reduction, impl, memory_budget, precision, head_adapter)
    if isinstance(model_or_type, (str, type)):
        return _patch_type(_class(model_or_type), settings)
    model = _model(model_or_type)
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"cce_patch needs one head: {type(model).__name__}.get_output_embeddings() is None")
    if getattr(model, "tp_size", None) not in (None, 1) and type(head.weight).__name__ != "DTensor":
        raise ValueError(
            "cce_patch does not know how this version of transformers splits the head by tensor parallelism: it needs "
            "a weight that is a DTensor"
        )
    lazy_heads(head, settings)
    if not isinstance(model, _PatchedModel):
        swap(model, _PatchedModel)
    model.cce_settings = settings
    return model_or_type


def cce_unpatch(model_or_type: Any) -> Any:
    """Undo `cce_patch` of the same model or type, and return it.

    Raises:
      ValueError: it is not patched.
    """
    if isinstance(model_or_type, (str, type)):
        return _unpatch_type(_class(model_or_type))
    model: Any = _model(model_or_type)
    if "cce_settings" not in model.__dict__:
        raise ValueError(f"this {type(model).__name__} is not patched")
    del model.cce_settings
    swap_back(model)
    for module in model.get_output_embeddings().modules():
        if isinstance(module, LazyHead):
            swap_back(module)
    return model_or_type


def _patch_type(model_type: type, settings: Settings) -> type:
    if model_type not in _own_forwards:
        patched = recording(model_type)
        _own_forwards[model_type] = model_type.__dict__.get("forward")
        model_type.forward = patched
    model_type.cce_settings = settings
    return model_type


def _unpatch_type(model_type: type) -> type:
    if model_type not in _own_forwards:
        raise ValueError(f"{model_type.__name__} is not patched")
    forward = _own_forwards.pop(model_type)
    if forward is None:
        del model_type.forward
    else:
        model_type.forward = forward
    del model_type.cce_settings
    return model_type


def _class(name: str | type) -> type:
    """The class of causal language models that transformers has for a model_type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    if isinstance(name, str):
        if name not in names:
            raise ValueError(
                f"{name!r} is no model_type for which transformers has a causal language model, such as 'llama': give "
                "the model_type of its config, or the class"
            )
        import transformers

        return getattr(transformers, names[name])
    if not issubclass(name, PreTrainedModel):
        raise TypeError(f"cce_patch takes models and classes of transformers, got the class {name.__name__}")
    return name


def _model(model: Any) -> PreTrainedModel:
    """The model of transformers inside what PEFT, DDP, FSDP 1 and torch.compile wrap around it."""
    found: Any = model
    while isinstance(found, nn.Module) and not isinstance(found, PreTrainedModel):
        modules = found._modules
        if hasattr(found, "get_base_model"):
            found = found.get_base_model()
        else:
            found = next((modules[x] for x in ("module", "_fsdp_wrapped_module", "_orig_mod") if x in modules), None)
    if not isinstance(found, PreTrainedModel):
        raise TypeError(
            "cce_patch takes a model of transformers, its class, or a model_type such as 'llama', got a "
            f"{type(model).__name__}"
        )
    return found

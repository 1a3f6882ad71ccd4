"""The head of a language model as a module that also computes the loss: the place where a sharded weight is whole."""

from collections.abc import Callable
from typing import Any, Generic, Literal, cast, overload

import torch
from torch import Tensor

from cce_torch.api import LinearCrossEntropy, Result


class LinearCrossEntropyHead(torch.nn.Linear, Generic[Result]):
    """The `torch.nn.Linear` of a language model's head, which computes the loss without the logits if it gets targets.

        head(h)             the logits, as torch.nn.Linear gives them
        head(h, targets)    linear_cross_entropy(h, head.weight, targets, head.bias)

    FSDP gathers a module's weights for the module's forward, and frees them after it. DDP and tensor parallelism act
    there too. So the loss is right under all of them if this forward computes it; elsewhere it rarely is.

    Its parameters are those of torch.nn.Linear, `weight` (V, D) and `bias` (V,), so checkpoints fit. The options are
    those of `LinearCrossEntropy`, except vocab_axis. class_weight is no buffer here: state_dict() has the keys of
    torch.nn.Linear, and to_empty() keeps the weights of the classes. It moves to the device of h at the first call.

    The mean is that of the tokens that this process has. DDP and FSDP then take the mean over the processes, which is
    the mean over all tokens only if all processes have equally many. Otherwise give
    num_items = (the number of targets of all processes that are not ignored) / (the number of processes).
    """

    @overload
    def __init__(
        self: "LinearCrossEntropyHead[Tensor]",
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        return_lse: Literal[False] = False,
        **options: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: "LinearCrossEntropyHead[tuple[Tensor, Tensor]]",
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        return_lse: Literal[True],
        **options: Any,
    ) -> None: ...
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if "vocab_axis" in options:
            raise TypeError("vocab_axis is no option here: the weight is (V, D), as torch.nn.Linear has it")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.loss = LinearCrossEntropy(**options)
        weight = self.loss.class_weight
        del self.loss.class_weight  # the buffer
        self.loss.class_weight = None if weight is None else weight.detach()

    @overload
    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, *, return_lse: Literal[False] = False, **options: Any
    ) -> "LinearCrossEntropyHead[Tensor]": ...
    @overload
    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, *, return_lse: Literal[True], **options: Any
    ) -> "LinearCrossEntropyHead[tuple[Tensor, Tensor]]": ...
    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, **options: Any) -> Any:
        """A head that has the parameters of `linear` itself. So weights that are tied to an embedding stay tied.

        Raises:
          TypeError: `linear` is no layer, such as a weight alone. Or its logits are not h @ weight.T + bias with
            parameters of its own: it has an adapter or hooks, is quantised or parametrized, or has another forward.
        """
        if not isinstance(linear, torch.nn.Module):
            raise TypeError(
                f"from_linear takes a torch.nn.Linear, got a {type(linear).__name__}: pass the layer that has the "
                "weight, or call linear_cross_entropy(h, weight, targets, bias) with a weight alone"
            )
        own = type(linear).forward is LinearCrossEntropyHead.forward
        reason = (None if own else unfit(linear)) or _changed(linear)
        if reason:
            raise TypeError(
                "LinearCrossEntropyHead.from_linear cannot compute the loss of this "
                f"{type(linear).__module__}.{type(linear).__qualname__}: {reason}. It takes a torch.nn.Linear whose "
                "logits are h @ weight.T + bias: merge an adapter into the weight, dequantise, or remove a "
                "parametrization or hook first"
            )
        with_bias, make = linear.bias is not None, cast(Any, cls)
        head = make(linear.in_features, linear.out_features, with_bias, torch.device("meta"), **options)
        head.weight, head.bias = linear.weight, linear.bias
        return head.train(linear.training)

    @overload
    def __call__(self, h: Tensor) -> Tensor: ...
    @overload
    def __call__(
        self,
        h: Tensor,
        targets: Tensor,
        *,
        token_weight: Tensor | None = None,
        num_items: float | Tensor | None = None,
        accumulate_into: Tensor | Callable[[], Tensor] | None = None,
    ) -> Result: ...
    @overload
    def __call__(
        self,
        h: Tensor,
        targets: Tensor | None,
        *,
        token_weight: Tensor | None = None,
        num_items: float | Tensor | None = None,
        accumulate_into: Tensor | Callable[[], Tensor] | None = None,
    ) -> Tensor | Result: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `forward`.

        targets are passed by name: of the arguments without a name, hooks of tensor parallelism keep only the first.
        num_items and accumulate_into are hidden from hooks, as FSDP2's mixed precision would cast a copy to 16 bits.
        """
        if len(args) == 2:
            args, kwargs = args[:1], {"targets": args[1], **kwargs}
        for name in HIDDEN:
            if isinstance(kwargs.get(name), Tensor):
                kwargs[name] = _Hidden(kwargs[name])
        if kwargs.get("targets") is None or type(self.weight).__name__ != "DTensor":
            return super().__call__(*args, **kwargs)
        try:
            found = super().__call__(*args, **kwargs)
        except AssertionError as error:  # of DTensor: the loss has no axis that could be split
            raise ValueError(SPLIT) from error
        targets, shift = kwargs["targets"], int(self.loss.options["shift"])
        whole = (targets[..., shift:] if shift else targets).shape if self.loss.options["reduction"] == "none" else ()
        if (found[0] if isinstance(found, tuple) else found).shape != whole:
            raise ValueError(SPLIT)
        return found

    def forward(  # type: ignore[override]
        self,
        h: Tensor,
        targets: Tensor | None = None,
        *,
        token_weight: Tensor | None = None,
        num_items: float | Tensor | None = None,
        accumulate_into: Tensor | Callable[[], Tensor] | None = None,
    ) -> Any:
        """The logits of h, (..., V), or with targets the loss, as `linear_cross_entropy` returns it.

        h: (..., D); targets: integers (...); token_weight: of the shape of targets; num_items: a number or a tensor of
        one element; accumulate_into: a buffer of the weight's shape, or a function that returns it.

        Raises:
          TypeError: num_items is a 16-bit float. FSDP's mixed precision casts the float tensors among the arguments
            of the modules that it wraps, and would make 12345 items 12352. A Python number, and a tensor of integers,
            stay what they are.
          ValueError: another style of tensor parallelism than VocabParallelStyle split the loss.
        """
        if targets is None:
            if token_weight is not None or num_items is not None or accumulate_into is not None:
                raise TypeError("token_weight, num_items and accumulate_into belong to the loss: give targets too")
            return super().forward(h)
        num_items, accumulate_into = _visible(num_items), _visible(accumulate_into)
        if isinstance(num_items, Tensor) and num_items.is_floating_point() and num_items.itemsize < 4:
            dtype = str(num_items.dtype).removeprefix("torch.")
            raise TypeError(
                f"num_items is a {dtype}, which does not hold every whole number: FSDP's mixed precision casts every "
                "float tensor among a module's arguments. Pass a Python number or a tensor of integers"
            )
        self._move_class_weight(h.device)
        of_call: Any = {"token_weight": token_weight, "num_items": num_items, "accumulate_into": accumulate_into}
        return self.loss(h, self.weight, targets, self.bias, **of_call)

    def _move_class_weight(self, device: torch.device) -> None:
        weight = self.loss.class_weight
        if weight is None or weight.device == device or device.type == "meta":
            return
        if weight.is_meta:
            raise ValueError(
                f"class_weight of shape {tuple(weight.shape)} was made on the device meta and has no values: make it "
                "outside of torch.device('meta')"
            )
        self.loss.class_weight = weight.to(device)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:  # type: ignore[override]
        """Takes class_weight from a checkpoint that has it: it was a buffer once."""
        weight, key = self.loss.class_weight, f"{prefix}loss.class_weight"
        if weight is not None and key in state_dict:
            saved = state_dict.pop(key)
            self.loss.class_weight = saved.detach().to(saved.device if weight.is_meta else weight.device, copy=True)
        super()._load_from_state_dict(state_dict, prefix, *others)


SPLIT = (
    "a style of tensor parallelism split what this head returned, which is the loss, not the logits: give the head of "
    "a patched model ColwiseParallel(output_layouts=Replicate()), and a LinearCrossEntropyHead VocabParallelStyle()"
)


def unfit(layer: Any) -> str | None:
    """Why a layer is no torch.nn.Linear by its class, or None if it is one."""
    if not isinstance(layer, torch.nn.Linear):
        return f"it is a {type(layer).__name__}, not a torch.nn.Linear"
    if type(layer).forward is not torch.nn.Linear.forward:
        return f"it is a {type(layer).__name__}, whose forward is not that of torch.nn.Linear"
    return None


def _changed(layer: torch.nn.Linear) -> str | None:
    """Why a head with the parameters of this Linear would compute other logits, or None if it would not."""
    for name in ("weight", "bias"):
        if getattr(layer, name) is not layer._parameters.get(name):
            return f"its {name} is no parameter of its own, but computed from others"
    if "forward" in layer.__dict__:
        return "its forward was replaced on the object itself"
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "it has forward hooks, which the head would not call"
    return None


HIDDEN = "num_items", "accumulate_into"


class _Hidden:
    """A tensor, hidden from code that looks for tensors among the arguments of a call."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def _visible(x: Any) -> Any:
    return x.value if isinstance(x, _Hidden) else x

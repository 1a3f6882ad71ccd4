"""Changes the class of a module. Unlike a closure, the new class survives copies, pickles, FSDP and PEFT."""

from functools import cache
from types import MethodType
from typing import Any

from torch import nn


class Swapped:
    """The first base of every class that `swapped` makes."""

    cce_made_from: tuple[type[nn.Module], type["Swapped"]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles and copies by the module's own class, as pickle finds a class by its name."""
        reduced: Any = super().__reduce_ex__(protocol)
        if type(self) is not swapped(*self.cce_made_from):  # FSDP 2 has made another class of it
            return reduced
        return _new, self.cce_made_from, *reduced[2:]


@cache
def swapped(own: type[nn.Module], first: type[Swapped]) -> Any:
    """A class with the methods of `first` before those of `own`, and own's name, which save_pretrained writes."""
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(own.__name__, (first, own), {**names, "cce_made_from": (own, first)})


def swap(module: Any, first: type[Swapped]) -> Any:
    """Puts the methods of `first` before those of the module's class, if they are not there, and returns the module.

    Raises:
      ValueError: the forward of this very module was replaced, so that a forward of its class would not be called.
    """
    if isinstance(module, first):
        return module
    hooked = "_old_forward" in module.__dict__  # by accelerate's hooks, such as those of device_map
    if "forward" in module.__dict__ and not hooked:
        raise ValueError(replaced(module, "call cce_patch first, as before accelerate's prepare"))
    module.__class__ = swapped(type(module), first)
    if hooked:
        module._old_forward = MethodType(type(module).forward, module)
    return module


def swap_back(module: Any) -> None:
    """Undoes `swap`, except where what came later needs the methods of `first`.

    That is a class that FSDP 2 has made of it, or a forward on the object itself, which calls the one of `first`.
    """
    made = type(module).__dict__.get("cce_made_from")
    hooked = "_old_forward" in module.__dict__
    if made is None or ("forward" in module.__dict__ and not hooked):
        return
    module.__class__ = made[0]
    if hooked:
        module._old_forward = MethodType(made[0].forward, module)


def origin(function: Any) -> str:
    """The module and the name of a function's own code, whatever functools.wraps has written over its name."""
    function = getattr(function, "func", function)  # of functools.partial
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__code__"):
        return f"{type(function).__module__}.{type(function).__name__}"
    return f"{function.__globals__['__name__']}.{function.__code__.co_name}"


def replaced(module: Any, advice: str) -> str:
    """What to say of a module whose forward was replaced on the object itself. The advice is that for most cases."""
    by = origin(module.forward)
    if by.startswith("trl."):
        advice = (
            "TRL's trainers compute the loss by a forward of their own and never ask cce_patch for it. Call "
            "cce_torch.trl.patch() instead of cce_patch; docs/hugging-face.md says more"
        )
    elif by.startswith("transformers."):
        advice = (
            'for tensor parallelism of transformers, patch the type of the model, as in cce_patch("llama"), before '
            "from_pretrained makes the model"
        )
    return f"the forward of this {type(module).__name__} was replaced on the object itself, by {by}: {advice}"


def _new(own: type[nn.Module], first: type[Swapped]) -> Any:
    return own.__new__(swapped(own, first))

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


def swap(module: Any, first: type[Swapped]) -> None:
    """Puts the methods of `first` before those of the module's class.

    Raises:
      ValueError: the forward of this very module was replaced, so that a forward of its class would not be called.
    """
    hooked = "_old_forward" in module.__dict__  # by accelerate's hooks, such as those of device_map
    if "forward" in module.__dict__ and not hooked:
        raise ValueError(
            f"the forward of this {type(module).__name__} was replaced on the object itself, as accelerate's prepare "
            "does: call cce_patch first"
        )
    module.__class__ = swapped(type(module), first)
    if hooked:
        module._old_forward = MethodType(type(module).forward, module)


def swap_back(module: Any) -> None:
    """Undoes `swap`. A class that FSDP 2 has made since then stays, with the methods of `first`."""
    made = type(module).__dict__.get("cce_made_from")
    if made is None:
        return
    module.__class__ = made[0]
    if "_old_forward" in module.__dict__:
        module._old_forward = MethodType(made[0].forward, module)


def _new(own: type[nn.Module], first: type[Swapped]) -> Any:
    return own.__new__(swapped(own, first))

"""What the benchmark of several devices compares, the same for both frameworks.

tokens       each device has N/g tokens and all of c; dc is summed over the devices
vocabulary   each device has all tokens and V/g rows of c; de is summed over the devices in float32
fsdp         each device has N/g tokens and stores V/g rows of c, which are gathered for each pass; dc is scattered

The bare time of a layout is that of the three matmuls of a device's share and of the layout's large collectives, each
timed by itself: nothing that computes this gradient can leave one out, but it may run some at the same time.
"""

from typing import Any

MATMULS = ("z", "de", "dc")
LAYOUTS = ("tokens", "vocabulary", "fsdp")
BUDGETS: dict[str, dict[str, Any]] = {"default": {}, "all": {"memory_budget": "all"}}  # by the names of methods


def collectives(layout: str, gpus: int) -> tuple[str, ...]:
    if gpus == 1:
        return ()
    return {
        "tokens": ("all-reduce of dc",),
        "vocabulary": ("all-reduce of de in float32",),
        "fsdp": ("all-gather of c", "all-gather of c", "reduce-scatter of dc"),
    }[layout]

"""What is decided about a call before it runs: `plan_of` gives a frozen Plan, which both passes only read."""

from cce_kernels.plan.choose import forms_gradients_in_forward, needs_reference, plan_of
from cce_kernels.plan.plan import Chunks, Plan

__all__ = ["Chunks", "Plan", "forms_gradients_in_forward", "needs_reference", "plan_of"]

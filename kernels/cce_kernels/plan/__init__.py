"""What is decided about a call before it runs: `plan_of` gives a frozen Plan, which both passes only read."""

from cce_kernels.plan.choose import plan_of
from cce_kernels.plan.explanation import Explanation, explained, logged
from cce_kernels.plan.plan import Plan, ScheduleName

__all__ = ["Explanation", "Plan", "ScheduleName", "explained", "logged", "plan_of"]

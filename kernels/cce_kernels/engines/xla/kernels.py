"""What the xla engine launches (engine.Launched)."""

from cce_kernels.engines.xla.products import products
from cce_kernels.engines.xla.statistics import form_dz, sums
from cce_kernels.engines.xla.summed import sum_dc

__all__ = ["form_dz", "products", "sum_dc", "sums"]

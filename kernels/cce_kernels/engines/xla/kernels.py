"""What the xla engine launches (engine.Launched)."""

from cce_kernels.engines.xla.products import products
from cce_kernels.engines.xla.saved import dz_in_place, form_dz_of_saved
from cce_kernels.engines.xla.statistics import form_dz, sums
from cce_kernels.engines.xla.summed import sum_dc

__all__ = ["dz_in_place", "form_dz", "form_dz_of_saved", "products", "sum_dc", "sums"]

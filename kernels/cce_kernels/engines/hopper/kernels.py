"""What the hopper engine launches (engine.Launched)."""

from cce_kernels.engines.hopper.dz import form_dz
from cce_kernels.engines.hopper.products import de_of_saved, products
from cce_kernels.engines.hopper.statistics import sums
from cce_kernels.engines.hopper.summed import sum_dc
from cce_kernels.engines.hopper.whole import logits_and_maxima, whole_logits

__all__ = ["de_of_saved", "form_dz", "logits_and_maxima", "products", "sum_dc", "sums", "whole_logits"]

"""What the triton engine launches (engine.Launched)."""

from cce_kernels.engines.triton.divergence import divergence_pass, whole_logits
from cce_kernels.engines.triton.dz import form_dz
from cce_kernels.engines.triton.products import products
from cce_kernels.engines.triton.restored import restored
from cce_kernels.engines.triton.saved import dz_in_place, form_dz_of_saved, mass_and_moment, saved_targets
from cce_kernels.engines.triton.statistics import recomputed, saved_again, sums
from cce_kernels.engines.triton.summed import sum_dc
from cce_kernels.engines.triton.target import target
from cce_kernels.engines.triton.thresholds import thresholds

__all__ = ["divergence_pass", "dz_in_place", "form_dz", "form_dz_of_saved", "mass_and_moment", "products"]
__all__ += ["recomputed", "restored", "saved_again", "saved_targets", "sum_dc", "sums", "target", "thresholds"]
__all__ += ["whole_logits"]

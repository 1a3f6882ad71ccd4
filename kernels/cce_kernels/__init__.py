"""Linear cross-entropy: kernels in Pallas, lowered through Triton and Mosaic GPU, and the same sums in plain XLA.

This package knows arrays, tiles and windows of the vocabulary; it knows neither autodiff nor losses, and imports
neither `cce_jax` nor `cce_torch`. Everything that names Pallas, Triton or Mosaic lives here.
"""

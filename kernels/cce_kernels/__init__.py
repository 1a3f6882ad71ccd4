"""Linear cross-entropy kernels: Pallas, lowered through Triton.

This package knows arrays, tiles and groups of the vocabulary; it knows neither autodiff nor losses, and imports
neither `cce_jax` nor `cce_torch`. Everything that names Pallas or Triton lives here.
"""

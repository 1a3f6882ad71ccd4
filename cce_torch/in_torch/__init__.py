"""The core in PyTorch alone, without JAX."""

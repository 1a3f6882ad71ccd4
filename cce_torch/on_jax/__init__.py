"""JAX programs on tensors of PyTorch."""

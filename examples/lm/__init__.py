"""The parts of train_lm.py and compare_losses.py: a small language model, in JAX and in PyTorch, and its training."""

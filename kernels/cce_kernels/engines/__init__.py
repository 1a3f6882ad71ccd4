"""Who computes: a folder an engine, with its kernels, its tiles and what it serves. plan/choose.py chooses."""

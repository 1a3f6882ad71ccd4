"""The engines. Each has a folder with its kernels, its tiles and the calls that it serves. plan/choose.py chooses."""

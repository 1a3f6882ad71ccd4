"""How large dz is made in float16, the same in JAX and PyTorch. Imports no framework."""

FLOAT16_LARGEST = 2.0**14  # float16 dz is scaled until its largest element is this; 28 powers of 2 below it remain

"""How float16 keeps what is too small or too large for it, the same in JAX and PyTorch. Imports no framework."""

FLOAT16_LARGEST = 2.0**14  # float16 dz is scaled until its largest element is this; 28 powers of 2 below it remain
SMALLEST_ROW = 2.0**-100  # the largest number of a row of de, or of all dz, counts as at least this: no unit is 0
OF_EXPONENT = 0x7F800000  # the bits of a float32's exponent; they alone are a power of two

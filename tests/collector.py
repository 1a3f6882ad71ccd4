"""Python's garbage collector, on machines without a GPU."""

import gc


def keep_what_is_there() -> None:
    """The collector no longer looks at what imports made, and looks at new objects less often than at each 700.

    By default it takes a tenth of the time in which JAX traces and compiles programs. Where tests share a GPU it stays
    as it is, so that arrays which nothing needs are freed soon.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)

"""How many bytes a call may hold where the user does not say. Imports no framework."""

MEMORY_BUDGET = 640 * 2**20  # bytes; the default of memory_budget is this or more


def default_budget(tokens: int, width: int, itemsize: int) -> int:
    """The bytes that a call may hold if memory_budget is None. itemsize: the bytes of an element of e.

    The default is MEMORY_BUDGET, or for each token a row of e, its sum for de and 1280 logits in e's type if that is
    more. With many tokens MEMORY_BUDGET would leave only small chunks, each of which reads and writes the whole dc; and
    where logits are computed again, only small windows, each of which reads and writes the whole sum for de.
    """
    return max(MEMORY_BUDGET, tokens * ((max(itemsize, 4) + itemsize) * width + itemsize * 1280))

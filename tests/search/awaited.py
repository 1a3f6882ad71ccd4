"""Drawn calls of tests/test_search.py (seed 1) that are known to fail, until what makes them fail is mended.

What they wait for:
  - log-probabilities and entropies lose digits where the logits have a common offset, or are large, or the temperature
    is small: lse and the target's logit are rounded separately;
  - the jsd loses its digits as beta goes to 0 or 1;
  - errors of second derivatives and forward mode name linear_cross_entropy, whatever function was called;
  - in PyTorch torch.compile where no gradient is wanted, torch.func.vmap of linear_log_probs, and batched cotangents of
    vocab_parallel.
`python -m tests.search --seed 1 --shapes W --only N…` says whether they still do. Numbers that pass are taken out.
"""

AWAITED: dict[str, frozenset[int]] = {
    "jax": frozenset((0, 1, 2, 6, 7, 8, 27, 28, 29, 30, 81, 83, 84, 120, 121, 122, 123, 124, 125, 130)),
    "torch": frozenset(
        (3, 4, 5, 6, 8, 27, 28, 29, 45, 46, 47, 56, 57, 59, 81, 82, 83, 99, 100, 101, 109, 126, 127, 128, 144, 145, 146)
    ),
    "sharded": frozenset((6, 7, 9, 10, 25, 26)),
    "processes": frozenset((18, 19, 20, 21, 23)),
}

"""Drawn calls of tests/test_search.py that are known to fail, until what makes them fail is mended; see there."""

AWAITED: dict[str, frozenset[int]] = {}

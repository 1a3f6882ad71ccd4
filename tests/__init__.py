"""Tests of the packages. Their calls are small, and so are their memory budgets: any number of bytes is taken here."""

from cce_kernels import contract

contract.LEAST_BUDGET = 1

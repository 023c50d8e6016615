"""Suites of runs: the paper's tables and figures."""

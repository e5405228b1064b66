"""Benchmarks whose candidates take turns in the same processes, in one run."""

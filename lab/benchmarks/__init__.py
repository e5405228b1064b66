"""Benchmarks in which what is compared takes turns, in the same processes, in one run."""

"""Clocks, statistics and the environment: makes numbers, writes nothing."""

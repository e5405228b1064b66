"""Clocks, statistics and the environment. This room measures and writes nothing."""

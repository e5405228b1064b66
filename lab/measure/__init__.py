"""Clocks, statistics and the environment. This package measures and writes nothing."""

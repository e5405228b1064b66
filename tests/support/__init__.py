"""Helpers that several tests share."""

# A longer run hangs: this is some ten times the slowest one on a busy machine.
HANG_S = 300.0

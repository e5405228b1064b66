"""Helpers that several tests share."""

# A longer run hangs. Beside busy processes on a slow machine, two cells have taken five minutes.
HANG_S = 600.0

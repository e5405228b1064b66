"""Helpers that several tests share."""

# Whatever takes longer hangs: some ten times what the slowest takes while others use the machine.
HANG_S = 300.0

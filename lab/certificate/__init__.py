"""A certificate for a run: that ranks start equal, and average their gradients once, over all."""

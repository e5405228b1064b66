"""Storage of a run's numbers. This room computes nothing."""

"""Storage of a run's numbers. This package computes nothing."""

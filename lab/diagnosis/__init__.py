"""Explain the speed of a run, and recommend settings."""

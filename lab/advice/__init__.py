"""Advice: predicted ways to train, ranked by a target."""

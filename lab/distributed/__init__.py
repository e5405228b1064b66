"""Ranks: rendezvous, communication, and the workers that run exchanges."""

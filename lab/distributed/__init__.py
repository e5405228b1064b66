"""Ranks: how they find each other, what they talk over, and where exchanges run."""

"""Grids of settings, and starting their cells."""

"""Grids of settings, and how their cells are started."""

"""Attacks on the whole lab, by machine: `make attack`."""

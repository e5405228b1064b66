"""The first hour on a GPU: what is run, which figures are read off it, and what is expected."""

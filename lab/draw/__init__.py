"""Styles, text tables and saving: how all figures and tables look."""

"""Styles, text tables and saving, shared by all figures and tables."""

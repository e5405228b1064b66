"""Styles, charts and text tables, shared by all figures and tables."""

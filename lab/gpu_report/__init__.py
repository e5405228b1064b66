"""Fifteen minutes on a GPU: items in order of value, each with its bound, and a page of them."""

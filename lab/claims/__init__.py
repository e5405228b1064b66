"""A paper's claims, and what was measured and predicted of them."""

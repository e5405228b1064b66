"""A paper's claims, checked by measurements and predictions."""

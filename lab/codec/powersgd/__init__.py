"""Products of a matrix and two factors of low rank."""

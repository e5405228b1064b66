"""Records to speedup, efficiency and figures. Nothing in here imports torch."""

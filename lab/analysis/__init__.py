"""From records to speedup, efficiency and figures. Nothing here imports torch."""

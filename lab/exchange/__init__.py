"""THE SUBJECT: buckets of gradients, when they are exchanged, and one file per exchange."""

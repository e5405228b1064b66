"""Where numbers are kept: stores them, computes nothing."""

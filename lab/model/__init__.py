"""What is trained. Input shape and number of classes come from the data."""

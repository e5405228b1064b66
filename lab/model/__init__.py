"""What is trained: each module holds a function that makes one model."""

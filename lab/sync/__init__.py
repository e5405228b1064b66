"""When gradients or weights are exchanged."""

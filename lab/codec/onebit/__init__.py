"""1-bit SGD's codec: a definition in plain torch, and loops in C++ and Triton."""

"""1-bit SGD's codec: the definition in plain torch, and fast kernels in C++ and Triton."""

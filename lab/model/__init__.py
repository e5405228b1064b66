"""The trained networks, profiles of their layers, and counts of their work.

Networks of images take `input_shape`, (C, H, W), and `output_size`, the width of the last layer;
language models take `vocabulary` and `context`. All refuse, by a ValueError of one line that names
the setting, arguments out of range, inputs of another shape, and images too small to be halved as
often as they do (conf/model says how small).
"""

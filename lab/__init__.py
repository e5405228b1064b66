"""A lab that measures, explains and predicts how data-parallel training scales."""

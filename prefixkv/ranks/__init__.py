"""Tensor-parallel decode ranks: the operation log, and the joined events of their rooms. Pure."""

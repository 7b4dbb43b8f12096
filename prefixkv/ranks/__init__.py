"""Tensor-parallel decode ranks: the operation log, and what became of their rooms. Pure."""

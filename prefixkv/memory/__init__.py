"""Layouts of KV memory, the pools that own tensors, meshes of ranks, and staging copies."""

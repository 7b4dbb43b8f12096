"""Where bytes lie: layouts, the pools that own tensors, meshes of ranks, and staging copies."""

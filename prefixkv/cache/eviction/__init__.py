"""Which pages go first."""

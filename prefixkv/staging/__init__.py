"""Slices of pages that travel whole: pieces, leases, and both sides of them. Pure."""

"""How slices of pages travel whole: pieces, leases, and both sides of them. Pure."""

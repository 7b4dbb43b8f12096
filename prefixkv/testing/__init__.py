"""For those who integrate prefixkv, and for its own tests: a fabric in memory, byte patterns."""

"""For those who integrate prefixkv, and for its own tests: a fabric in memory, byte patterns, and a
pair of workers in one process."""

"""Tools for tests of prefixkv and of engines that integrate it: a fabric in memory, byte patterns,
and a pair of workers in one process."""

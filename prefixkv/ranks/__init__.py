"""The ranks of a worker: the log that the others follow, and their rooms' joined events. Pure."""

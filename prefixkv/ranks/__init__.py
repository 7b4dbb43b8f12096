"""The ranks of a worker: the log that the others follow, and the joined events of their rooms.
Pure."""

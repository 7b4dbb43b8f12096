"""A stand-in for an inference engine, with all of its options: real bytes, real scheduling, no model."""

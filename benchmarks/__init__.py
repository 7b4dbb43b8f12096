"""What the library is measured by. `python -m benchmarks` lists it; `results/` has the figures."""

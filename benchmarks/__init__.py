"""One script for each claim of DESIGN section 7. `python -m benchmarks.dp_vs_ddp` prints progress and, last, one JSON line."""

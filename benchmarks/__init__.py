"""One script for each claim. `python benchmarks/dp_vs_ddp.py` prints progress
and, last, one JSON line.
"""

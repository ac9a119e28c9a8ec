"""One script for each claim of DESIGN section 7. `python benchmarks/dp_vs_ddp.py` prints progress
and, last, one JSON line.
"""

"""`whale doctor`: what this host has, what is missing and how to get it; with `--gpu`, whether
training on its accelerators is exact, and how fast.

    facts.py      what is found without starting a rank
    rows.py       the checks that ranks run: exactness, cases prone to races, bandwidth, speed
    jobs.py       the jobs that are trained, and the same on one CPU
    rank.py       one rank of a part; the program that the launcher starts
    gpu_check.py  starts the parts one after the other and writes the report
"""

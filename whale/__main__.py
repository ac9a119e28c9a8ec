"""`python -m whale`, also for launchers: `torchrun --nproc-per-node 4 -m whale profile`."""

from whale.cli import main

main()

"""Devices, links and memories, and the file that describes them.

Reading order: `cluster` (the data), `kinds` (the table of GPUs), `network` (links, and the seconds
of a message), `file` with `file_entries` (the YAML), `layer_times` (measured layers beside it),
`discovery` (a cluster that no file describes), `matching` (which device a rank runs on).
"""

"""`whale profile`: times what is really there and writes it for the planner.

Reading order: `turns` (typical times on a machine with neighbours), `measure` (devices and links),
`operations` (single operations), `memories` (hosts and disks), `layers` (the parts of a model).
"""

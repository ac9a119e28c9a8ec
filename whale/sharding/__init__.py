"""`split`: how every tensor of a TaskGraph lies on a grid of devices, chosen for the least time.
Design: docs/split.md.
"""

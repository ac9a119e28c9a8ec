"""Whale in the trainers that people have: `transformers`, `accelerate`, `lightning`, and trackers
of their metrics. Each module needs the package that it is named after; nothing else of Whale
imports them.
"""

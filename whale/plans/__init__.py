"""The plan: the whole program as plain data, without torch (docs/plan.md).

Reading order: `plan`, `replica` (one model replica), `virtual_devices`, `samples` and `shares` (who
gets which samples), `slices` (bridges), `layout`, `grid`, `sharding` and `shards` (tensors on
grids), `blocks`, `moves` and `away` (ZeRO, and what lives on hosts or disks), `figures` (what the
cost model says), `file` with `check` and `check_held` (saved, loaded, checked).
"""

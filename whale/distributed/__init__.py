"""Ranks of a job: who they are, how they talk, and how they notice that one is gone.

Reading order: `ranks` (this process among the others), `job_cluster` (the cluster of the job),
`platform` (real or emulated), `transport`, `message`, `same_host`, `same_host_collectives` and
`host_group` (how tensors travel), `intervals` (collectives of uneven shards), `hub` and `watch`
(dead ranks), `causes` (which rank is to blame) and `sigterm`.
"""

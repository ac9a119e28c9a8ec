"""A plan on one rank: graphs of its chunks, its weights, its messages.

Reading order: `program` (a plan applied to a graph), `chunk` (a stage), `sharded_chunk` (a stage on
a grid) with `communication`, `exchange` and the `sharded_...` operations, `overlap` (messages under
the work), `blocks` (weights brought before they are read), `messages` (bridges), `inputs`,
`weights`.
"""

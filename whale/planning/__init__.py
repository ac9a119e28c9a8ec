"""Makes the best plan for fixed settings: who does what, and why. No process, no weights.

problem        what is to be planned
planner        the whole way, from a problem to a `Plan`
task_graphs, pipeline_cuts, cuts, chunks, stages    operations to stages
workload, pricing    what a stage takes and holds on a device
balance        the order of the devices, and their samples under their memory
drafts, priced_cut, cut_account, schedules    one cut with its price
recompute..., zero..., offload...    what is done where memory is short
grids, split..., uneven_grids    stages on grids
replica...     model replicas that are given one by one
assemble, describe, join    the draft as a plan
suggestions, adapt    what to change; new shares while a job runs
"""

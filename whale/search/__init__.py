"""Chooses what the user did not set: devices, stages, micro-batches, schedule (docs/search.md).

choose, settings, budget, unmarked
    when it searches, which settings are open, how much is tried
outline, tensor_groups, crossing, stage_rows, stage_memory
    the model as a short chain of costs, and what a stretch of it takes, sends and holds on devices
    or groups of them
partitions, shapes, equal_stages, slices, point
    devices in replicas and stages; parts of clusters with thousands of devices
estimate, step_messages, zero_terms, offload_terms, splits, split_parts
    bounds and estimates of a step, without a draft
candidate, candidate_plan, drafting, first_fit, memory_drafts, split_drafts, tries
    one choice of all settings, made into a plan
search, moves, device_moves
    the loop: the best estimates are drafted, the best drafts are moved
marked, marked_estimate
    the same around annotations
hint, refusals, advice, other_clusters, precision
    what is said: a line in a plan made by hand, why nothing fits, `whale advise`
"""

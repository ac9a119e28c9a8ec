"""Training, evaluation and checkpoints on the ranks of a job. It decides nothing that a plan holds.

engine, job, start
    what a user calls, and how a job begins
batches, captures, shapes, longest
    which captured graph and program run a batch, for every shape and length
training, executor, actions, messages, boundaries
    one step, action by action
gradients, held, update, masked_update, stage_updates, loss_scale
    gradients and the update
residence, homes, zero, block_gradients, spill, activations, offloaded_states, updates_ahead
    what lies on other ranks, on hosts or on disks, and is here for its use
evaluation, local_model, state, checkpoints, incoming
    outputs, the model as one process has it, files
data, metrics, timing, trackers, adapting, replicas
    how samples are loaded, what a run writes about itself, what it watches
"""

"""What operations and updates cost on a device, and what autograd saves (docs/costs.md).

Reading order: `costs` (FLOP, bytes, seconds of a node), `measured` and `layer_times` (measured
times, which count before all others), `saved` and `backward_workspace` (memory), `optimizers`,
`optimizer_factory` and `update_work` (what the user's optimizer needs and launches).
"""

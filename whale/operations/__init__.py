"""One table of operations: what capture, costs, sharding and the split backward know of an aten
operation is one row here (docs/operations.md).
"""

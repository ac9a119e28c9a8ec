"""Model and sample batch become one clean graph, samples followed and the loss taken apart.

Reading order: `capture` (the whole way), `batch` (the user's batch), `export`, `guards` and
`stand_ins` (one call of `torch.export`, and what it would lose), `clean`, `functional` and `inline`
(one functional graph), `graph` (the result), `kinds`, `samples` and `losses` (what depends on what,
sample by sample), `sizes` and `lengths` (sizes as expressions), `check_eager`, `check_parts` and
`second_call` (the graph against the model), `python_numbers` and `python_state` (what a graph
cannot hold), `cache` (captures in a folder).
"""

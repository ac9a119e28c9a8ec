"""Checkpoints as plain files: saved beside training, loaded under any other plan, never unpickled.

How an engine uses it:

    saver = AsyncSaver(folder, job_id=..., rank=r, num_ranks=n, keep=3)
    tensors, values = pack_optimizer(optimizer, names_of, only=mine)
    handle = saver.save(
        step, {**model_tensors, **tensors}, values={...}, rank_values={"optimizer": values}
    )

    with Reader(folder) as reader:
        for name, tensor in model.items():
            tensor.copy_(reader.read(name))
        merged = merge_values(values.get("optimizer") for values in reader.rank_values)
        unpack_optimizer(optimizer, names_of, reader.read, merged)

Who does what: `pieces` parts of tensors, `tensor_files` safetensors with checksums, `format` the
index and values of a folder, `training_state` optimizer and generators as tensors and values,
`writer` a rank's part, `commit` putting it into place, `saver` all of that in a thread, `reader`
any box of any tensor, `pretrained` the Hugging Face layout.
"""

from whale.checkpoint.commit import finish
from whale.checkpoint.errors import CheckpointError
from whale.checkpoint.format import Target, read_index
from whale.checkpoint.pieces import TensorPart
from whale.checkpoint.pretrained import PretrainedReader, export_safetensors
from whale.checkpoint.reader import Reader, find_checkpoints, resolve
from whale.checkpoint.saver import AsyncSaver, Handle, nothing_to_save
from whale.checkpoint.training_state import (
    merge_values,
    pack_optimizer,
    pack_rng,
    pack_scheduler,
    unpack_optimizer,
    unpack_rng,
    unpack_scheduler,
)
from whale.checkpoint.writer import Snapshot, assign_writers, take_snapshot, write_rank

__all__ = [
    "AsyncSaver",
    "CheckpointError",
    "Handle",
    "PretrainedReader",
    "Reader",
    "Snapshot",
    "Target",
    "TensorPart",
    "assign_writers",
    "export_safetensors",
    "find_checkpoints",
    "finish",
    "merge_values",
    "nothing_to_save",
    "pack_optimizer",
    "pack_rng",
    "pack_scheduler",
    "read_index",
    "resolve",
    "take_snapshot",
    "unpack_optimizer",
    "unpack_rng",
    "unpack_scheduler",
    "write_rank",
]

"""An accelerator for tests, on the CPU-only build of torch: device `testgpu`, collectives `testccl`.

What it models, so that a mistake on GPUs is a failing test here:

    streams      asynchronous: an operation goes into a stream (a thread), the host continues
    memory       its own: no CPU kernel takes its tensors; freed blocks are given out again at once,
                 in the order of the stream that they were made on; peaks; out of memory
    races        every access is checked against vector clocks: a missing wait is an error, also
                 when the timing was lucky
    host waits   counted by the line of the program that asked for a value
    queues       streams may share a few hardware queues, so that one that waits blocks others
    random       (seed, offset) as Philox; large tensors depend on the number of multiprocessors
    kernels      the first call of each operation may be slow (loading), any call may be delayed
    collectives  NCCL's rules: matched by order and not by tag, ordered by streams, sends and
                 receives meet, ranks that disagree are an error, communicators are counted

What it does not model: speed, precision of GPU kernels, peer access between devices of one process,
CUDA graphs. A process has one device, as a rank of Whale has.

    settings.py     the knobs, from environment variables
    streams.py      streams, events, vector clocks, hardware queues, host waits
    memory.py       blocks, the allocator, tensors made through DLPack
    draws.py        random numbers
    kernels.py      what an operation does: shapes from meta kernels, values on the stream
    backend.py      registration with torch: `install()`
    collectives.py  the process group: `install_collectives()`
"""

"""Runs a function on several ranks of this machine, fast and without leftovers.

A *server* is a process with torch and Whale warm (tests/warm.py), started once. For each request it
forks one child per rank; a child joins a gloo group over a file, runs the function and sends back
the result. So ranks start in milliseconds, and what the server has prepared (a captured model) is
there in every rank without being made again.

    pytest -> forkserver (warm) -> server (prepared) -> ranks 0..N-1

Functions travel by reference: they stand at the top of a module that can be imported. Results
travel by value.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

TIMEOUT_S = 60.0
PREPARE_TIMEOUT_S = 110.0
"""a capture takes some seconds, importing transformers as well; below pytest's own limit"""
ANSWER_S = 10.0
"""a server that does not answer this long after the time of its ranks is over is itself broken"""
GRACE_S = 0.5
"""how long a failure waits for the end of another rank that may be its cause"""
STACK_S = 0.5
"""how long a hung rank gets to write its stack"""

_preload = ["tests.warm", "pytest"]


class RankError(RuntimeError):
    """A rank failed, died or hung. `rank` says which, `original` is its exception when that could
    be sent.
    """

    def __init__(
        self, message: str, rank: int | None = None, original: BaseException | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.original = original


def preload(*modules: str) -> None:
    """Also imports these in the forkserver, once for all servers. Has an effect only before the
    first server starts.
    """
    _preload.extend(module for module in modules if module not in _preload)


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """`function(*args)` on `world_size` ranks with a gloo group; the results in rank order."""
    return _bare_server().run(_without_prepared, world_size, function, *args, timeout_s=timeout_s)


class ModelServer:
    """Runs `prepare(*args)` once in a process of its own, then functions on ranks that inherit what
    it gave.

    `prepare` runs with one thread and without a process group. What ranks do to the prepared object
    stays in them.
    """

    def __init__(
        self, prepare: Callable[..., Any], *args: Any, timeout_s: float = PREPARE_TIMEOUT_S
    ) -> None:
        self._folder = tempfile.mkdtemp(prefix="whale-ranks-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_preload)
        ours, theirs = context.Pipe()
        payload = pickle.dumps(
            (prepare, args)
        )  # plain pickle: torch's own way through multiprocessing shares memory instead of copying
        with _one_thread_environment():
            self._process = context.Process(
                target=_serve, args=(theirs, self._folder, payload), daemon=True
            )
            self._process.start()
        theirs.close()
        self._connection: Connection = ours
        self._closed = False
        atexit.register(self.close)
        _unpack(self._answer(timeout_s, "prepare()"), "prepare()")

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout_s: float = TIMEOUT_S,
        backend: str = "gloo",
    ) -> list[Any]:
        """`function(prepared, *args)` on `world_size` ranks with a process group; the results in
        rank order.
        """
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, not {world_size}.")
        return self._request(
            _Request(pickle.dumps((function, args)), world_size, backend, timeout_s)
        )

    def run_local(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S
    ) -> Any:
        """`function(prepared, *args)` in one forked child without a process group."""
        return self._request(_Request(pickle.dumps((function, args)), 1, None, timeout_s))[0]

    def close(self) -> None:
        """Ends the server and everything that it started."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._connection.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(
                self._process.pid or 0, signal.SIGKILL
            )  # the server leads a session: its ranks go with it
        self._process.kill()
        self._process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> ModelServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _request(self, request: _Request) -> list[Any]:
        if self._closed:
            raise RuntimeError("This ModelServer is closed.")
        what = f"{request.world_size} ranks" if request.backend is not None else "one process"
        try:
            self._connection.send_bytes(pickle.dumps(request))
        except OSError as error:
            self.close()
            raise RankError(f"The server of {what} is gone.") from error
        answers: list[bytes] = _unpack(self._answer(request.timeout_s + ANSWER_S, what), what)
        return [pickle.loads(answer) for answer in answers]

    def _answer(self, timeout_s: float, what: str) -> bytes:
        """The next message of the server. Whatever goes wrong here (interruption included) ends the
        server.
        """
        try:
            if self._connection.poll(timeout_s):
                return self._connection.recv_bytes()
            stack = _stack_of(self._process.pid or 0, Path(self._folder) / "server.stack")
            self._process.kill()
            raise RankError(
                f"The server of {what} did not answer within {timeout_s:g} s. It stood at:\n{stack}"
            )
        except EOFError:
            self._process.join(STACK_S)
            raise RankError(
                f"The server of {what} died ({_ending(self._process.exitcode)})."
            ) from None
        except BaseException:
            self.close()
            raise


_bare: list[ModelServer] = []


def _bare_server() -> ModelServer:
    """The server that has prepared nothing, for `run_ranks`; started at the first call."""
    if _bare and _bare[0]._closed:
        _bare.clear()
    if not _bare:
        _bare.append(ModelServer(_nothing))
    return _bare[0]


def _nothing() -> None:
    return None


def _without_prepared(prepared: None, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


# ---- in the server
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Request:
    payload: bytes
    """pickled (function, args)"""
    world_size: int
    backend: str | None
    """of the process group; None: without one"""
    timeout_s: float


@dataclass
class _Child:
    rank: int
    pid: int
    connection: Connection
    answer: bytes | None = None
    ended: bool = field(default=False)


def _serve(connection: Connection, folder: str, payload: bytes) -> None:
    """Main function of a server: prepares, then answers requests until the other side hangs up."""
    import torch

    os.setsid()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)  # and no thread pool that a fork would lose
    _write_stack_on_signal(Path(folder) / "server.stack")
    try:
        prepare, args = pickle.loads(payload)
        prepared = prepare(*args)
    except BaseException as error:
        connection.send_bytes(_failure(error, "", None))
        return
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, every page that ranks share
    connection.send_bytes(_success(None))
    with contextlib.suppress(EOFError, OSError):
        for number in range(sys.maxsize):
            request: _Request = pickle.loads(connection.recv_bytes())
            place = Path(folder) / str(number)
            place.mkdir()
            connection.send_bytes(_run_request(request, prepared, connection, place))
            shutil.rmtree(place, ignore_errors=True)


def _run_request(request: _Request, prepared: Any, connection: Connection, place: Path) -> bytes:
    """Forks the ranks, waits for them, and gives the message for the other side."""
    try:
        function, args = pickle.loads(
            request.payload
        )  # here, so that a module is imported once and not in every rank
    except BaseException as error:
        return _failure(error, "The function could not be loaded: ", None)
    children: list[_Child] = []
    try:
        for rank in range(request.world_size):
            children.append(
                _fork(rank, request, place, connection, lambda: function(prepared, *args))
            )
        return _watch(children, request, connection, place)
    finally:
        for child in children:
            if not child.ended:
                os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)
            child.connection.close()


def _watch(children: list[_Child], request: _Request, connection: Connection, place: Path) -> bytes:
    """Collects the answers; the first failure or the end of the time ends it."""
    deadline = time.monotonic() + request.timeout_s
    waiting = {child.connection: child for child in children}
    while waiting:
        ready = multiprocessing.connection.wait(
            [*waiting, connection], timeout=max(0.0, deadline - time.monotonic())
        )
        if connection in ready:
            raise EOFError("the other side hung up")  # it never speaks during a request
        if not ready:
            return _timed_out(list(waiting.values()), request, place)
        for item in ready:
            assert isinstance(item, Connection)
            child = waiting.pop(item)
            try:
                child.answer = item.recv_bytes()
            except EOFError:
                return _death(child, request)
            if not pickle.loads(child.answer)[0]:
                return _killed(list(waiting.values()), request) or child.answer
    answers = []
    for child in children:
        os.waitpid(child.pid, 0)
        child.ended = True
        assert child.answer is not None
        answers.append(pickle.loads(child.answer)[1])
    return _success(answers)


def _killed(others: list[_Child], request: _Request) -> bytes | None:
    """The message about a rank that died without a word, if there is one among these: it is why
    another one failed, whose message may come first on a busy machine.
    """
    ready = multiprocessing.connection.wait([child.connection for child in others], GRACE_S)
    for child in others:
        if child.connection in ready:
            try:
                child.answer = child.connection.recv_bytes()
            except EOFError:
                return _death(child, request)
    return None


def _death(child: _Child, request: _Request) -> bytes:
    _, status = os.waitpid(child.pid, 0)
    child.ended = True
    ending = _ending(os.waitstatus_to_exitcode(status))
    message = f"Rank {child.rank} of {request.world_size} died ({ending})."
    return pickle.dumps((False, message, child.rank, None))


def _timed_out(hung: list[_Child], request: _Request, place: Path) -> bytes:
    for child in hung:
        os.kill(child.pid, signal.SIGUSR1)
    time.sleep(STACK_S)
    stacks = [
        f"--- rank {child.rank} stood at:\n{_read(place / f'{child.rank}.stack')}" for child in hung
    ]
    ranks = ", ".join(str(child.rank) for child in hung)
    message = (
        f"Not done within {request.timeout_s:g} s: rank {ranks} of {request.world_size}.\n"
        + "\n".join(stacks)
    )
    return pickle.dumps((False, message, hung[0].rank, None))


# ---- in a rank
# --------------------------------------------------------------------------------------------------------


def _fork(
    rank: int, request: _Request, place: Path, server: Connection, call: Callable[[], Any]
) -> _Child:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid:
        theirs.close()  # so that the end of the child is the end of the pipe
        return _Child(rank, pid, ours)
    status = 1
    try:
        server.close()
        ours.close()
        _write_stack_on_signal(place / f"{rank}.stack")
        theirs.send_bytes(_rank_answer(rank, request, place, call))
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # nothing of the server may be cleaned up here
    raise AssertionError("not reached")


def _rank_answer(rank: int, request: _Request, place: Path, call: Callable[[], Any]) -> bytes:
    try:
        if request.backend is None:
            return _success(pickle.dumps(call()))
        import torch.distributed as dist

        world_size = str(request.world_size)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size
        )
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # the limit of this file comes first: it shows where the rank stands
        limit = timedelta(seconds=2 * request.timeout_s)
        dist.init_process_group(
            request.backend,
            init_method=f"file://{place}/rendezvous",
            rank=rank,
            world_size=request.world_size,
            timeout=limit,
        )
        answer = _success(pickle.dumps(call()))
        if dist.is_initialized():
            dist.barrier()  # a message may still be on its way to a slower rank
            dist.destroy_process_group()
        return answer
    except BaseException as error:
        return _failure(error, f"Rank {rank} of {request.world_size} failed:\n", rank)


# ---- messages
# ---------------------------------------------------------------------------------------------------------


def _success(value: Any) -> bytes:
    return pickle.dumps((True, value))


def _failure(error: BaseException, introduction: str, rank: int | None) -> bytes:
    message = introduction + "".join(traceback.format_exception(error))
    try:
        original = pickle.dumps(error)
        pickle.loads(original)  # many exceptions can be written but not read again
    except Exception:
        original = None
    return pickle.dumps((False, message, rank, original))


def _unpack(answer: bytes, what: str) -> Any:
    """The value of a success; a failure is raised."""
    done, value, *rest = pickle.loads(answer)
    if done:
        return value
    rank, original = rest
    raise RankError(
        value if rank is not None else f"{what}: {value}",
        rank,
        pickle.loads(original) if original else None,
    )


def _write_stack_on_signal(file: Path) -> None:
    faulthandler.register(
        signal.SIGUSR1, file=file.open("w"), all_threads=True
    )  # works while the rank is inside C++


def _stack_of(pid: int, file: Path) -> str:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
        time.sleep(STACK_S)
    return _read(file)


def _read(file: Path) -> str:
    return (
        file.read_text() if file.exists() else ""
    ) or "(no stack: it did not come as far as the function)\n"


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


@contextlib.contextmanager
def _one_thread_environment() -> Any:
    """The forkserver takes its environment from us when it starts: torch and BLAS there must make
    no threads.
    """
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before

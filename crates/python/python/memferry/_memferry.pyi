from collections.abc import Callable, Generator, Iterable
from types import TracebackType
from typing import Any, Protocol, Self

from typing_extensions import Buffer, TypeAlias

class _DLPack(Protocol):
    def __dlpack__(self, *, stream: Any = ...) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class _ArrayInterface(Protocol):
    @property
    def __array_interface__(self) -> dict[str, Any]: ...

class _CudaArrayInterface(Protocol):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

Memory: TypeAlias = Buffer | _DLPack | _ArrayInterface | _CudaArrayInterface

__version__: str

class Error(RuntimeError):
    """The base of ``PeerDisconnected``, ``Cancelled`` and ``LoadError``."""

class PeerDisconnected(Error): ...
class Cancelled(Error): ...
class LoadError(Error): ...

def copy(target: Memory, source: Memory) -> None:
    """Copies the bytes of ``source`` to ``target``, and returns when they are there."""

def copy_addresses(
    target: int, source: int, nbytes: int, target_gpu: int, source_gpu: int,
    stream: int,
) -> None: ...
def icopy(target: Memory, source: Memory) -> Transfer:
    """Starts a copy of the bytes of ``source`` to ``target``."""

def icopy_many(targets: Iterable[Memory], sources: Iterable[Memory]) -> Transfer:
    """Starts to copy each of ``sources`` to the target at the same place of ``targets``, as one transfer.

    None of the copies may read or write what another one writes.
    """

def fill(target: Memory, value: int = 0) -> None:
    """Sets every byte of ``target`` to ``value``."""

def ifill_many(targets: Iterable[Memory], value: int = 0) -> Transfer:
    """Starts to set every byte of all ``targets`` to ``value``, as one transfer.

    No two targets may share memory.
    """

def compare(left: Memory, right: Memory) -> int | None:
    """The position of the first byte in which two objects differ; ``None`` if they are equal."""

def crc(source: Memory) -> int:
    """The CRC-32C of the bytes of an object, the checksum of iSCSI and ext4."""

def copy_crc(target: Memory, source: Memory) -> int:
    """Copies the bytes of ``source`` to ``target``; returns their CRC-32C when they are there."""

def dualcast(first: Memory, second: Memory, source: Memory) -> None:
    """Copies the bytes of ``source`` to two targets, and returns when they are there."""

def register(memory: Memory, gpu: int = 0) -> Registration:
    """Registers memory with a GPU until the registration is closed: copies run at full speed."""

def statistics(gpu: int | None = None) -> dict[str, Any]:
    """Counters of the copies of this process."""

def explain(nbytes: int, *, blocking: bool = True, gpu: int | None = None) -> str:
    """How a copy of this size would be executed, and why."""

def release_buffers() -> None:
    """Gives back the memory of copies that have ended after their handle was dropped."""

class Transfer:
    """A copy in flight. It keeps its buffers alive until it is complete."""

    def wait(self, timeout: float | None = None) -> None: ...
    def result(self, timeout: float | None = None) -> None: ...
    @property
    def done(self) -> bool: ...
    @property
    def ready(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def cancel(self) -> None: ...
    def add_done_callback(self, function: Callable[[Transfer], object]) -> None: ...
    def __await__(self) -> Generator[Any, None, None]: ...

class Registration:
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

class Reactor:
    def __init__(self) -> None: ...
    def fileno(self) -> int: ...
    def watch(self, handle: Transfer | Operation, number: int) -> bool: ...
    def forget(self, handle: Transfer | Operation, number: int) -> None: ...
    def take(self) -> list[int]: ...

class Peer: ...

class Status:
    @property
    def source(self) -> Peer: ...
    @property
    def tag(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class Operation:
    """A message or an access to a window in flight. It keeps its buffer alive."""

    def wait(self, timeout: float | None = None) -> Status: ...
    def result(self, timeout: float | None = None) -> Status: ...
    @property
    def done(self) -> bool: ...
    def cancel(self) -> None: ...
    def add_done_callback(self, function: Callable[[Operation], object]) -> None: ...
    def __await__(self) -> Generator[Any, None, Status]: ...

class Endpoint:
    """One process's address for tagged messages with many peers."""

    def __init__(self, name: str, *, background: bool = False) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def peers(self) -> list[Peer]: ...
    def connect(self, name: str) -> Peer: ...
    def name_of(self, peer: Peer) -> str: ...
    def send(
        self, peer: Peer, data: Memory, tag: int = 0, *, timeout: float | None = None
    ) -> None:
        """Returns when ``data`` may be changed. After ``TimeoutError`` the send goes on."""

    def isend(self, peer: Peer, data: Memory, tag: int = 0) -> Operation: ...
    def recv(
        self,
        buffer: Memory,
        source: Peer | None = None,
        tag: int | None = None,
        *,
        mask: int | None = None,
        timeout: float | None = None,
    ) -> Status:
        """Receives from ``source`` (``None``: any peer) with ``tag`` (``None``: any); ``mask`` selects
        the bits of the tag that are compared. ``TimeoutError`` cancels the receive."""

    def irecv(
        self,
        buffer: Memory,
        source: Peer | None = None,
        tag: int | None = None,
        *,
        mask: int | None = None,
    ) -> Operation: ...
    def probe(
        self,
        source: Peer | None = None,
        tag: int | None = None,
        *,
        mask: int | None = None,
        timeout: float | None = None,
    ) -> Status | None:
        """The message that a receive would get. A timeout of 0 only looks; ``None`` if there is none."""

    def progress(self) -> bool: ...
    def fileno(self) -> int: ...
    def expose(self, memory: Memory, *, read: bool = True, write: bool = True) -> Window: ...
    def attach(self, peer: Peer, handle: bytes) -> RemoteWindow: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

class Job:
    """The endpoints of several processes, by rank. Two are connected by their first message."""

    @staticmethod
    def join(name: str, rank: int, size: int, *, timeout: float = 10.0) -> Job:
        """Returns when all ranks have joined; raises ``Error``, which names the one that is missing."""

    @property
    def endpoint(self) -> Endpoint: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def peer(self, rank: int) -> Peer: ...
    def rank_of(self, peer: Peer) -> int | None: ...
    def barrier(self) -> None:
        """Waits until all ranks have called it.

        All ranks call the same collective operations, in the same order and with the same sizes. When a rank dies,
        is interrupted, or its function raises, the others raise ``Error``, which names it.
        """

    def broadcast(self, buffer: Memory, root: int = 0) -> None:
        """Copies the bytes of rank ``root`` to the buffers of all ranks."""

    def allreduce(
        self, data: Memory, op: str | Callable[[memoryview, memoryview], object] = "sum", *, out: Memory | None = None
    ) -> None:
        """Reduces the elements of all ranks to all ranks, in place or into ``out``, which has the type of ``data``.

        ``op`` is ``"sum"``, ``"product"``, ``"min"``, ``"max"``, ``"and"``, ``"or"``, ``"xor"``, ``"logical_and"``,
        ``"logical_or"``, ``"logical_xor"``, or a function of two memoryviews: it combines the first, of some ranks,
        with the second, of the next rank, and writes the result into the first.
        """

    def reduce(
        self,
        data: Memory,
        op: str | Callable[[memoryview, memoryview], object] = "sum",
        root: int = 0,
        *,
        out: Memory | None = None,
    ) -> None:
        """Reduces the elements of all ranks to rank ``root``, in place or into ``out``."""

    def gather(self, data: Memory, out: Memory | None = None, root: int = 0) -> None:
        """Copies the bytes of all ranks into ``out`` of rank ``root``, in the order of the ranks."""

    def allgather(self, data: Memory, out: Memory) -> None:
        """Copies the bytes of all ranks into ``out`` of all ranks, in the order of the ranks."""

    def alltoall(self, data: Memory, out: Memory | None = None) -> None:
        """Copies the n-th of as many blocks as there are ranks to rank n, in place or into ``out``."""

class Window:
    """Memory of this process that peers put to and get from."""

    @property
    def handle(self) -> bytes: ...
    @property
    def nbytes(self) -> int: ...
    def load(self, offset: int) -> int: ...
    def store(self, offset: int, value: int) -> None: ...
    def wait(self, offset: int, value: int, timeout: float | None = None) -> int: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

class RemoteWindow:
    """A window of a peer."""

    @property
    def nbytes(self) -> int: ...
    def put(
        self, offset: int, data: Memory, *, notify: tuple[int, int] | None = None
    ) -> None: ...
    def iput(
        self, offset: int, data: Memory, *, notify: tuple[int, int] | None = None
    ) -> Operation: ...
    def get(self, offset: int, buffer: Memory) -> None: ...
    def iget(self, offset: int, buffer: Memory) -> Operation: ...
    def fence(self) -> None: ...

class ShareableBuffer(Buffer):
    """Memory that peers can map."""

    def __init__(self, nbytes: int) -> None: ...
    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...

class ModelFiles: ...

class Loader:
    def __init__(
        self,
        *,
        gpu: int | None = None,
        threads: int | None = None,
        mode: str = "auto",
        block_bytes: int | None = None,
    ) -> None: ...
    @property
    def threads(self) -> int: ...
    def start(
        self,
        files: ModelFiles,
        placements: list[tuple[int, int, int, int]],
        targets: object,
    ) -> Loading: ...

class Loading:
    @property
    def progress(self) -> tuple[int, int]: ...
    def wait(self, timeout: float | None = None) -> dict[str, Any] | None: ...
    def cancel(self) -> None: ...

_Tensor: TypeAlias = tuple[int, str, str, list[int], int, int]

def read_header(path: str) -> tuple[tuple[ModelFiles, list[_Tensor]], dict[str, str]]: ...
def read_index(path: str) -> tuple[ModelFiles, list[_Tensor]]: ...
def stop() -> None: ...

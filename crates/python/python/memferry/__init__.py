"""Asynchronous memory copies, single-copy messages between processes, and loading to GPUs.

>>> import memferry
>>> target = bytearray(5)
>>> memferry.copy(source=b"hello", target=target)
>>> bytes(target)
b'hello'

Copies take any object with the buffer protocol, DLPack, ``__array_interface__`` or
``__cuda_array_interface__``: bytes, mmap, NumPy, PyTorch, CuPy. ``memferry.torch`` loads safetensors
files to GPUs.
"""

from memferry._memferry import (
    Cancelled,
    Endpoint,
    Error,
    Job,
    LoadError,
    Operation,
    Peer,
    PeerDisconnected,
    Registration,
    RemoteWindow,
    ShareableBuffer,
    Status,
    Transfer,
    Window,
    __version__,
    compare,
    copy,
    copy_crc,
    crc,
    dualcast,
    explain,
    fill,
    icopy,
    icopy_many,
    ifill_many,
    register,
    release_buffers,
    statistics,
)
from memferry import _completion as _completion

__all__ = [
    "Cancelled",
    "Endpoint",
    "Error",
    "Job",
    "LoadError",
    "Operation",
    "Peer",
    "PeerDisconnected",
    "Registration",
    "RemoteWindow",
    "ShareableBuffer",
    "Status",
    "Transfer",
    "Window",
    "__version__",
    "compare",
    "copy",
    "copy_crc",
    "crc",
    "dualcast",
    "explain",
    "fill",
    "icopy",
    "icopy_many",
    "ifill_many",
    "register",
    "release_buffers",
    "statistics",
]

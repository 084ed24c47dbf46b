"""Loading and copying for PyTorch.

Results are tensors that PyTorch has allocated and owns. Every call is ordered after the work that
the current stream was given before it, and is complete when it returns: work that follows, on any
stream, sees the data.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Literal

import torch

from memferry import _memferry

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}

# Loads that take longer than this many seconds show a progress bar.
_SHOW_AFTER = 1.0

_loaders = {}


def load_file(
    path: str | os.PathLike[str],
    device: str | int | torch.device = "cpu",
    *,
    threads: int | None = None,
    mode: Literal["auto", "cached", "direct"] = "auto",
    progress: bool | None = None,
    report: dict[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Loads all tensors of a safetensors file.

    ``threads`` bounds the threads that read. ``mode`` is ``"auto"``, ``"cached"`` (through the page
    cache, which then has the file) or ``"direct"`` (past it); loads to the host always go through
    the page cache. ``progress`` forces a progress bar or
    forbids it; the default shows one after a second if stderr is a terminal. A dictionary passed as
    ``report`` is filled with bytes, seconds and where the bytes were found.
    """
    (files, tensors), _ = _memferry.read_header(os.fspath(path))
    return _load(files, tensors, device, threads, mode, progress, report)


def load_sharded(
    index: str | os.PathLike[str],
    device: str | int | torch.device = "cpu",
    *,
    threads: int | None = None,
    mode: Literal["auto", "cached", "direct"] = "auto",
    progress: bool | None = None,
    report: dict[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Loads all tensors that the index of a sharded model names
    (``model.safetensors.index.json``). The options are those of ``load_file``."""
    files, tensors = _memferry.read_index(os.fspath(index))
    return _load(files, tensors, device, threads, mode, progress, report)


def to_device(tensor: torch.Tensor, device: str | int | torch.device) -> torch.Tensor:
    """A copy of a tensor on a device, as ``tensor.to(device)``, from pageable memory too."""
    device = _device(device)
    source = _plain(tensor)
    out = torch.empty(source.shape, dtype=source.dtype, device=device)
    _copy(out, source)
    return out


def to_host(tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """A copy of a tensor in host memory, as ``tensor.cpu()``; into ``out`` if there is one."""
    source = _plain(tensor)
    if out is None:
        out = torch.empty(source.shape, dtype=source.dtype)
    elif out.device.type != "cpu":
        raise ValueError(f"out is on {out.device}: it must be host memory")
    elif (out.shape, out.dtype) != (source.shape, source.dtype):
        raise ValueError(
            f"out has shape {tuple(out.shape)} of {out.dtype}, the tensor "
            f"{tuple(source.shape)} of {source.dtype}"
        )
    elif not out.is_contiguous() or out.is_conj() or out.is_neg():
        raise ValueError("out is a view with gaps or in another order: pass a contiguous tensor")
    _copy(out, source)
    return out


def _plain(tensor):
    """The same values as one range of memory, on the host or a GPU."""
    if not (tensor.is_cuda or tensor.is_cpu):
        raise ValueError(f"the tensor is on {tensor.device}, neither the host nor a CUDA device")
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _copy(target, source):
    """Copies between contiguous tensors of one size, after the work of the current streams."""
    nbytes = source.nbytes
    if nbytes == 0:
        return
    to, of = target.get_device(), source.get_device()
    gpu = max(to, of)
    stream = _current_stream(gpu) if gpu >= 0 else 0
    _memferry.copy_addresses(target.data_ptr(), source.data_ptr(), nbytes, to, of, stream)


def _current_stream(gpu):
    """The handle of the current stream of a GPU."""
    return torch.cuda.current_stream(gpu).cuda_stream


# Without the object around the handle, which takes longer to make than the driver to copy.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)


def _device(device):
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{device} is neither the host nor a CUDA device")
    return device


def _dtype(name, tensor):
    dtype = getattr(torch, _DTYPES.get(name, ""), None)
    if dtype is None:
        raise _memferry.LoadError(
            f"{tensor} has the type {name}, which PyTorch {torch.__version__} does not have"
        )
    return dtype


def _loader(device, threads, mode):
    key = (device.index if device.type == "cuda" else None, threads, mode, os.getpid())
    if key not in _loaders:
        _loaders[key] = _memferry.Loader(gpu=key[0], threads=threads, mode=mode)
    return _loaders[key]


def _load(files, tensors, device, threads, mode, progress, report):
    device = _device(device)
    types = [_dtype(dtype, name) for _, name, dtype, _, _, _ in tensors]
    loader = _loader(device, threads, mode)
    result, placements = {}, []
    for (file, name, _, shape, offset, length), dtype in zip(tensors, types):
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if tensor.nbytes != length:
            raise _memferry.LoadError(f"{name} has {length} bytes, its shape {tensor.nbytes}")
        result[name] = tensor
        if length:
            placements.append((file, offset, tensor.data_ptr(), length))
    if device.type == "cuda":
        # The allocator may have handed out memory that work in flight still uses.
        torch.cuda.current_stream(device).synchronize()
    loading = loader.start(files, placements, list(result.values()))
    try:
        ended = _wait(loading, progress)
    except BaseException:
        loading.cancel()
        raise
    if report is not None:
        report.update(ended)
    return result


def _wait(loading, progress):
    started = time.monotonic()
    if progress is not True:
        ended = loading.wait(_SHOW_AFTER)
        if ended is not None:
            return ended
    if progress is None:
        progress = sys.stderr is not None and sys.stderr.isatty()
    if not progress:
        return loading.wait()
    bar = _bar(loading.progress[1])
    try:
        while True:
            ended = loading.wait(0.1)
            delivered = loading.progress[0] if ended is None else ended["nbytes"]
            bar(delivered, time.monotonic() - started)
            if ended is not None:
                return ended
    finally:
        bar(None, 0)


def _bar(total):
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return _PlainBar(total)
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="loading")

    def show(delivered, _seconds):
        if delivered is None:
            bar.close()
        else:
            bar.update(delivered - bar.n)

    return show


class _PlainBar:
    def __init__(self, total):
        self._total = max(total, 1)

    def __call__(self, delivered, seconds):
        if delivered is None:
            sys.stderr.write("\n")
        else:
            speed = delivered / max(seconds, 1e-9) / 1e9
            share = 100 * delivered // self._total
            sys.stderr.write(f"\rloading: {share:3} %, {delivered / 1e9:.1f} GB, {speed:.1f} GB/s ")
        sys.stderr.flush()

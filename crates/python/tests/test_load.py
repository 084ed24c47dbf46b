"""Loading of safetensors files to host memory."""

import ctypes
import json
import os

import numpy as np
import pytest

from memferry import LoadError, _memferry


def write(path, tensors, metadata=None):
    """Writes NumPy arrays as a safetensors file."""
    names = {"float32": "F32", "uint8": "U8", "int64": "I64", "float16": "F16"}
    header, data, offset = {}, [], 0
    if metadata:
        header["__metadata__"] = metadata
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {
            "dtype": names[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        data.append(array.tobytes())
        offset = end
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))
    return path


def load(model, **options):
    """Loads a model to NumPy arrays, as memferry.torch does to tensors."""
    files, tensors = model
    result, placements = {}, []
    types = {"F32": np.float32, "U8": np.uint8, "I64": np.int64, "F16": np.float16}
    for file, name, dtype, shape, offset, length in tensors:
        result[name] = np.zeros(shape, types[dtype])
        if length:
            placements.append((file, offset, result[name].ctypes.data, length))
    loader = _memferry.Loader(**options)
    report = loader.start(files, placements, list(result.values())).wait()
    return result, report


def example():
    rng = np.random.default_rng(1)
    return {
        "embedding": rng.random((1000, 1200), np.float32),
        "bias": rng.integers(0, 99, 7),
        "half": rng.random(3 << 20).astype(np.float16),
        "empty": np.zeros((0, 5), np.float32),
        "scalar": np.array(3, np.int64),
    }


@pytest.mark.parametrize("mode", ["auto", "cached", "direct"])
@pytest.mark.parametrize("threads", [None, 1, 3])
def test_every_byte_arrives(tmp_path, mode, threads):
    tensors = example()
    path = write(tmp_path / "model.safetensors", tensors, {"format": "np"})
    model, metadata = _memferry.read_header(str(path))
    assert metadata == {"format": "np"}
    loaded, report = load(model, threads=threads, mode=mode)
    assert set(loaded) == set(tensors)
    for name, array in tensors.items():
        assert np.array_equal(loaded[name], array), name
    assert report["nbytes"] == sum(array.nbytes for array in tensors.values())
    assert report["staging_bytes"] == 0


def test_an_index_names_the_files(tmp_path):
    tensors = example()
    write(tmp_path / "one.safetensors", {"embedding": tensors["embedding"]})
    write(tmp_path / "two.safetensors", {"bias": tensors["bias"], "half": tensors["half"]})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"embedding": "one.safetensors", "half": "two.safetensors"}}))
    loaded, _ = load(_memferry.read_index(str(index)))
    assert set(loaded) == {"embedding", "half"}
    assert np.array_equal(loaded["half"], tensors["half"])


def test_bad_files_are_refused_with_a_reason(tmp_path):
    path = tmp_path / "bad.safetensors"
    with pytest.raises(FileNotFoundError):
        _memferry.read_header(str(path))
    for content, reason in [
        (b"", "fewer than the length"),
        (b"\xff" * 64, "claims"),
        ((2).to_bytes(8, "little") + b"{", "claims"),
        ((2).to_bytes(8, "little") + b"{]", "header is wrong"),
        ((2).to_bytes(8, "little") + b"{}extra", "behind the header"),
    ]:
        path.write_bytes(content)
        with pytest.raises(LoadError, match=reason):
            _memferry.read_header(str(path))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    path = tmp_path / "model.safetensors"
    os.mkfifo(path)
    for read in [_memferry.read_header, _memferry.read_index]:
        with pytest.raises(LoadError, match="not a regular file"):
            read(str(path))


def test_a_file_that_shrinks_is_an_error(tmp_path):
    path = write(tmp_path / "model.safetensors", example())
    model, _ = _memferry.read_header(str(path))
    os.truncate(path, 100_000)
    with pytest.raises(LoadError, match="truncated|do not lie inside"):
        load(model)


def test_a_load_can_be_cancelled(tmp_path):
    path = write(tmp_path / "model.safetensors", example())
    target = np.zeros(os.path.getsize(path), np.uint8)
    loader = _memferry.Loader(threads=1)
    for _ in range(20):
        (files, _), _ = _memferry.read_header(str(path))
        loading = loader.start(files, [(0, 0, target.ctypes.data, target.nbytes)], target)
        loading.cancel()
        assert loading.progress == (0, 0)
        del loading


def test_options_that_do_not_exist_are_named():
    with pytest.raises(ValueError, match='"cached"'):
        _memferry.Loader(mode="quick")


def test_ctypes_memory_is_a_target(tmp_path):
    path = write(tmp_path / "model.safetensors", {"a": np.arange(1000, dtype=np.int64)})
    (files, tensors), _ = _memferry.read_header(str(path))
    memory = (ctypes.c_int64 * 1000)()
    placement = (0, tensors[0][4], ctypes.addressof(memory), 8000)
    _memferry.Loader().start(files, [placement], memory).wait()
    assert list(memory) == list(range(1000))


def test_what_is_loaded_is_the_file_whose_header_was_read(tmp_path):
    path = write(tmp_path / "model.safetensors", {"a": np.arange(1000, dtype=np.int64)})
    model, _ = _memferry.read_header(str(path))
    other = write(tmp_path / "other", {"a": np.zeros(1000, np.int64)})
    os.replace(other, path)
    loaded, _ = load(model)
    assert np.array_equal(loaded["a"], np.arange(1000))
    with pytest.raises(ValueError, match="already"):
        load(model)


def test_a_forked_child_leaves_the_buffers_of_its_parent_alone(tmp_path):
    import subprocess
    import sys

    path = write(tmp_path / "model.safetensors", example())
    program = f"""
import os, sys
sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})
from test_load import load
from memferry import _memferry
model, _ = _memferry.read_header({str(path)!r})
load(model)
child = os.fork()
if child == 0:
    model, _ = _memferry.read_header({str(path)!r})
    load(model)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0

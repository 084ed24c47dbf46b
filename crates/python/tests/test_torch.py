"""memferry.torch: on the host everywhere, on a GPU where there is one."""

import json
import threading

import numpy as np
import pytest

import memferry

torch = pytest.importorskip("torch")
import memferry.torch  # noqa: E402

from test_load import write  # noqa: E402

DEVICES = ["cpu"] + (["cuda:0"] if torch.cuda.is_available() else [])
on_gpu = pytest.mark.skipif(len(DEVICES) == 1, reason="no GPU")

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
TYPES += [getattr(torch, name) for name in ["float8_e4m3fn", "complex64"] if hasattr(torch, name)]


def random(shape, dtype, device="cpu"):
    count = torch.empty(shape, dtype=dtype).nbytes
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    if not shape:
        return data.view(dtype).reshape(()).to(device)
    return data.view(dtype).reshape(shape).to(device)


def same(one, other):
    one, other = one.detach().cpu().contiguous(), other.detach().cpu().contiguous()
    assert (one.shape, one.dtype) == (other.shape, other.dtype)
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def example():
    rng = np.random.default_rng(1)
    return {
        "embedding": rng.random((1000, 1200), np.float32),
        "bias": rng.integers(0, 99, 7),
        "half": rng.random(3 << 20).astype(np.float16),
        "empty": np.zeros((0, 5), np.float32),
        "scalar": np.array(3, np.int64),
        **{f"layer.{n}": rng.random(1 + 997 * n, np.float32) for n in range(100)},
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["auto", "cached", "direct"])
def test_files_become_tensors(tmp_path, device, mode):
    arrays = example()
    path = write(tmp_path / "model.safetensors", arrays)
    report = {}
    for _ in range(3):
        tensors = memferry.torch.load_file(path, device=device, mode=mode, report=report)
        assert list(tensors) == list(arrays)
        for name, array in arrays.items():
            assert tensors[name].device == torch.device(device)
            assert same(tensors[name], torch.from_numpy(array)), name
    assert report["nbytes"] == sum(array.nbytes for array in arrays.values())
    assert report["staging_bytes"] <= 512 << 20


@pytest.mark.parametrize("device", DEVICES)
def test_shards_become_tensors(tmp_path, device):
    arrays = example()
    names = list(arrays)
    write(tmp_path / "one.safetensors", {name: arrays[name] for name in names[:3]})
    write(tmp_path / "two.safetensors", {name: arrays[name] for name in names[3:]})
    index = tmp_path / "model.safetensors.index.json"
    files = {name: "one.safetensors" if at < 3 else "two.safetensors" for at, name in enumerate(names)}
    index.write_text(json.dumps({"weight_map": files}))
    tensors = memferry.torch.load_sharded(index, device=device, threads=2)
    assert all(same(tensors[name], torch.from_numpy(array)) for name, array in arrays.items())


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_of_every_type_travel(device):
    for dtype in TYPES:
        for shape in [(), (1,), (7, 3), (1000, 1001), (0, 4)]:
            tensor = random(shape, dtype)
            there = memferry.torch.to_device(tensor, device)
            assert there.device == torch.device(device) and same(there, tensor)
            assert same(memferry.torch.to_host(there), tensor)
            out = torch.empty_like(tensor)
            assert memferry.torch.to_host(there, out=out) is out and same(out, tensor)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_with_gradients_and_strides_travel(device):
    tensor = torch.arange(600.0).reshape(20, 30).requires_grad_()
    assert same(memferry.torch.to_device(tensor.T, device), tensor.T)
    assert same(memferry.torch.to_host(memferry.torch.to_device(tensor[:, ::3], device)), tensor[:, ::3])


def test_targets_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="shape"):
        memferry.torch.to_host(torch.zeros(4), out=torch.zeros(5))
    with pytest.raises(ValueError, match="torch.int64"):
        memferry.torch.to_host(torch.zeros(4), out=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="neither"):
        memferry.torch.to_device(torch.zeros(4), "meta")
    with pytest.raises(ValueError, match="neither"):
        memferry.torch.to_host(torch.zeros(4, device="meta"))
    wide = torch.zeros(8, 8)
    for out in [torch.zeros(1).expand(8), wide[:, 0], wide.T[:1, :].reshape(8).expand(8)[::1]]:
        if not out.is_contiguous():
            with pytest.raises(ValueError, match="contiguous"):
                memferry.torch.to_host(torch.ones(8), out=out)


def test_values_behind_a_lazy_sign_are_copied():
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(memferry.torch.to_host(tensor.conj()), torch.tensor([1 - 2j, 3 + 4j]))
    assert torch.equal(memferry.torch.to_host(tensor.conj().imag), torch.tensor([-2.0, 4.0]))


def test_tensors_are_copied_by_the_plain_calls_too():
    source = torch.arange(100_000)
    target = torch.zeros_like(source)
    memferry.copy(target, source)
    assert torch.equal(target, source)
    with pytest.raises(ValueError, match="equal size"):
        memferry.copy(target, source[:10])
    with pytest.raises(BufferError, match="contiguous"):
        memferry.copy(target[:50_000], source[::2])


def test_types_that_torch_does_not_have_are_named(tmp_path):
    path = tmp_path / "model.safetensors"
    header = b'{"a":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"12")
    with pytest.raises(memferry.LoadError, match="F4"):
        memferry.torch.load_file(path)


def test_a_progress_bar_is_shown_when_asked_for(tmp_path, capsys):
    path = write(tmp_path / "model.safetensors", example())
    memferry.torch.load_file(path, progress=True)
    assert "loading" in capsys.readouterr().err


@on_gpu
def test_copies_are_ordered_after_the_work_of_the_current_stream():
    stream = torch.cuda.Stream()
    for round in range(20):
        with torch.cuda.stream(stream):
            tensor = torch.zeros(1 << 22, device="cuda:0")
            for _ in range(20):
                tensor += 1
            assert (memferry.torch.to_host(tensor) == 20).all()
            # The allocator hands the same memory out again, while kernels may still read it.
            busy = torch.full((1 << 22,), float(round), device="cuda:0")
            total = busy.double().sum()
            del busy
            there = memferry.torch.to_device(torch.ones(1 << 22), "cuda:0")
            assert (there == 1).all() and total.item() == round * (1 << 22)


@on_gpu
def test_loads_mix_with_the_work_of_torch(tmp_path):
    arrays = example()
    path = write(tmp_path / "model.safetensors", arrays)
    wrong, stop = [], threading.Event()

    def work():
        host = torch.arange(1 << 20)
        pinned = host.pin_memory()
        while not stop.is_set():
            for source in [host, pinned]:
                if not torch.equal(source.to("cuda:0", non_blocking=True).cpu(), host):
                    wrong.append("torch")

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            tensors = memferry.torch.load_file(path, device="cuda:0")
            for name, array in arrays.items():
                if not same(tensors[name], torch.from_numpy(array)):
                    wrong.append(name)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong


@on_gpu
def test_registered_memory_is_used_by_torch_too():
    source = np.arange(1 << 22, dtype=np.float32)
    with memferry.register(source):
        tensor = torch.empty(1 << 22, device="cuda:0")
        memferry.icopy(tensor, source).wait()
        assert np.array_equal(tensor.cpu().numpy(), source)
        assert torch.equal(torch.from_numpy(source).to("cuda:0"), tensor)


@on_gpu
def test_device_memory_by_the_array_interface():
    class Interface:
        def __init__(self, tensor):
            self.tensor = tensor
            self.__cuda_array_interface__ = tensor.__cuda_array_interface__

    tensor = torch.zeros(1 << 20, device="cuda:0")
    source = np.random.default_rng(1).random(1 << 20, np.float32)
    memferry.copy(Interface(tensor), source)
    back = np.empty_like(source)
    memferry.copy(back, Interface(tensor))
    assert np.array_equal(back, source)


@on_gpu
def test_a_failed_load_leaves_nothing_on_the_gpu(tmp_path):
    import os

    path = write(tmp_path / "model.safetensors", example())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    real = memferry.torch._memferry.read_header(str(path))
    os.truncate(path, 1 << 20)
    with pytest.raises(memferry.LoadError):
        memferry.torch._load(*real[0], "cuda:0", None, "auto", False, None)
    assert torch.cuda.memory_allocated() == before

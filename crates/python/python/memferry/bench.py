"""``python -m memferry.bench load|overhead|queue``: measures against what programs use today.

Candidates take turns; a figure is the median over the rounds, a ratio the median of the ratios
within a round. ``memferry bench load`` runs this program and reads its JSON: the rows have the
format of all benches.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time

import memferry

GIB = 1 << 30


class NotAvailable(Exception):
    """A bench needs what this machine does not have."""


class Bench:
    """Interleaved rounds of several candidates."""

    def __init__(self, rounds, is_quiet):
        self.rounds, self._is_quiet = rounds, is_quiet
        self.rows, self.summary, self.missing = [], {}, []

    def measure(self, figure, nbytes, candidates, prepare=None, count=1, unit="GB/s"):
        """Seconds of each candidate, a list by rounds. A run makes ``count`` copies of ``nbytes``."""
        if self._is_quiet:
            self.say(f"measuring: {figure}")
        times = {name: [] for name in candidates}
        for turn in range(self.rounds + 1):
            # Another candidate begins each round.
            order = list(candidates.items())
            order = order[turn % len(order) :] + order[: turn % len(order)]
            for name, run in order:
                if prepare:
                    prepare()
                started = time.perf_counter()
                kept = run()
                seconds = time.perf_counter() - started
                del kept
                # The first round warms everything up.
                if turn:
                    times[name].append(seconds)
        for name, seconds in times.items():
            values = [_value(unit, nbytes, each / count) for each in seconds]
            low, middle, high = _quartiles(values)
            row = {"figure": figure, "series": name, "bytes": nbytes, "value": middle}
            row |= {"unit": unit, "low": low, "high": high, "rounds": len(values)}
            self.rows.append(row)
            middle_ms = statistics.median(seconds) / count * 1e3
            self.say(f"{figure:<30} {name:<30} {middle:8.2f} {unit}  {middle_ms:12.4f} ms")
        return times

    def key(self, name, times, ours, peer):
        ratios = [theirs / mine for mine, theirs in zip(times[ours], times[peer])]
        self.summary[name] = statistics.median(ratios)
        self.say(f"  {name} = {self.summary[name]:.2f}")

    def say(self, text):
        print(text, file=sys.stderr if self._is_quiet else sys.stdout, flush=True)


def _value(unit, nbytes, seconds):
    return seconds * 1e9 if unit == "ns" else nbytes / seconds / 1e9


def _quartiles(values):
    """The quartiles of the rounds, linearly interpolated."""
    if len(values) == 1:
        return values * 3
    return statistics.quantiles(values, n=4, method="inclusive")


def shapes_few(total):
    """A few large tensors."""
    return [total // 8] * 8


def shapes_many(total):
    """The tensors of a model: large matrices, norms and biases between them."""
    layer = [4096 * 4096 * 2] * 4 + [4096 * 11008 * 2] * 3 + [8192, 8192]
    sizes = [32000 * 4096 * 2]
    while sum(sizes) + sum(layer) < total and len(sizes) < 300:
        sizes += layer
    # Fill up to 300 with small ones.
    sizes += [8192 * (1 + n % 16) for n in range(max(0, 300 - len(sizes)))]
    return sizes


def write_model(path, sizes):
    """Writes a safetensors file of bfloat16 tensors with these sizes in bytes."""
    header, offset = {}, 0
    for number, size in enumerate(sizes):
        end = offset + size
        header[f"layer.{number}.weight"] = {
            "dtype": "BF16",
            "shape": [size // 2],
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block, step = bytearray(os.urandom(16 << 20)), 64 << 10
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        left = offset
        while left:
            # No two parts of 64 KiB are equal: one in the place of another is noticed.
            for place in range(0, len(block), step):
                block[place : place + 8] = (left - place).to_bytes(8, "little", signed=True)
            left -= file.write(memoryview(block)[: min(left, len(block))])
        file.flush()
        os.fsync(file.fileno())
    return offset


def drop_from_cache(path):
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bench_load(bench, arguments):
    try:
        import torch
        from safetensors.torch import load_file
    except ImportError as error:
        raise NotAvailable(f"PyTorch and safetensors are needed to compare with: {error}")
    import memferry.torch

    if not torch.cuda.is_available():
        raise NotAvailable("PyTorch finds no GPU that it can use")
    device = f"cuda:{arguments.gpu}"
    total = int(arguments.gib * GIB)

    def synced(run):
        def measured():
            result = run()
            torch.cuda.synchronize()
            return result

        return measured

    def loaders(path):
        return {
            "memferry": synced(lambda: memferry.torch.load_file(path, device=device, progress=False)),
            "safetensors": synced(lambda: load_file(path, device=device)),
            "safetensors, then .to": synced(
                lambda: {name: t.to(device) for name, t in load_file(path).items()}
            ),
        }

    def verify(path):
        ours = memferry.torch.load_file(path, device=device, progress=False)
        theirs = load_file(path, device=device)
        if ours.keys() != theirs.keys():
            raise SystemExit("other tensors than safetensors finds")
        for name, tensor in theirs.items():
            if not torch.equal(tensor.view(torch.uint8), ours[name].view(torch.uint8)):
                raise SystemExit(f"wrong bytes in {name}")

    add_fast = _fastsafetensors(bench, device)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = os.path.join(folder, "few.safetensors")
        size = write_model(path, shapes_few(total))
        verify(path)
        candidates = loaders(path) | add_fast(path)
        host = torch.empty(size, dtype=torch.uint8).random_()
        pinned = host.pin_memory()
        there = torch.empty(size, dtype=torch.uint8, device=device)
        candidates["torch, pageable copy"] = synced(lambda: there.copy_(host))
        candidates["torch, pinned copy alone"] = synced(
            lambda: there.copy_(pinned, non_blocking=True)
        )
        times = bench.measure("file to GPU, in the page cache", size, candidates)
        bench.key("load_warm_vs_safetensors", times, "memferry", "safetensors")
        bench.key("load_warm_vs_pinned_copy", times, "memferry", "torch, pinned copy alone")
        del candidates, host, pinned, there

        cold = {name: run for name, run in loaders(path).items() if name != "safetensors, then .to"}
        drop_from_cache(path)
        verify(path)
        times = bench.measure(
            "file to GPU, not cached", size, cold, prepare=lambda: drop_from_cache(path)
        )
        bench.key("load_cold_vs_safetensors", times, "memferry", "safetensors")
        os.unlink(path)

        path = os.path.join(folder, "many.safetensors")
        size = write_model(path, shapes_many(total))
        verify(path)
        times = bench.measure("file to GPU, 300 tensors", size, loaders(path) | add_fast(path))
        bench.key("many_small_vs_safetensors", times, "memferry", "safetensors")
        os.unlink(path)

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = os.path.join(folder, "few.safetensors")
        size = write_model(path, shapes_few(total))
        verify(path)
        times = bench.measure("file to GPU, in /dev/shm", size, loaders(path))
        bench.key("load_shm_vs_safetensors", times, "memferry", "safetensors")

    size = min(total, GIB)
    there = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    out = torch.zeros(size, dtype=torch.uint8)
    if not torch.equal(memferry.torch.to_host(there, out=out), there.cpu()):
        raise SystemExit("wrong bytes on the way to the host")
    times = bench.measure(
        "GPU to pageable memory",
        size,
        {
            "memferry": lambda: memferry.torch.to_host(there, out=out),
            "torch": lambda: out.copy_(there),
        },
    )
    bench.key("to_host_vs_torch", times, "memferry", "torch")
    small = torch.rand(1 << 18)
    if not torch.equal(memferry.torch.to_device(small, device), small.to(device)):
        raise SystemExit("wrong bytes on the way to the GPU")

    def often(run):
        def measured():
            for _ in range(100):
                run()

        return measured

    times = bench.measure(
        "1 MiB to the GPU",
        1 << 20,
        {
            "memferry": often(lambda: memferry.torch.to_device(small, device)),
            "torch": often(lambda: small.to(device)),
        },
        count=100,
    )
    bench.key("to_device_1m_vs_torch", times, "memferry", "torch")


def _fastsafetensors(bench, device):
    try:
        import torch
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup
    except Exception as error:
        bench.missing.append(f"fastsafetensors ({error})")
        return lambda path: {}

    def candidate(path):
        def run():
            loader = SafeTensorsFileLoader(SingleGroup(), torch.device(device), nogds=True)
            loader.add_filenames({0: [path]})
            buffer = loader.copy_files_to_device()
            tensors = {name: buffer.get_tensor(name) for name in loader.get_keys()}
            torch.cuda.synchronize()
            return tensors, buffer, loader

        try:
            run()
        except Exception as error:
            bench.missing.append(f"fastsafetensors ({error})")
            return {}
        return {"fastsafetensors": run}

    return candidate


def bench_overhead(bench, _arguments):
    target, source = bytearray(8), b"12345678"
    count = 20_000

    def copies():
        for _ in range(count):
            memferry.copy(target, source)

    def slices():
        view = memoryview(target)
        for _ in range(count):
            view[:] = source

    ways = {"memferry": copies, "memoryview": slices}
    times = bench.measure("a copy from Python", 8, ways, count=count, unit="ns")
    bench.summary["python_overhead_us"] = statistics.median(times["memferry"]) / count * 1e6
    bench.say(f"  python_overhead_us = {bench.summary['python_overhead_us']:.2f}")


def bench_queue(bench, _arguments):
    """Large arrays from a worker process."""
    if importlib.util.find_spec("numpy") is None:
        raise NotAvailable("NumPy is needed: pip install numpy")
    from memferry import _bench_queue

    _bench_queue.measure(bench)


BENCHES = {"load": bench_load, "overhead": bench_overhead, "queue": bench_queue}


def _version(module):
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return getattr(sys.modules[module], "__version__", "unknown")


def main():
    parser = argparse.ArgumentParser(prog="python -m memferry.bench", description=__doc__)
    parser.add_argument("bench", choices=BENCHES)
    parser.add_argument("--gib", type=float, default=4, help="the size of the files (default 4)")
    parser.add_argument("--gpu", type=int, default=0, help="the number of the GPU")
    parser.add_argument("--folder", default=None, help="where the files are written (default /tmp)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON, and progress to stderr")
    arguments = parser.parse_args()
    # Temporary files and workers go, too, when this process is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    bench = Bench(max(arguments.rounds, 1), arguments.json)
    try:
        BENCHES[arguments.bench](bench, arguments)
    except NotAvailable as reason:
        if not arguments.json:
            raise SystemExit(str(reason))
        bench.missing.append(f"Python, {arguments.bench} ({reason})")
    if arguments.json:
        machine = {"cores": len(os.sched_getaffinity(0)), "kernel": platform.release()}
        versions = {"memferry": memferry.__version__, "python": platform.python_version()}
        for module in ["torch", "safetensors", "fastsafetensors", "numpy", "iceoryx2"]:
            if module in sys.modules:
                versions[module] = _version(module)
        outcome = {"bench": f"python-{arguments.bench}", "machine": machine, "versions": versions}
        outcome |= {"rows": bench.rows, "missing": bench.missing, "summary": bench.summary}
        print(json.dumps(outcome, indent=1))


if __name__ == "__main__":
    main()

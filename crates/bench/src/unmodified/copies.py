"""Copies of Python and of NumPy, and other work, on order: "KIND BYTES COUNT". Replies with nanoseconds."""

import json
import sys
import time

try:
    import numpy
except ImportError:
    numpy = None


def prepare(kind, size):
    """A copy, and a check of its result."""
    if kind == "numpy":
        source, target = numpy.full(size, 90, numpy.uint8), numpy.zeros(size, numpy.uint8)
        source[::4096] = numpy.arange(len(source[::4096])) & 255
        return lambda: numpy.copyto(target, source), lambda: numpy.array_equal(source, target)
    if kind == "interpreter":
        rows = [{"number": row, "name": f"row {row}", "parts": [row] * 5} for row in range(2000)]
        return lambda: json.loads(json.dumps(rows)), lambda: json.loads(json.dumps(rows)) == rows
    source = bytearray(b"memferry" * (size // 8))
    if kind == "bytes":
        return lambda: bytes(source), lambda: bytes(source) == source
    target = bytearray(size)

    def copy():
        target[:] = source

    return copy, lambda: target == source


def main():
    print("ready", flush=True)
    prepared = None
    for line in sys.stdin:
        words = line.split()
        if len(words) != 3:
            break
        kind, size, count = words[0], int(words[1]), int(words[2])
        if prepared != (kind, size):
            copy = check = None
            copy, check = prepare(kind, size)
            prepared = (kind, size)
        for _ in range(1 + count // 10):
            copy()
        begin = time.perf_counter_ns()
        for _ in range(count):
            copy()
        took = time.perf_counter_ns() - begin
        print(took if check() else "error the copy differs from its source", flush=True)


main()

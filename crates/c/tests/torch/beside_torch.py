#!/usr/bin/env python3
"""Memferry beside PyTorch in one process, on a real GPU: neither may disturb the other.

Memferry (libadma.so, through ctypes) copies tensors of PyTorch once, twice and four times, in every
direction. Between its copies PyTorch makes its own, of the same memory, of parts of it and of ranges that
reach over its edges: pageable, pinned and asynchronous, with tensors freed and allocated in between.
Every byte is checked, and nothing may be refused ("CUDA error: invalid argument").

    cargo build --release -p memferry-c
    python3 crates/c/tests/torch/beside_torch.py target/release/libadma.so

--sole-user sets MEMFERRY_CUDA_SOLE_USER=1, which is a lie here: PyTorch's copies are refused then. This
shows that the test can fail, and what it looked like before memory was left unregistered by default.
--facts asks the driver how it treats registered ranges, and prints what it says; nothing is judged.

Prints "N passed, M failed" and exits with 1 if anything failed. Exits with 77 where PyTorch or a GPU is
missing.
"""

import argparse
import ctypes
import gc
import os
import sys
import time

MISSING = 77
MIB = 1 << 20


def main():
    arguments = parse()
    try:
        import torch
    except ImportError as error:
        return missing(f"PyTorch is missing ({error})")
    if not torch.cuda.is_available():
        return missing("PyTorch sees no CUDA device")
    if arguments.sole_user:
        os.environ["MEMFERRY_CUDA_SOLE_USER"] = "1"
    if arguments.facts:
        return facts(torch)
    try:
        ours = Memferry(arguments.library)
    except OSError as error:
        print(f"{arguments.library} cannot be loaded: {error}\n"
              "build it (cargo build --release -p memferry-c) and name it as the argument")
        return 2
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name(0)}, {arguments.library}")
    torch.cuda.init()
    code = ours.library.adma_use_gpu(0)
    if code:
        return missing(f"Memferry cannot use the GPU: {ours.reason(code)}")
    test = Test(torch, ours, arguments)
    begun = time.monotonic()
    test.run()
    for line in test.failures[:arguments.shown]:
        print(f"FAILED {line}")
    if len(test.failures) > arguments.shown:
        print(f"... and {len(test.failures) - arguments.shown} more")
    print(f"{test.passed} passed, {len(test.failures)} failed", f"({time.monotonic() - begun:.0f} s)")
    return 1 if test.failures else 0


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get("MEMFERRY_LIBADMA", "target/release/libadma.so")
    parser.add_argument("library", nargs="?", default=default, help="libadma.so; or MEMFERRY_LIBADMA")
    sizes = [1, 2, 3, 5, 8, 16, 31, 64, 128, 256]
    parser.add_argument("--mib", type=int, nargs="+", default=sizes, help="sizes in MiB")
    parser.add_argument("--copies", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sole-user", action="store_true", help="say that nobody else uses CUDA")
    parser.add_argument("--facts", action="store_true", help="ask the driver, and do nothing else")
    parser.add_argument("--shown", type=int, default=20, help="failures that are shown")
    return parser.parse_args()


def missing(why):
    print(f"not run: {why}")
    return MISSING


def starting_at(torch, part):
    """A tensor whose storage begins where a part of another begins. PyTorch asks the driver about the first
    byte of a storage, not about that of a part."""
    memory = (ctypes.c_uint8 * part.numel()).from_address(part.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8)


class Refused(Exception):
    """A call of Memferry that failed."""


class Memferry:
    """The calls of libadma."""

    def __init__(self, path):
        library = ctypes.CDLL(os.path.abspath(path))
        pointer, size, cookie = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
        library.adma_use_gpu.argtypes = [ctypes.c_int]
        library.adma_copy.argtypes = [pointer, pointer, size]
        library.adma_icopy.argtypes, library.adma_icopy.restype = [pointer, pointer, size], cookie
        library.adma_wait_copy.argtypes = [cookie]
        library.adma_register.argtypes = [pointer, size]
        library.adma_unregister.argtypes = [pointer]
        library.adma_strerror.argtypes = [ctypes.c_int]
        library.adma_strerror.restype = ctypes.c_char_p
        self.library = library

    def reason(self, code):
        text = self.library.adma_strerror(code)
        return f"{code}: {text.decode() if text else '?'}"

    def checked(self, code):
        if code < 0:
            raise Refused(self.reason(int(code)))
        return code

    def copy(self, source, target):
        """Copies a tensor to another, wherever they are."""
        bytes_ = source.numel() * source.element_size()
        assert bytes_ == target.numel() * target.element_size()
        self.checked(self.library.adma_copy(source.data_ptr(), target.data_ptr(), bytes_))

    def start(self, source, target):
        bytes_ = source.numel() * source.element_size()
        return self.checked(self.library.adma_icopy(source.data_ptr(), target.data_ptr(), bytes_))

    def wait(self, cookie):
        self.checked(self.library.adma_wait_copy(cookie))

    def register(self, tensor):
        bytes_ = tensor.numel() * tensor.element_size()
        self.checked(self.library.adma_register(tensor.data_ptr(), bytes_))

    def unregister(self, tensor):
        self.checked(self.library.adma_unregister(tensor.data_ptr()))


class Test:
    """Rounds of copies by both, with every byte checked."""

    def __init__(self, torch, ours, arguments):
        self.torch, self.ours, self.arguments = torch, ours, arguments
        self.passed, self.failures = 0, []
        self.where, self.turn = "", 0
        generator = torch.Generator().manual_seed(7)
        most = (max(arguments.mib) + 8) * MIB
        words = torch.randint(-(2**62), 2**62, (most // 8,), dtype=torch.int64, generator=generator)
        self.base = words.view(torch.uint8)

    # What is checked.

    def check(self, what, work):
        """Counts whether `work` raised nothing and did not return False."""
        try:
            outcome = work()
        except Exception as error:  # whatever it is, it is a failure of this one check
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self.failures.append(f"{self.where}, {what}: {type(error).__name__}: {first}")
            return
        if outcome is False:
            self.failures.append(f"{self.where}, {what}: wrong bytes")
        else:
            self.passed += 1

    def same(self, tensor, expected):
        """Whether ordinary memory holds these bytes."""
        return self.torch.equal(tensor, expected)

    def pattern(self, bytes_):
        """Other bytes each time."""
        self.turn += 1
        at = (self.turn * 4099) % (self.base.numel() - bytes_)
        return self.base[at:at + bytes_]

    def filled(self, bytes_):
        """New pageable memory, and what it holds."""
        pattern = self.pattern(bytes_)
        host = self.torch.empty(bytes_, dtype=self.torch.uint8)
        host.copy_(pattern)
        return host, pattern

    def device(self, bytes_):
        memory = self.torch.zeros(bytes_, dtype=self.torch.uint8, device="cuda")
        self.torch.cuda.synchronize()
        return memory

    # What PyTorch does meanwhile.

    def torch_copies(self, name, host, pattern):
        """PyTorch's own copies of pageable memory, in both directions."""
        torch = self.torch
        self.check(f"torch to, {name}", lambda: self.same(host.to("cuda").cpu(), pattern))

        def asynchronous():
            inside = host.to("cuda", non_blocking=True)
            torch.cuda.synchronize()
            return self.same(inside.cpu(), pattern)

        self.check(f"torch to non_blocking, {name}", asynchronous)
        self.check(f"torch pin_memory, {name}", lambda: self.same(host.pin_memory(), pattern))

        def there_and_back():
            inside = pattern.to("cuda")
            host.zero_()
            host.copy_(inside)
            first = self.same(host, pattern)
            host.zero_()
            host.copy_(inside, non_blocking=True)
            torch.cuda.synchronize()
            return first and self.same(host, pattern)

        self.check(f"torch copy_ from the device, {name}", there_and_back)

        def by_a_stream():
            stream = torch.cuda.Stream()
            pinned = torch.empty(host.numel(), dtype=torch.uint8, pin_memory=True)
            with torch.cuda.stream(stream):
                inside = host.to("cuda", non_blocking=True)
                pinned.copy_(inside, non_blocking=True)
            stream.synchronize()
            return self.same(pinned, pattern)

        self.check(f"torch by a stream into pinned memory, {name}", by_a_stream)

    def torch_parts(self, name, arena, contents, start, end):
        """PyTorch's copies of ranges that begin, end or reach over the edges of a range."""
        parts = [
            (start - MIB // 2, end + MIB // 2),
            (start - 1, start + 1),
            (start - 4097, start + 4095),
            ((start + end) // 2, end + 4097),
            (start - MIB // 2, (start + end) // 2),
            (end - 1, end + 1),
            (start + 1, end - 1),
            (start + 300_001, min(start + 700_001, end)),
        ]
        for at, to in parts:
            part, expected = arena[at:to], contents[at:to]
            what = f"torch, {name}, [{at - start}, {to - end}] around it"
            self.check(what, lambda p=part, e=expected: self.same(p.to("cuda").cpu(), e))

            def back(p=part, e=expected):
                inside = e.to("cuda")
                p.copy_(inside, non_blocking=True)
                self.torch.cuda.synchronize()
                return self.same(p, e)

            self.check(f"{what}, back", back)

    # Rounds.

    def run(self):
        for mib in self.arguments.mib:
            for copies in self.arguments.copies:
                for odd in (0, 12_345):
                    bytes_ = mib * MIB - odd
                    self.where = f"{mib} MiB - {odd}, {copies} copies"
                    self.whole_tensors(bytes_, copies)
                    self.parts_of_one_tensor(bytes_, copies)
                    self.between_ordinary_memory(bytes_, copies)
                    self.asynchronous(bytes_, copies)
                    self.pinned(bytes_, copies)
                    self.registered(bytes_, copies)
                gc.collect()
                self.torch.cuda.empty_cache()
                print(f"{mib} MiB, {copies} copies: {self.passed} passed, {len(self.failures)} failed so far",
                      file=sys.stderr, flush=True)

    def whole_tensors(self, bytes_, copies):
        """Tensors to the device and back, freed and allocated anew in between."""
        host, pattern = self.filled(bytes_)
        inside = self.device(bytes_)
        for _ in range(copies):
            self.check("ours to the device", lambda: self.ours.copy(host, inside))
            self.check("torch cpu after ours", lambda: self.same(inside.cpu(), pattern))
        self.torch_copies("after ours to the device", host, pattern)
        back = self.torch.zeros(bytes_, dtype=self.torch.uint8)
        for _ in range(copies):
            back.zero_()
            self.check("ours from the device", lambda: self.ours.copy(inside, back))
            self.check("bytes from the device", lambda: self.same(back, pattern))
        self.torch_copies("after ours from the device", back, pattern)
        # What is allocated next lies where the old lay, and reaches over its edges.
        del host, back
        gc.collect()
        for size in (bytes_ + 300_000, bytes_ // 2 + 77, bytes_):
            new, pattern = self.filled(size)
            self.torch_copies(f"new memory of {size} bytes", new, pattern)
            target = self.device(size)
            self.check("ours of new memory", lambda: self.ours.copy(new, target))
            self.check("bytes of new memory", lambda: self.same(target.cpu(), pattern))
            del new, target

    def parts_of_one_tensor(self, bytes_, copies):
        """A range in the middle of a larger tensor."""
        start = MIB + 4_321
        arena, contents = self.filled(bytes_ + 3 * MIB)
        part, end = arena[start:start + bytes_], start + bytes_
        inside = self.device(bytes_)
        for _ in range(copies):
            self.check("ours of a part", lambda: self.ours.copy(part, inside))
            self.check("torch of all", lambda: self.same(arena.to("cuda").cpu(), contents))
            self.check("ours into a part", lambda: self.ours.copy(inside, part))
            self.check("bytes of all", lambda: self.same(arena, contents))
        self.torch_parts("a part that was copied", arena, contents, start, end)
        self.torch_copies("all of it", arena, contents)

    def between_ordinary_memory(self, bytes_, copies):
        source, pattern = self.filled(bytes_)
        target = self.torch.zeros(bytes_, dtype=self.torch.uint8)
        for _ in range(copies):
            target.zero_()
            self.check("ours between ordinary memory", lambda: self.ours.copy(source, target))
            self.check("bytes between ordinary memory", lambda: self.same(target, pattern))
        self.torch_copies("source between ordinary memory", source, pattern)
        self.torch_copies("target between ordinary memory", target, pattern)

    def asynchronous(self, bytes_, copies):
        """Copies of both in flight at once."""
        host, pattern = self.filled(bytes_)
        insides = [self.device(bytes_) for _ in range(copies)]
        stream = self.torch.cuda.Stream()

        def together():
            cookies = [self.ours.start(host, inside) for inside in insides]
            with self.torch.cuda.stream(stream):
                theirs = host.to("cuda", non_blocking=True)
            for cookie in cookies:
                self.ours.wait(cookie)
            stream.synchronize()
            fine = all(self.same(inside.cpu(), pattern) for inside in insides)
            return fine and self.same(theirs.cpu(), pattern)

        self.check("both at once", together)
        self.torch_copies("after both at once", host, pattern)

    def pinned(self, bytes_, copies):
        """Memory that PyTorch has pinned is used as it is."""
        host, pattern = self.filled(bytes_)
        pinned, inside = host.pin_memory(), self.device(bytes_)
        for _ in range(copies):
            self.check("ours of pinned memory", lambda: self.ours.copy(pinned, inside))
            self.check("bytes of pinned memory", lambda: self.same(inside.cpu(), pattern))
            pinned.zero_()
            self.check("ours into pinned memory", lambda: self.ours.copy(inside, pinned))
            self.check("bytes in pinned memory", lambda: self.same(pinned, pattern))
            part = slice(1000, bytes_ // 2)
            self.check("ours of a part of pinned memory", lambda: self.ours.copy(pinned[part], inside[part]))
            self.check("bytes of a part", lambda: self.same(inside.cpu(), pattern))
        self.check("it is pinned still", lambda: pinned.is_pinned())
        self.torch_copies("pinned memory", pinned, pattern)

    def registered(self, bytes_, copies):
        """Memory that is registered with Memferry is one piece for PyTorch too."""
        start = MIB + 4_321
        arena, contents = self.filled(bytes_ + 3 * MIB)
        part, pattern = arena[start:start + bytes_], contents[start:start + bytes_]
        inside = self.device(bytes_)
        self.check("register", lambda: self.ours.register(part))
        self.check("register again", lambda: self.ours.register(part))
        for _ in range(copies):
            self.check("ours of registered memory", lambda: self.ours.copy(part, inside))
            self.check("bytes of registered memory", lambda: self.same(inside.cpu(), pattern))
            part.zero_()
            self.check("ours into registered memory", lambda: self.ours.copy(inside, part))
            self.check("bytes in registered memory", lambda: self.same(arena, contents))
        self.check("unregister once", lambda: self.ours.unregister(part))
        self.check("it is pinned for PyTorch", lambda: starting_at(self.torch, part).is_pinned())
        self.torch_copies("registered memory", part, pattern)
        inner = part[300_001:bytes_ // 2]
        self.torch_copies("inside registered memory", inner, pattern[300_001:bytes_ // 2])
        # Beside it, on the same pages, and not over its edge.
        self.torch_copies("before registered memory", arena[:start], contents[:start])
        end = start + bytes_
        self.torch_copies("behind registered memory", arena[end:], contents[end:])
        self.check("ours across the edge", lambda: self.ours.copy(arena[start - 77:end - 77], inside))
        self.check("bytes across the edge", lambda: self.same(inside.cpu(), contents[start - 77:end - 77]))
        self.check("unregister twice", lambda: self.ours.unregister(part))
        self.check("it is pageable for PyTorch", lambda: not part.is_pinned())
        self.torch_parts("memory that was registered", arena, contents, start, end)
        self.torch_copies("all of it", arena, contents)


def facts(torch):
    """How the driver treats registered ranges."""
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    cuda = ctypes.CDLL("libcuda.so.1")
    register, unregister = cuda.cuMemHostRegister_v2, cuda.cuMemHostUnregister
    register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    unregister.argtypes = [ctypes.c_void_p]
    attribute = cuda.cuPointerGetAttribute
    attribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64]
    copy = cuda.cuMemcpyHtoD_v2
    copy.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t]
    arena = torch.zeros(16 * MIB, dtype=torch.uint8)
    inside = torch.zeros(16 * MIB, dtype=torch.uint8, device="cuda")
    page = (arena.data_ptr() + MIB) & ~4095

    def kind(address):
        value = ctypes.c_uint(0)
        code = attribute(ctypes.byref(value), 2, address)
        return {1: "host", 2: "device"}.get(value.value, value.value) if code == 0 else f"error {code}"

    def say(what, answer):
        print(f"{what:<64} {answer}")

    first = (page + 100, 3 * 4096 + 50)
    second = (first[0] + first[1], 5000)
    say("register 12338 bytes at offset 100 of a page", register(*first, 1))
    say("register 5000 bytes right behind them, on the same page", register(*second, 1))
    say("register a part of the first", register(first[0] + 10, 100, 1))
    say("register over the edge of the second", register(second[0] + 4000, 4096, 1))
    say("kind of the byte before the first", kind(first[0] - 1))
    say("kind of the first byte", kind(first[0]))
    say("kind of the last byte of the second", kind(sum(second) - 1))
    say("kind of the byte behind the second", kind(sum(second)))
    target = inside.data_ptr()
    say("copy inside the first", copy(target, first[0], first[1]))
    say("copy over the edge between the two", copy(target, second[0] - 100, 200))
    say("copy over the beginning of the first", copy(target, first[0] - 50, 100))
    say("copy of the bytes before the first, on its page", copy(target, first[0] - 100, 100))
    say("copy of a page before the first and what is before it on its page", copy(target, page - 4096, 4196))
    say("copy over all of it", copy(target, page - 4096, 10 * 4096))
    say("unregister the first", unregister(first[0]))
    say("kind of the first byte of the second", kind(second[0]))
    say("copy over the beginning of what the first was", copy(target, first[0] - 50, 100))
    say("unregister the second", unregister(second[0]))
    say("copy over all of it", copy(target, page - 4096, 10 * 4096))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Copies of every kind of memory."""

import array
import ctypes
import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import memferry

SIZES = [0, 1, 7, 4096, 65_537, 5 << 20]


def pattern(size, seed=1):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class Interface:
    """An object that has nothing but one attribute."""

    def __init__(self, array, **changes):
        self._array = array
        self._changes = changes

    @property
    def __array_interface__(self):
        return {**self._array.__array_interface__, **self._changes}


class Dlpack:
    """An object that speaks DLPack alone, of the old version or the new one."""

    def __init__(self, array, is_versioned):
        self._array, self._is_versioned = array, is_versioned

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options):
        if not self._is_versioned and "max_version" in options:
            raise TypeError("an old producer")
        return self._array.__dlpack__(**options)


def targets(size):
    yield bytearray(size)
    yield memoryview(bytearray(size))
    yield np.zeros(size, np.uint8)
    yield array.array("B", bytes(size))
    yield Interface(np.zeros(size, np.uint8))
    yield Dlpack(np.zeros(size, np.uint8), False)
    yield Dlpack(np.zeros(size, np.uint8), True)
    if size:
        yield (ctypes.c_ubyte * size)()
        yield mmap.mmap(-1, size)
        yield memferry.ShareableBuffer(size)


def content(target):
    if isinstance(target, (Interface, Dlpack)):
        target = target._array
    return bytes(memoryview(target))


@pytest.mark.parametrize("size", SIZES)
def test_every_kind_of_buffer_is_copied_and_waited_for(size):
    source = pattern(size)
    for target in targets(size):
        memferry.copy(target, source)
        assert content(target) == source.tobytes(), type(target)
    for target in targets(size):
        transfer = memferry.icopy(target, source)
        transfer.wait()
        assert transfer.done and transfer.ready == transfer.nbytes == size
        assert content(target) == source.tobytes(), type(target)


def test_the_ready_bytes_grow_while_another_thread_waits():
    source, target = np.ones(256 << 20, np.uint8), np.zeros(256 << 20, np.uint8)
    for _ in range(20):
        transfer = memferry.icopy(target, source)
        waiter = threading.Thread(target=transfer.wait)
        waiter.start()
        seen = set()
        while waiter.is_alive():
            seen.add(transfer.ready)
        waiter.join()
        assert transfer.done and transfer.ready == transfer.nbytes
        if seen - {0, transfer.nbytes}:
            return
    pytest.fail("nothing but the start and the end was seen")


@pytest.mark.parametrize("size", SIZES)
def test_every_kind_of_buffer_is_a_source(size):
    expected = pattern(size).tobytes()
    for source in targets(size):
        memferry.copy(source, expected)
        target = bytearray(size)
        memferry.copy(target, source)
        assert target == expected, type(source)


def test_arrays_of_any_type_and_shape_are_copied():
    for dtype in [np.float64, np.int16, np.bool_, np.complex64, "datetime64[s]"]:
        source = np.zeros((4, 2, 8), dtype)
        source.view(np.uint8).reshape(-1)[:] = pattern(source.nbytes)
        target = np.zeros_like(source)
        memferry.copy(target, source)
        assert target.tobytes() == source.tobytes()


def test_arrays_that_are_not_contiguous_are_refused_with_the_cure():
    whole = np.zeros((8, 8))
    for array_ in [whole[:, ::2], whole.T[1:], Interface(whole[:, ::2])]:
        with pytest.raises(BufferError, match="ascontiguousarray"):
            memferry.copy(bytearray(64), array_)


def test_sizes_that_differ_are_refused():
    with pytest.raises(ValueError, match="the source has 4 bytes and the target 3"):
        memferry.copy(bytearray(3), b"1234")
    with pytest.raises(ValueError, match="equal size"):
        memferry.icopy(bytearray(3), b"1234")


def test_targets_that_are_read_only_are_refused():
    frozen = np.zeros(4, np.uint8)
    frozen.flags.writeable = False
    for target in [b"1234", memoryview(b"1234"), frozen, Interface(frozen), Dlpack(frozen, True)]:
        with pytest.raises(ValueError, match="read-only"):
            memferry.copy(target, b"abcd")
    memferry.copy(bytearray(4), frozen)


def test_objects_without_memory_are_refused_by_name():
    for wrong in [5, "text", None, [1, 2], object()]:
        with pytest.raises(TypeError, match="buffer protocol"):
            memferry.copy(bytearray(4), wrong)


def test_an_array_interface_that_lies_is_refused():
    honest = np.zeros(8, np.uint8)
    for changes in [{"shape": (-1,)}, {"typestr": "|u"}, {"data": None}, {"shape": (2**62, 2**62)}]:
        with pytest.raises((BufferError, TypeError, OverflowError)):
            memferry.copy(bytearray(8), Interface(honest, **changes))


def test_fields_of_records_are_not_taken_for_arrays():
    records = np.zeros(4, np.dtype([("a", "<f8"), ("b", "<i4")]))
    # A stride of 12 bytes, an item of 8.
    with pytest.raises(BufferError, match="contiguous"):
        memferry.copy(bytearray(32), Interface(records["a"]))
    for kind in ["<U5", "<t8", "|O8"]:
        with pytest.raises(BufferError, match="not copied"):
            memferry.copy(bytearray(8), Interface(np.zeros(8, np.uint8), typestr=kind))


def test_fills_and_comparisons():
    target = bytearray(100_000)
    memferry.fill(target, 7)
    assert target == b"\x07" * 100_000
    memferry.fill(target)
    assert target == bytes(100_000)
    other = bytearray(target)
    assert memferry.compare(target, other) is None
    other[77_777] = 1
    assert memferry.compare(target, other) == 77_777
    with pytest.raises(ValueError):
        memferry.compare(b"1", b"22")
    with pytest.raises(OverflowError):
        memferry.fill(target, 256)


def crc32c(data):
    """The definition, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_checksums_are_those_of_the_standard():
    assert memferry.crc(b"123456789") == 0xE3069283
    assert memferry.crc(b"") == 0
    data = bytes(range(256)) * 16
    assert memferry.crc(data) == crc32c(data)
    # Zeros in front of everything else: long enough for several channels.
    long = bytearray(8 << 20)
    long[-len(data):] = data
    target = bytearray(len(long))
    assert memferry.copy_crc(target, long) == memferry.crc(long) == memferry.crc(target)
    assert target == long
    with pytest.raises(ValueError):
        memferry.copy_crc(bytearray(1), b"22")
    with pytest.raises(ValueError, match="overlap"):
        view = memoryview(target)
        memferry.copy_crc(view[1:100], view[:99])


@pytest.mark.parametrize("length", [0, 1, 1000, 1 << 20])
def test_a_dualcast_copies_to_both_targets(length):
    source = bytes(at * 7 % 251 for at in range(length))
    first, second = bytearray(length), bytearray(length)
    memferry.dualcast(first, second, source)
    assert first == source and second == source


def test_a_dualcast_refuses_targets_that_overlap_or_differ_in_length():
    both = memoryview(bytearray(100))
    with pytest.raises(ValueError, match="overlap"):
        memferry.dualcast(both[:60], both[40:], bytes(60))
    with pytest.raises(ValueError, match="overlap"):
        memferry.dualcast(both[:60], bytearray(60), both[40:])
    with pytest.raises(ValueError):
        memferry.dualcast(bytearray(60), bytearray(61), bytes(60))
    with pytest.raises(ValueError, match="read-only"):
        memferry.dualcast(bytearray(60), bytes(60), bytes(60))


def test_a_wait_can_time_out():
    # A transfer that is complete does not time out, whatever the limit.
    transfer = memferry.icopy(bytearray(8), b"12345678")
    transfer.wait()
    transfer.wait(0)
    assert transfer.result(timeout=0) is None


def test_buffers_stay_alive_when_everything_is_dropped_in_flight():
    for _ in range(50):
        source = np.frombuffer(os.urandom(1 << 16), np.uint8).repeat(64)
        target = np.zeros_like(source)
        memferry.icopy(target, source)
        del source, target
    gc.collect()
    memferry.release_buffers()


def test_a_bytearray_in_flight_cannot_be_resized_and_can_afterwards():
    target, source = bytearray(8 << 20), bytes(8 << 20)
    transfer = memferry.icopy(target, source)
    with pytest.raises(BufferError):
        # The copy holds it until the handle has been asked.
        target.extend(b"more")
    transfer.wait()
    target.extend(b"more")


def test_a_dropped_transfer_gives_its_buffers_back_by_itself():
    target = bytearray(1 << 20)
    memferry.icopy(target, bytes(1 << 20))
    deadline = time.monotonic() + 60
    while True:
        # Calls of the package, or the interpreter itself, give buffers back.
        try:
            target.append(1)
            break
        except BufferError:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_buffers_are_given_back_after_an_error():
    target = bytearray(4)
    for _ in range(3):
        with pytest.raises(ValueError):
            memferry.copy(target, b"too long for it")
        with pytest.raises(ValueError):
            memferry.icopy(target, b"too long for it")
    memferry.release_buffers()
    target.append(1)


def test_callbacks_are_called_once_each():
    called, everything = [], threading.Event()

    def note(transfer):
        assert transfer.done
        called.append(transfer)
        if len(called) == 200:
            everything.set()

    source = pattern(100_000)
    buffers = [np.zeros_like(source) for _ in range(200)]
    transfers = [memferry.icopy(buffer, source) for buffer in buffers]
    for transfer in transfers:
        transfer.add_done_callback(note)
    assert everything.wait(60)
    assert set(called) == set(transfers) and len(called) == 200
    assert all((buffer == source).all() for buffer in buffers)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_callback_that_raises_does_not_stop_the_others(caplog, error):
    done = threading.Event()

    def wrong(_):
        raise error("on purpose")

    memferry.icopy(bytearray(8), b"12345678").add_done_callback(wrong)
    memferry.icopy(bytearray(8), b"12345678").add_done_callback(lambda _: done.set())
    assert done.wait(60)


def test_many_threads_copy_at_once():
    wrong = []

    def work(seed):
        source = pattern(300_000, seed)
        for _ in range(20):
            target = np.empty_like(source)
            if seed % 2:
                memferry.copy(target, source)
            else:
                memferry.icopy(target, source).wait()
            if (target != source).any():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_two_threads_may_wait_for_one_transfer():
    source = pattern(20 << 20)
    target = np.empty_like(source)
    transfer = memferry.icopy(target, source)
    threads = [threading.Thread(target=transfer.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    transfer.wait()
    for thread in threads:
        thread.join()
    assert (target == source).all()


def test_a_forked_child_copies_too():
    memferry.icopy(bytearray(1 << 20), bytes(1 << 20)).wait()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            target = bytearray(2 << 20)
            memferry.copy(target, b"x" * (2 << 20))
            transfer = memferry.icopy(target, b"y" * (2 << 20))
            transfer.wait()
            os._exit(0 if target == b"y" * (2 << 20) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_the_interpreter_may_exit_with_copies_in_flight():
    program = """
import memferry
for _ in range(20):
    memferry.icopy(bytearray(16 << 20), bytes(16 << 20))
kept = memferry.icopy(bytearray(64 << 20), bytes(64 << 20))
"""
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", program], timeout=120)
        assert ended.returncode == 0


def test_statistics_and_explanations_are_there():
    memferry.icopy(bytearray(4 << 20), bytes(4 << 20)).wait()
    statistics = memferry.statistics()
    assert sum(channel["completed"] for channel in statistics["engines"]["cpu"]) > 0
    assert memferry.explain(100).startswith("Inline: ")
    assert memferry.explain(64 << 20, blocking=False)


def test_without_a_gpu_the_error_says_what_is_missing():
    try:
        memferry.register(bytearray(4096)).close()
    except memferry.Error as error:
        assert "NVIDIA driver" in str(error) or "GPU" in str(error)


def test_many_copies_are_one_transfer():
    sources = [pattern(size, seed) for seed, size in enumerate([*SIZES, *[100] * 300])]
    targets = [np.zeros_like(source) for source in sources]
    transfer = memferry.icopy_many(iter(targets), sources)
    transfer.wait()
    assert transfer.done and transfer.nbytes == sum(len(source) for source in sources)
    assert all((a == b).all() for a, b in zip(sources, targets))
    memferry.icopy_many([], []).wait()


def test_many_fills_are_one_transfer():
    filled = [np.zeros(size, np.uint8) for size in [*SIZES, *[100] * 300]]
    others = [bytearray(7), array.array("H", [0] * 9), (ctypes.c_ubyte * 5)()]
    transfer = memferry.ifill_many(iter([*filled, *others]), 7)
    transfer.wait()
    total = sum(memoryview(target).nbytes for target in [*filled, *others])
    assert transfer.done and transfer.ready == transfer.nbytes == total
    assert all(set(bytes(memoryview(target))) <= {7} for target in [*filled, *others])
    memferry.ifill_many(filled).wait()
    assert not any(target.any() for target in filled)
    memferry.ifill_many([]).wait()


def test_a_batch_of_fills_that_is_dropped_gives_its_buffers_back_when_it_is_complete():
    targets = [bytearray(1 << 20) for _ in range(8)]
    transfer = memferry.ifill_many(targets, 9)
    with pytest.raises(BufferError):
        # The transfer holds them until its handle is asked or gone.
        targets[0].extend(b"more")
    del transfer
    deadline = time.monotonic() + 60
    for target in targets:
        while True:
            memferry.release_buffers()
            try:
                target.append(9)
                break
            except BufferError:
                assert time.monotonic() < deadline
                time.sleep(0.001)
    assert all(target == b"\x09" * ((1 << 20) + 1) for target in targets)


def test_a_cancelled_batch_of_fills_says_so_and_gives_its_buffers_back():
    for _ in range(100):
        targets = [bytearray(1 << 20) for _ in range(16)]
        transfer = memferry.ifill_many(targets, 5)
        transfer.cancel()
        try:
            transfer.wait()
            # All of it had begun before.
            assert all(target == b"\x05" * (1 << 20) for target in targets)
        except memferry.Cancelled as error:
            filled = sum(target.count(5) for target in targets)
            assert f"cancelled after {filled} bytes" in str(error)
            assert transfer.done
            targets[0].extend(b"no view of it is left")
            return
    pytest.fail("no batch was cancelled")


def test_a_cancelled_copy_says_so():
    for _ in range(100):
        transfer = memferry.icopy(bytearray(16 << 20), bytes(16 << 20))
        transfer.cancel()
        try:
            transfer.wait()
        except memferry.Cancelled:
            return
    pytest.fail("no copy was cancelled")


def test_a_batch_of_fills_with_a_wrong_target_fills_nothing_and_says_why():
    first = bytearray(3)
    with pytest.raises(ValueError, match="read-only"):
        memferry.ifill_many([first, b"abc"], 1)
    with pytest.raises(TypeError, match="buffer protocol"):
        memferry.ifill_many([first, 5], 1)
    with pytest.raises(TypeError):
        memferry.ifill_many(3, 1)
    with pytest.raises(OverflowError):
        memferry.ifill_many([first], 256)
    assert first == bytes(3)
    memferry.release_buffers()
    first.extend(b"no view of it is left")


def test_a_batch_that_is_not_one_copies_nothing_and_says_why():
    first, second = bytearray(3), bytearray(2)
    with pytest.raises(ValueError, match="2 sources and 1 targets"):
        memferry.icopy_many([first], [b"abc", b"de"])
    with pytest.raises(ValueError, match="equal length"):
        memferry.icopy_many([first, second], [b"abc", b"d"])
    with pytest.raises(TypeError):
        memferry.icopy_many(3, [b"abc"])
    assert first == bytes(3)
    memferry.release_buffers()
    first.extend(b"no view of it is left")

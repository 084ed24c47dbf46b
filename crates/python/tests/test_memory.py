"""Whose memory is copied, by which name, and when it is given back."""

import ctypes
import time

import numpy as np
import pytest
from test_copies import Interface, pattern

import memferry


class HasObject(ctypes.Structure):
    _fields_ = [("number", ctypes.c_int), ("object", ctypes.py_object)]


class Outer(ctypes.Structure):
    _fields_ = [("inner", HasObject)]


class HidesObject(ctypes.Structure):
    _fields_ = [("a:b", ctypes.c_int), ("c", ctypes.py_object), ("d:e", ctypes.c_int)]


OBJECT = np.dtype(object)
POINTERS = [
    np.zeros(4, OBJECT),
    np.zeros(4, [("a", "<f8"), ("b", OBJECT)]),
    np.zeros(4, [("a", [("b", "<i4"), ("c", OBJECT, 2)])]),
    np.zeros(4, [("date", "<M8[s]"), ("b", OBJECT)]),
    Interface(np.zeros(4, OBJECT)),
    Interface(np.zeros(4, [("a", [("b", "<i4"), ("c", OBJECT)])])),
    np.array(["text"] * 4, np.dtypes.StringDType()),
    (ctypes.py_object * 4)(),
    (ctypes.POINTER(ctypes.c_int) * 4)(),
    (ctypes.CFUNCTYPE(None) * 4)(),
    (ctypes.c_void_p * 4)(),
    (ctypes.c_char_p * 4)(),
    (ctypes.c_wchar_p * 4)(),
    HasObject(),
    (Outer * 4)(),
    HidesObject(),
]


@pytest.mark.parametrize("wrong", POINTERS, ids=lambda wrong: type(wrong).__name__)
def test_objects_and_pointers_are_refused_with_the_name_of_the_argument(wrong):
    def refused(argument, call, *arguments):
        with pytest.raises(TypeError, match=rf'^{argument} has elements of the format ".+", which hold'):
            call(*arguments)

    plain = bytearray(32)
    refused("target", memferry.copy, wrong, plain)
    refused("source", memferry.copy, plain, wrong)
    refused("target", memferry.icopy, wrong, plain)
    refused("source", memferry.icopy, plain, wrong)
    refused(r"targets\[1\]", memferry.icopy_many, [plain, wrong], [plain, plain])
    refused(r"sources\[0\]", memferry.icopy_many, [plain], [wrong])
    refused("target", memferry.fill, wrong)
    refused(r"targets\[0\]", memferry.ifill_many, [wrong])
    refused("left", memferry.compare, wrong, plain)
    refused("right", memferry.compare, plain, wrong)
    refused("source", memferry.crc, wrong)
    refused("target", memferry.copy_crc, wrong, plain)
    refused("second", memferry.dualcast, plain, wrong, plain)
    refused("memory", memferry.register, wrong)
    # No view of it is left.
    plain.append(1)


def test_structured_types_without_objects_are_copied():
    inner = np.dtype([("O", "<i4"), ("P", "<c16"), ("X", "S3"), ("text", "<U2")])
    for dtype in [inner, np.dtype([("date", "<M8[s]"), ("all", inner, (2, 2))]), "V7", "M8[D]"]:
        source = np.zeros(5, dtype)
        source.view(np.uint8).reshape(-1)[:] = pattern(source.nbytes)
        target = np.zeros_like(source)
        memferry.copy(target, source)
        assert target.tobytes() == source.tobytes()


def test_all_calls_take_source_and_target_by_name():
    source, target = pattern(1000), bytearray(1000)

    def copied():
        was_copied = target == source.tobytes()
        memferry.fill(target=target, value=0)
        return was_copied

    memferry.copy(source=source, target=target)
    assert copied()
    memferry.icopy(source=source, target=target).wait()
    assert copied()
    assert memferry.copy_crc(source=source, target=target) == memferry.crc(source=source)
    assert copied()
    memferry.dualcast(source=source, first=target, second=bytearray(1000))
    assert copied()
    memferry.icopy_many(sources=[source], targets=[target]).wait()
    assert copied()
    memferry.ifill_many(targets=[target], value=7).wait()
    assert set(target) == {7}


def test_a_call_that_fails_gives_its_buffers_back_at_once_in_any_thread(in_worker):
    def fails(call):
        first, second = bytearray(64), bytearray(32)
        with pytest.raises((ValueError, TypeError)):
            call(first, second)
        first.append(1)
        second.append(1)

    calls = [
        lambda first, second: memferry.copy(first, second),
        lambda first, second: memferry.copy(bytes(64), first),
        lambda first, second: memferry.copy(first, 5),
        lambda first, second: memferry.icopy(first, second),
        lambda first, second: memferry.icopy_many([first, second], [first]),
        lambda first, second: memferry.icopy_many([first, second], [second, first]),
        lambda first, second: memferry.ifill_many([first, bytes(1)]),
        lambda first, second: memferry.compare(first, second),
        lambda first, second: memferry.copy_crc(first, second),
        lambda first, second: memferry.dualcast(first, second, first),
    ]
    for call in calls:
        in_worker(lambda: fails(call))


def test_a_transfer_that_is_dropped_when_it_is_complete_gives_its_buffers_back_at_once(in_worker):
    def drop():
        target = bytearray(1 << 20)
        transfer = memferry.icopy(target, bytes(1 << 20))
        while transfer.ready < transfer.nbytes:
            time.sleep(0.001)
        del transfer
        target.append(1)

    in_worker(drop)

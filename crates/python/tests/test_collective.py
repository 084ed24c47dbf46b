"""Collective operations of jobs."""

import multiprocessing
import os
import signal

import numpy as np
import pytest

import memferry

spawn = multiprocessing.get_context("spawn")
SIZE = 3


def operations(name, rank):
    job = memferry.Job.join(name, rank, SIZE, timeout=60)
    for count in [0, 1, 100, 200_000]:
        job.barrier()
        mine = np.arange(count, dtype=np.float64) + rank
        total = SIZE * np.arange(count) + 3
        sums = np.zeros_like(mine)
        job.allreduce(mine, out=sums)
        assert (sums == total).all()
        job.allreduce(mine, "max")
        assert (mine == np.arange(count) + SIZE - 1).all()
        bits = np.full(count, 1 << rank, np.uint8)
        job.reduce(bits, "or", root=1)
        assert (bits == (7 if rank == 1 else 1 << rank)).all()
        buffer = np.full(count, rank, np.int32)
        job.broadcast(buffer, root=2)
        assert (buffer == 2).all()
        block = np.full(count, rank, np.int16)
        every = np.repeat(np.arange(SIZE, dtype=np.int16), count)
        out = np.zeros(SIZE * count, np.int16)
        job.allgather(block, out)
        assert (out == every).all()
        out[:] = -1
        job.gather(block, out if rank == 1 else None, root=1)
        assert rank != 1 or (out == every).all()
        rows = np.repeat(10 * rank + np.arange(SIZE), count)
        got = np.zeros_like(rows)
        job.alltoall(rows, got)
        assert (got == np.repeat(10 * np.arange(SIZE) + rank, count)).all()
        job.alltoall(rows)
        assert (rows == got).all()


def functions(name, rank):
    job = memferry.Job.join(name, rank, SIZE, timeout=60)

    def smaller(into, other):
        into = np.frombuffer(into, np.int64)
        np.minimum(into, np.frombuffer(other, np.int64), out=into)

    mine = np.array([5 - rank, rank])
    job.allreduce(mine, smaller)
    assert mine.tolist() == [3, 0]
    with pytest.raises(ValueError, match="no operation"):
        job.allreduce(mine, "average")
    with pytest.raises(ValueError, match="integers only"):
        job.allreduce(np.zeros(2), "xor")
    with pytest.raises(TypeError, match="cannot be reduced"):
        job.allreduce(np.zeros(2, np.complex128))
    with pytest.raises(ValueError, match="read-only"):
        job.allreduce(b"12345678")
    with pytest.raises(ValueError, match="bytes"):
        job.allgather(mine, mine)
    job.barrier()

    def wrong(into, other):
        raise KeyError("mine")

    with pytest.raises(KeyError):
        job.allreduce(mine, wrong)


def failing_function(name, rank, error, count):
    """Rank 1 fails in its function: no other rank returns a wrong sum, and none waits for ever."""
    job = memferry.Job.join(name, rank, SIZE, timeout=60)

    def add(into, other):
        if rank == 1:
            raise error("on purpose")
        into = np.frombuffer(into, np.int64)
        into += np.frombuffer(other, np.int64)

    mine = np.ones(count, np.int64)
    if rank == 1:
        with pytest.raises(error, match="on purpose"):
            job.allreduce(mine, add)
    else:
        try:
            job.allreduce(mine, add)
            assert (mine == SIZE).all()
        except memferry.Error as stopped:
            assert "rank 1" in str(stopped)
    with pytest.raises(memferry.Error, match="rank 1 has stopped"):
        job.barrier()


def resizing_function(name, rank):
    job = memferry.Job.join(name, rank, SIZE, timeout=60)

    def shrink(into, other):
        memory = into.obj
        into.release()
        memory.clear()

    with pytest.raises(ValueError, match="resized"):
        job.allreduce(np.ones(2), shrink)


def victim(name, rank):
    job = memferry.Job.join(name, rank, SIZE, timeout=60)
    job.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(memferry.PeerDisconnected, match="rank 2"):
        job.barrier()


def run_ranks(name, target, *arguments, dies=None):
    others = [spawn.Process(target=target, args=(name, rank, *arguments)) for rank in range(1, SIZE)]
    for process in others:
        process.start()
    target(name, 0, *arguments)
    for rank, process in enumerate(others, 1):
        process.join(60)
        assert rank == dies or process.exitcode == 0


def test_every_operation_gives_the_right_result(name):
    run_ranks(name, operations)


def test_functions_combine_and_wrong_arguments_are_refused(name):
    run_ranks(name, functions)


@pytest.mark.parametrize("count", [1, 100, 200_000])
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_function_that_raises_on_one_rank_leaves_no_rank_with_a_wrong_result(name, error, count):
    run_ranks(name, failing_function, error, count)


def test_a_function_that_resizes_its_memory_is_an_error(name):
    run_ranks(name, resizing_function)


def test_a_rank_that_dies_is_named(name):
    run_ranks(name, victim, dies=2)


def test_operations_give_their_buffers_back_at_once_in_any_thread(name, in_worker):
    def operate():
        job = memferry.Job.join(name, 0, 1)
        data, out = bytearray(8), bytearray(8)
        calls = [
            lambda: job.broadcast(data),
            lambda: job.allreduce(data, out=out),
            lambda: job.reduce(data, out=out),
            lambda: job.gather(data, out),
            lambda: job.allgather(data, out),
            lambda: job.alltoall(data, out),
        ]
        for call in calls:
            call()
            for buffer in [data, out]:
                buffer.append(1)
            # One that fails: the lengths differ.
            out.append(1)
            if call is not calls[0]:
                with pytest.raises(ValueError):
                    call()
            out.pop()

    in_worker(operate)


def test_results_of_another_type_are_refused_by_the_names_of_both(name):
    job = memferry.Job.join(name, 0, 1)
    data, wrong = np.ones(4, np.float32), np.zeros(4, np.int32)
    for call in [job.allreduce, job.reduce, job.gather, job.allgather, job.alltoall]:
        with pytest.raises(TypeError, match="^data has elements of the type float32 and out of int32"):
            call(data, out=wrong)
        assert (wrong == 0).all()
        right = np.zeros(4, np.float32)
        call(data, out=right)
        assert (right == data).all()
    # One type by different names, and by different protocols.
    out = bytearray(4)
    for bytes_of in [bytes, bytearray, lambda data: np.frombuffer(data, np.uint8)]:
        job.allgather(bytes_of(b"1234"), out)
        assert out == b"1234"
    numbers, out = np.arange(4, dtype=np.dtype("q")), np.zeros(4, np.dtype("l"))
    job.allreduce(numbers, out=out)
    assert (out == numbers).all()
    with pytest.raises(TypeError, match=r"datetime64\[s\] and out of datetime64\[D\]"):
        job.allgather(np.zeros(1, "M8[s]"), np.zeros(1, "M8[D]"))


def late(name, rank):
    job = memferry.Job.join(name, rank, SIZE, timeout=60)
    job.barrier()
    # The handler has ended the operation of rank 0, which waits for the others.
    job.endpoint.recv(bytearray(2), source=job.peer(0), timeout=60)
    with pytest.raises(memferry.Error):
        job.barrier()


def test_a_handler_of_a_signal_ends_an_operation_on_all_ranks(name):
    others = [spawn.Process(target=late, args=(name, rank)) for rank in range(1, SIZE)]
    for process in others:
        process.start()
    job = memferry.Job.join(name, 0, SIZE, timeout=60)
    job.barrier()

    def handler(number, frame):
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, handler)
    with pytest.raises(InterruptedError):
        signal.setitimer(signal.ITIMER_REAL, 1)
        job.barrier()
    signal.signal(signal.SIGALRM, before)
    for rank in range(1, SIZE):
        job.endpoint.send(job.peer(rank), b"go", timeout=60)
    for process in others:
        process.join(60)
        assert process.exitcode == 0

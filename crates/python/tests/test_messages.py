"""Messages and windows between processes."""

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

import memferry

spawn = multiprocessing.get_context("spawn")


def run(target, *arguments):
    process = spawn.Process(target=target, args=arguments)
    process.start()
    return process


def ended(process, code=0):
    process.join(60)
    assert process.exitcode == code


def echo(name, rank, size, rounds):
    job = memferry.Job.join(name, rank, size, timeout=60)
    for _ in range(rounds):
        status = job.endpoint.probe(source=job.peer(0))
        data = bytearray(status.nbytes)
        job.endpoint.recv(data, source=job.peer(0), tag=status.tag)
        job.endpoint.send(job.peer(0), data, tag=status.tag + 1)


def test_arrays_travel_between_processes(name):
    sizes = [0, 1, 1000, 100_000, 9 << 20]
    process = run(echo, name, 1, 2, len(sizes))
    job = memferry.Job.join(name, 0, 2, timeout=60)
    assert (job.rank, job.size, job.rank_of(job.peer(1))) == (0, 2, 1)
    for tag, size in enumerate(sizes):
        sent = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
        back = np.zeros_like(sent)
        receive = job.endpoint.irecv(back, source=job.peer(1), tag=tag + 1)
        job.endpoint.send(job.peer(1), sent, tag=tag)
        assert receive.wait(60).nbytes == size
        assert (sent == back).all()
    ended(process)
    with pytest.raises(IndexError):
        job.peer(2)


def test_shareable_memory_is_an_array_and_travels(name):
    process = run(echo, name, 1, 2, 1)
    job = memferry.Job.join(name, 0, 2, timeout=60)
    buffer = memferry.ShareableBuffer(8 << 20)
    array = np.frombuffer(buffer, np.float64)
    array[:] = np.arange(len(array))
    back = memferry.ShareableBuffer(8 << 20)
    receive = job.endpoint.irecv(back)
    job.endpoint.send(job.peer(1), array)
    receive.wait(60)
    assert (np.frombuffer(back, np.float64) == array).all()
    ended(process)


def vanish(name):
    job = memferry.Job.join(name, 1, 2, timeout=60)
    job.endpoint.send(job.peer(0), b"ready")
    time.sleep(600)


def test_a_killed_peer_is_told_and_others_go_on(name):
    process = run(vanish, name)
    job = memferry.Job.join(name, 0, 2, timeout=60)
    job.endpoint.recv(bytearray(5), timeout=60)
    receive = job.endpoint.irecv(bytearray(100), source=job.peer(1))
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(memferry.PeerDisconnected):
        receive.wait(60)
    with pytest.raises(memferry.PeerDisconnected):
        for _ in range(1000):
            job.endpoint.send(job.peer(1), bytes(100_000), timeout=60)
    ended(process, -signal.SIGKILL)
    # Another peer can connect at once.
    with memferry.Endpoint(name + "-new", background=True) as other:
        peer = job.endpoint.connect(other.name)
        data = bytearray(3)
        receive = other.irecv(data)
        job.endpoint.send(peer, b"new", timeout=60)
        receive.wait(60)
        assert data == b"new"


def test_tags_sources_and_masks_select_messages(name):
    with memferry.Endpoint(name, background=True) as one, memferry.Endpoint(name + "-b") as two:
        peer = two.connect(one.name)
        for tag in [5, 6, 0x105]:
            two.send(peer, tag.to_bytes(2, "little"), tag=tag)
        got = bytearray(2)
        assert one.recv(got, tag=6, timeout=60).tag == 6
        assert one.recv(got, tag=5, mask=0xFF, timeout=60).tag == 5
        assert one.recv(got, tag=5, mask=0xFF, timeout=60).tag == 0x105
        assert one.probe(timeout=0) is None
        with pytest.raises(TimeoutError, match="receive of up to .* bytes with any tag from any peer .* 0.05 s"):
            one.recv(got, timeout=0.05)
        assert [one.name_of(other) for other in one.peers] == [two.name]


def test_a_message_that_is_too_long_is_an_error(name):
    with memferry.Endpoint(name, background=True) as one, memferry.Endpoint(name + "-b") as two:
        two.send(two.connect(one.name), b"five!")
        with pytest.raises(memferry.Error):
            one.recv(bytearray(3), timeout=60)


def test_a_closed_endpoint_says_so(name):
    endpoint = memferry.Endpoint(name)
    endpoint.close()
    endpoint.close()
    with pytest.raises(memferry.Error, match="closed"):
        endpoint.connect("anybody")
    with pytest.raises(memferry.Error):
        memferry.Endpoint(name + "-c").connect("nobody is there")


def putter(name, handle):
    with memferry.Endpoint(name + "-putter") as endpoint:
        window = endpoint.attach(endpoint.connect(name), handle)
        window.put(8, b"hello", notify=(0, 1))
        data = bytearray(5)
        window.get(8, data)
        assert data == b"hello"
        operations = [window.iput(4096 + 64 * n, bytes([n]) * 64) for n in range(32)]
        for operation in operations:
            operation.wait(60)
        window.fence()
        window.put(0, (2).to_bytes(8, "little"), notify=(0, 2))
        with pytest.raises(ValueError):
            window.put(window.nbytes, b"past the end")


@pytest.mark.parametrize("is_shareable", [False, True])
def test_a_window_is_written_by_another_process(name, is_shareable):
    memory = memferry.ShareableBuffer(1 << 16) if is_shareable else np.zeros(1 << 16, np.uint8)
    view = np.frombuffer(memory, np.uint8)
    with memferry.Endpoint(name, background=True) as endpoint:
        with endpoint.expose(memory) as window:
            process = run(putter, name, window.handle)
            assert window.wait(0, 1, timeout=60) >= 1
            assert bytes(view[8:13]) == b"hello"
            window.wait(0, 2, timeout=60)
            assert all((view[4096 + 64 * n : 4160 + 64 * n] == n).all() for n in range(32))
            ended(process)
            with pytest.raises(ValueError):
                window.load(1)
            with pytest.raises(ValueError):
                endpoint.expose(memory, read=False, write=False)
        with pytest.raises(memferry.Error):
            window.load(0)


def test_an_access_that_cannot_start_gives_its_buffer_back_at_once(name, in_worker):
    with memferry.Endpoint(name, background=True) as one, memferry.Endpoint(name + "-b") as two:
        with one.expose(bytearray(64)) as window:
            remote = two.attach(two.connect(one.name), window.handle)

            def fails():
                data = bytearray(8)
                for access in [remote.put, remote.get, remote.iput, remote.iget]:
                    with pytest.raises(ValueError):
                        access(60, data)
                    data.append(1)

            in_worker(fails)


def test_messages_of_objects_are_refused_with_the_name_of_the_argument(name):
    wrong = np.zeros(4, object)
    with memferry.Endpoint(name, background=True) as one, memferry.Endpoint(name + "-b") as two:
        peer = two.connect(one.name)
        with pytest.raises(TypeError, match='^data has elements of the format "O"'):
            two.send(peer, wrong)
        with pytest.raises(TypeError, match='^buffer has elements of the format "O"'):
            one.irecv(wrong)
        with pytest.raises(TypeError, match='^memory has elements of the format "O"'):
            one.expose(wrong)


def test_memory_that_is_read_only_is_not_changed_through_a_window(name):
    with memferry.Endpoint(name, background=True) as endpoint:
        with endpoint.expose(bytes(64), write=False) as window:
            with pytest.raises(ValueError, match="read-only"):
                window.store(0, 1)
            assert window.load(0) == 0
        with pytest.raises(ValueError, match="read-only"):
            endpoint.expose(bytes(64))


def test_handles_that_are_no_handles_are_refused(name):
    with memferry.Endpoint(name, background=True) as one, memferry.Endpoint(name + "-b") as two:
        peer = two.connect(one.name)
        with pytest.raises(ValueError):
            two.attach(peer, b"short")


def test_a_fork_is_noticed(name):
    endpoint = memferry.Endpoint(name)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            endpoint.connect("anybody")
        except memferry.Error as error:
            os._exit(0 if "fork" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    endpoint.close()


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(memferry.Error, match="rank 1"):
        memferry.Job.join(f"alone-{os.getpid()}", 0, 2, timeout=0.2)
    with pytest.raises(ValueError, match="timeout"):
        memferry.Job.join(f"alone-{os.getpid()}", 0, 2, timeout=-1)

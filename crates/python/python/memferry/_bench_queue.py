"""The bench ``queue``: arrays of 64 MiB that a worker process hands over, from memory to memory.

A way is an object that is sent to its worker. There it serves requests; here it receives.
"""

import contextlib
import ctypes
import importlib.util
import multiprocessing
import os
import queue
import threading
import time

import memferry

NBYTES = 64 << 20
# Seconds after which a worker that does not answer counts as dead.
PATIENCE = 60


class Way:
    """One way to hand an array over. Requests go through a queue."""

    name = None

    def __init__(self, context):
        self._requests, self._replies = context.Queue(), context.Queue()

    def connect(self):
        """Connects to the worker, after it was started."""

    def serve(self, data):
        """Hands the array over whenever it is asked, in the worker."""
        raise NotImplementedError

    def receive(self, target):
        """Asks for the array, and returns it: ``target``, or an array of its own."""
        raise NotImplementedError

    def _reply(self):
        try:
            return self._replies.get(timeout=PATIENCE)
        except queue.Empty:
            raise SystemExit(f"the worker of {self.name} gives no answer")


class Memferry(Way):
    """A message out of a ShareableBuffer."""

    name = "memferry"

    def __init__(self, _context):
        self._job_name = f"bench-queue-{os.getpid()}"

    def connect(self):
        self._job = memferry.Job.join(self._job_name, 0, 2, timeout=PATIENCE)

    def serve(self, data):
        import numpy as np

        job = memferry.Job.join(self._job_name, 1, 2, timeout=PATIENCE)
        array = np.frombuffer(memferry.ShareableBuffer(data.nbytes), np.uint8)
        array[:] = data
        while True:
            job.endpoint.recv(bytearray(1))
            job.endpoint.send(job.peer(0), array)

    def receive(self, target):
        self._job.endpoint.send(self._job.peer(1), b"?")
        self._job.endpoint.recv(target, timeout=PATIENCE)
        return target


class Queue(Way):
    """A pickled array through a pipe."""

    name = "multiprocessing.Queue"

    def serve(self, data):
        while True:
            self._requests.get()
            self._replies.put(data)

    def receive(self, target):
        self._requests.put(1)
        return self._reply()


class SharedMemory(Way):
    """A block of shared memory for each array."""

    name = "multiprocessing.shared_memory"

    def serve(self, data):
        import numpy as np
        from multiprocessing import shared_memory

        while True:
            self._requests.get()
            block = shared_memory.SharedMemory(create=True, size=data.nbytes)
            np.frombuffer(block.buf, np.uint8)[:] = data
            self._replies.put(block.name)
            block.close()

    def receive(self, target):
        import numpy as np
        from multiprocessing import shared_memory

        self._requests.put(1)
        block = shared_memory.SharedMemory(self._reply())
        target[:] = np.frombuffer(block.buf, np.uint8)
        block.close()
        block.unlink()
        return target


class Iceoryx(Way):
    """A loaned sample of iceoryx2, which the worker fills and the receiver copies out."""

    name = "iceoryx2"

    def __init__(self, context):
        super().__init__(context)
        self._service_name = f"memferry-bench-queue-{os.getpid()}"

    def _open(self):
        import iceoryx2

        iceoryx2.set_log_level(iceoryx2.LogLevel.Error)
        node = iceoryx2.NodeBuilder.new()
        node = node.signal_handling_mode(iceoryx2.SignalHandlingMode.Disabled)
        node = node.create(iceoryx2.ServiceType.Ipc)
        service = node.service_builder(iceoryx2.ServiceName.new(self._service_name))
        service = service.publish_subscribe(iceoryx2.Slice[ctypes.c_uint8]).open_or_create()
        # The node must live as long as its service.
        return node, service

    def connect(self):
        self._node, service = self._open()
        self._subscriber = service.subscriber_builder().create()
        # The publisher knows its subscriber from now on.
        self._reply()

    def serve(self, data):
        import numpy as np

        _node, service = self._open()
        publisher = service.publisher_builder().initial_max_slice_len(data.nbytes).create()
        while service.dynamic_config.number_of_subscribers < 1:
            time.sleep(0.001)
        publisher.update_connections()
        self._replies.put(1)
        while True:
            self._requests.get()
            sample = publisher.loan_slice_uninit(data.nbytes)
            np.frombuffer(sample.payload().as_memory_view(), np.uint8)[:] = data
            sample.assume_init().send()

    def receive(self, target):
        import numpy as np

        self._requests.put(1)
        deadline = time.monotonic() + PATIENCE
        while (sample := self._subscriber.receive()) is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"the worker of {self.name} gives no answer")
        target[:] = np.frombuffer(sample.payload().as_memory_view(), np.uint8)
        sample.delete()
        return target


def _exit_with_parent():
    multiprocessing.parent_process().join()
    os._exit(1)


def _work(way):
    """What a worker does until it is terminated."""
    import numpy as np

    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with contextlib.suppress(memferry.PeerDisconnected):
        way.serve(np.ones(NBYTES, np.uint8))


def measure(bench):
    """Compares the ways."""
    import numpy as np

    kinds = [Memferry, Queue, SharedMemory]
    if importlib.util.find_spec("iceoryx2"):
        kinds.append(Iceoryx)
    else:
        bench.missing.append("iceoryx2 (pip install iceoryx2)")
    context = multiprocessing.get_context("spawn")
    target = np.empty(NBYTES, np.uint8)
    runs, workers = {}, []
    for kind in kinds:
        way = kind(context)
        worker = context.Process(target=_work, args=(way,), daemon=True)
        worker.start()
        workers.append(worker)
        try:
            way.connect()
            target[:] = 0
            if not (way.receive(target) == 1).all():
                raise SystemExit(f"wrong bytes by {way.name}")
        except Exception as error:
            if kind is not Iceoryx:
                raise
            bench.missing.append(f"{way.name} ({error})")
            continue
        runs[way.name] = lambda way=way: way.receive(target)
    times = bench.measure("64 MiB from a worker", NBYTES, runs)
    bench.key("queue_64m_vs_multiprocessing", times, Memferry.name, Queue.name)
    for worker in workers:
        worker.terminate()
        worker.join()

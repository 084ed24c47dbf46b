"""Workers that prepare large arrays and hand them over, as data loaders do.

    python examples/workers.py [WORKERS] [BATCHES]

The arrays travel by Memferry, without pickle and without a copy into a pipe. Each receive names its
worker, so that one that is killed is noticed.
"""

import multiprocessing
import os
import sys
import time

import numpy as np

import memferry

SHAPE = (256, 3, 224, 224)
# Seconds that the interpreters of all workers may take to start.
PATIENCE = 60


def work(name, rank, size, batches):
    job = memferry.Job.join(name, rank, size, timeout=PATIENCE)
    # Memory that the receiver maps: one buffer for each worker, used again for every batch.
    batch = np.frombuffer(memferry.ShareableBuffer(int(np.prod(SHAPE))), np.uint8).reshape(SHAPE)
    for number in range(batches):
        batch.fill((rank + number) % 256)
        job.endpoint.send(job.peer(0), batch, tag=number)


def main(workers=2, batches=10):
    name = f"workers-{os.getpid()}"
    context = multiprocessing.get_context("spawn")
    size = workers + 1
    processes = [
        context.Process(target=work, args=(name, rank, size, batches)) for rank in range(1, size)
    ]
    for process in processes:
        process.start()
    job = memferry.Job.join(name, 0, size, timeout=PATIENCE)
    batch = np.empty(SHAPE, np.uint8)
    started, received = time.perf_counter(), 0
    for number in range(batches):
        for rank in range(1, size):
            status = job.endpoint.recv(batch, source=job.peer(rank), tag=number)
            assert (batch == (rank + number) % 256).all()
            received += status.nbytes
    seconds = time.perf_counter() - started
    for process in processes:
        process.join()
    print(f"{workers * batches} batches, {received / seconds / 1e9:.1f} GB/s with every byte checked")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))

"""Copies and messages in event loops."""

import asyncio
import contextlib
import os

import numpy as np
import pytest

import memferry


def test_thousands_of_copies_are_awaited_together():
    source = np.arange(20_000, dtype=np.uint32)

    async def one():
        target = np.zeros_like(source)
        await memferry.icopy(target, source)
        return (target == source).all()

    async def everything():
        return await asyncio.gather(*(one() for _ in range(3000)))

    before = len(os.listdir("/proc/self/fd"))
    assert all(asyncio.run(everything()))
    # One descriptor for the loop, none for each copy.
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_large_copies_leave_the_loop_running():
    async def main():
        source, target = bytes(64 << 20), bytearray(64 << 20)
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        for _ in range(5):
            await memferry.icopy(target, source)
        ticking.cancel()
        return ticks

    assert asyncio.run(main()) > 0


def test_a_cancelled_task_leaves_its_copy_alone():
    async def main():
        source, target = np.ones(8 << 20, np.uint8), np.zeros(8 << 20, np.uint8)
        transfer = memferry.icopy(target, source)

        async def wait():
            await transfer

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        # A copy that was complete before does not notice it.
        with contextlib.suppress(asyncio.CancelledError):
            await task
        transfer.wait()
        return (target == source).all()

    assert asyncio.run(main())


def test_one_transfer_may_be_awaited_several_times():
    async def main():
        transfer = memferry.icopy(bytearray(4 << 20), bytes(4 << 20))

        async def wait():
            await transfer

        await asyncio.gather(*(wait() for _ in range(5)))
        await transfer

    asyncio.run(main())


def test_one_loop_after_another_works():
    async def main():
        target = bytearray(100_000)
        await memferry.icopy(target, b"z" * 100_000)
        return target == b"z" * 100_000

    assert all(asyncio.run(main()) for _ in range(5))


def test_messages_are_awaited(name):
    async def main():
        with memferry.Endpoint(name) as one, memferry.Endpoint(name + "-other", background=True) as other:
            loop = asyncio.get_running_loop()
            peer = await loop.run_in_executor(None, one.connect, other.name)
            buffers = [bytearray(1000 + number) for number in range(50)]
            receives = [other.irecv(buffer, tag=number) for number, buffer in enumerate(buffers)]
            for number in reversed(range(50)):
                await one.isend(peer, bytes([number]) * (1000 + number), tag=number)
            for number, receive in enumerate(receives):
                status = await receive
                assert (status.tag, status.nbytes) == (number, 1000 + number)
                assert buffers[number] == bytes([number]) * (1000 + number)
            with pytest.raises(memferry.Cancelled):
                receive = other.irecv(bytearray(8), tag=999)
                receive.cancel()
                await receive

    asyncio.run(main())


def test_an_error_reaches_the_task_that_awaits(name):
    async def main():
        endpoint = memferry.Endpoint(name, background=True)
        receive = endpoint.irecv(bytearray(8))

        async def wait():
            await receive

        task = asyncio.create_task(wait())
        await asyncio.sleep(0.01)
        endpoint.close()
        with pytest.raises(memferry.Error):
            await task

    asyncio.run(main())


def test_a_receive_that_timed_out_does_not_take_the_next_message(name):
    async def main():
        with memferry.Endpoint(name, background=True) as one, memferry.Endpoint(name + "-b") as two:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(one.irecv(bytearray(8)), 0.05)
            loop = asyncio.get_running_loop()
            peer = await loop.run_in_executor(None, two.connect, one.name)
            await two.isend(peer, b"late")
            buffer = bytearray(8)
            status = await asyncio.wait_for(one.irecv(buffer), 60)
            assert status.nbytes == 4 and buffer[:4] == b"late"

    asyncio.run(main())


def test_everybody_who_awaits_one_operation_is_told(name):
    async def main():
        with memferry.Endpoint(name, background=True) as one, memferry.Endpoint(name + "-b") as two:
            loop = asyncio.get_running_loop()
            peer = await loop.run_in_executor(None, two.connect, one.name)
            receive, called = one.irecv(bytearray(8)), asyncio.Event()
            receive.add_done_callback(lambda _: loop.call_soon_threadsafe(called.set))

            async def wait():
                return (await receive).nbytes

            tasks = [asyncio.create_task(wait()) for _ in range(4)]
            await asyncio.sleep(0.01)
            await two.isend(peer, b"for all")
            assert await asyncio.wait_for(asyncio.gather(*tasks), 60) == [7] * 4
            await asyncio.wait_for(called.wait(), 60)

    asyncio.run(main())


def test_an_operation_tells_only_those_who_still_await_it(name):
    class Recorder:
        """A reactor, and the numbers that it was told."""

        def __init__(self, reactor):
            self._reactor, self.told = reactor, []

        def take(self):
            numbers = self._reactor.take()
            self.told += numbers
            return numbers

        def __getattr__(self, attribute):
            return getattr(self._reactor, attribute)

    async def main():
        with memferry.Endpoint(name, background=True) as one, memferry.Endpoint(name + "-b") as two:
            loop = asyncio.get_running_loop()
            peer = await loop.run_in_executor(None, two.connect, one.name)
            receive = one.irecv(bytearray(8))

            async def wait():
                return (await receive).nbytes

            async def give_up():
                task = asyncio.create_task(wait())
                await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

            await give_up()
            reactor = memferry._completion._loops[loop]
            recorder = reactor._reactor = Recorder(reactor._reactor)
            for _ in range(1000):
                await give_up()
            task = asyncio.create_task(wait())
            await asyncio.sleep(0)
            await loop.run_in_executor(None, two.send, peer, b"once")
            assert await asyncio.wait_for(task, 60) == 4
            assert len(set(recorder.told)) == 1

    asyncio.run(main())

"""Awaiting copies and messages, and callbacks when they are complete.

Each event loop has one eventfd for all handles it awaits, registered by ``loop.add_reader``: no
helper thread. Callbacks outside of a loop run on one daemon thread, which is started by the first
of them.
"""

import asyncio
import atexit
import itertools
import logging
import os
import select
import threading
import weakref

from memferry._memferry import Reactor, stop


class _LoopReactor:
    """The handles that one event loop awaits."""

    def __init__(self, loop):
        self._reactor = Reactor()
        self._loop = weakref.ref(loop)
        self._numbers = itertools.count()
        self._awaited = {}
        loop.add_reader(self._reactor.fileno(), self._look)

    def wait_for(self, handle):
        """A future of the loop that ends with the handle."""
        future = self._loop().create_future()
        number = next(self._numbers)
        if self._reactor.watch(handle, number):
            _settle(future, handle)
        else:
            self._awaited[number] = (future, handle)
            future.add_done_callback(lambda future: self._forget(future, handle, number))
        return future

    def _forget(self, future, handle, number):
        # Nobody awaits it any more. A copy goes on by itself; a receive without a handle is
        # cancelled, and does not take the next message.
        if future.cancelled():
            self._awaited.pop(number, None)
            self._reactor.forget(handle, number)

    def _look(self):
        for number in self._reactor.take():
            future, handle = self._awaited.pop(number, (None, None))
            if handle is None:
                continue
            if self._reactor.watch(handle, number):
                _settle(future, handle)
            else:
                self._awaited[number] = (future, handle)


def _settle(future, handle):
    if future.done():
        return
    try:
        future.set_result(handle.wait(0))
    except Exception as error:
        future.set_exception(error)


_loops = weakref.WeakKeyDictionary()


def await_handle(handle):
    """What ``handle.__await__`` returns."""
    loop = asyncio.get_running_loop()
    reactor = _loops.get(loop)
    if reactor is None:
        reactor = _loops[loop] = _LoopReactor(loop)
    return reactor.wait_for(handle).__await__()


class _CallbackThread:
    """Calls functions when handles are complete."""

    def __init__(self):
        self._reactor = Reactor()
        self._numbers = itertools.count()
        self._watched = {}
        self._lock = threading.Lock()
        thread = threading.Thread(target=self._run, name="memferry-callbacks", daemon=True)
        thread.start()

    def watch(self, handle, function):
        with self._lock:
            number = next(self._numbers)
            self._watched[number] = (handle, function)
        if self._reactor.watch(handle, number):
            self._call(number)

    def _call(self, number):
        with self._lock:
            handle, function = self._watched.pop(number, (None, None))
        if function is not None:
            try:
                function(handle)
            except BaseException:
                logging.getLogger("memferry").exception("a callback raised")

    def _run(self):
        poll = select.poll()
        poll.register(self._reactor.fileno(), select.POLLIN)
        while True:
            poll.poll()
            for number in self._reactor.take():
                with self._lock:
                    handle, _ = self._watched.get(number, (None, None))
                if handle is not None and self._reactor.watch(handle, number):
                    self._call(number)


_callbacks = None
_callbacks_lock = threading.Lock()


def add_done_callback(handle, function):
    """Calls ``function(handle)`` when it is complete; at once if it is."""
    global _callbacks
    with _callbacks_lock:
        if _callbacks is None:
            _callbacks = _CallbackThread()
    _callbacks.watch(handle, function)


def _after_fork_in_child():
    # The thread and the loops are the parent's.
    global _callbacks, _callbacks_lock
    _callbacks, _callbacks_lock = None, threading.Lock()
    _loops.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
# The last thing at exit: what is in flight by then is not given back.
atexit.register(stop)

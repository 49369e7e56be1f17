"""Stopping a run in good order: SIGTERM (a preempted machine) and Ctrl-C end it after the step it is in.

Python calls the handler of a signal between two instructions of its own, so not while a program compiles or a step
computes. A thread hears of signals at once: the first is a request, which the loop asks about after each step; the
second ends the process wherever it is, like SIGKILL.
"""

import contextlib
import os
import signal
import socket
import threading

import jax
import numpy as np
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def leave(received, kept):
    """Print ``kept``, what the run will go on from, in the first process, and exit: 0 after SIGTERM, 130 after Ctrl-C."""
    if jax.process_index() == 0:
        print(f"{received.name}: stopped; {kept}, and the same command goes on from there", flush=True)
    raise SystemExit(130 if received == signal.SIGINT else 0)


class StopRequest:
    """``received``: the signal that asked this process to stop; None so far."""

    received = None

    def agreed(self):
        """-> the signal that asked any process of the run to stop, the same in all of them, or None.

        With several processes this waits for all of them: each calls it after every step.
        """
        if jax.process_count() == 1:
            return self.received
        number = int(np.max(multihost_utils.process_allgather(np.int32(self.received or 0))))
        return signal.Signals(number) if number else None


@contextlib.contextmanager
def stop_requests():
    """-> `StopRequest`, while signals are requests. For programs: a notebook would lose its kernel to the second one.

    Raises ValueError outside the main thread, which alone may set handlers.
    """
    request = StopRequest()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    watcher = threading.Thread(target=_watch, args=(reader, request), daemon=True)
    descriptor = signal.set_wakeup_fd(writer.fileno())
    watcher.start()
    handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not set from Python
        signal.set_wakeup_fd(descriptor)
        writer.close()
        watcher.join()
        reader.close()


def _watch(reader, request):
    while data := reader.recv(1):  # the number of a signal, or nothing once the other end is closed
        if data[0] not in SIGNALS:
            continue
        if request.received is not None:
            os._exit(128 + data[0])
        request.received = signal.Signals(data[0])

"""The process from which ``warm_judge`` forks judges: ``serve`` runs until stdin is closed.

It has one thread, imports no candidate, and gives each fork what ``JudgeProcess`` gives a fresh interpreter: path,
environment, folder, files, and a session of its own. Like a judge's, its ``__main__`` is not a file: workers would
import it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing.process
import os
import selectors
import signal
import socket
import sys
import warnings

from warm_judge import settings

_LIMIT = 1 << 20


def serve(place: str) -> None:
    """Fork a judge for each request that comes to the socket."""
    gc.disable()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(place)
    listening.listen(64)
    print("ready", flush=True)
    ours = settings(os.environ)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    chosen = selectors.DefaultSelector()
    for each in (listening, woken, 0):
        chosen.register(each, selectors.EVENT_READ)
    running: dict[int, socket.socket] = {}
    while True:
        ready = {key.fileobj for key, _ in chosen.select()}
        if 0 in ready:
            os._exit(0)
        if woken in ready:
            os.read(woken, 4096)
            _report(running)
        if listening in ready:
            connection, _ = listening.accept()
            message, files, _, _ = socket.recv_fds(connection, _LIMIT, 3)
            asked = json.loads(message)
            if settings(asked["environment"]) != ours or len(files) != 3:
                connection.send(b"no")
            else:
                _import()
                with warnings.catch_warnings():
                    # As in forking.py: of threads that OpenBLAS keeps.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    pid = os.fork()
                if not pid:
                    chosen.close()
                    os.setsid()
                    connection.send(str(os.getpid()).encode())
                    _judge(asked, files, [listening.fileno(), connection.fileno(), woken, wakes, *_numbers(running)])
                running[pid] = connection
            for file in files:
                os.close(file)


def _numbers(running: dict[int, socket.socket]) -> list[int]:
    return [each.fileno() for each in running.values()]


def _report(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        connection = running.pop(pid)
        with contextlib.suppress(OSError):  # the front end has gone
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        connection.close()


def _import() -> None:
    from attn_testkit.running.processes import forking, judge_process

    if judge_process.RUNNER not in sys.modules:
        for name in (*forking._preloaded, *forking._EMULATED, forking._LAST, judge_process.RUNNER):
            importlib.import_module(name)


def _warn_as(options: str) -> None:
    """The filters of ``PYTHONWARNINGS``, as far as tests set it: an action for all warnings."""
    for action in filter(None, options.split(",")):
        warnings.simplefilter(action)  # type: ignore[arg-type]


def _judge(asked: dict[str, object], files: list[int], ours: list[int]) -> None:
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in ours:
            os.close(number)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for file, number in ((nothing, 0), (files[0], 1), (files[1], 2)):
            os.dup2(file, number)
            os.close(file)
        os.chdir(str(asked["folder"]))
        multiprocessing.process.ORIGINAL_DIR = str(asked["folder"])  # where workers look for what lies in ""
        os.environ.clear()
        os.environ.update(asked["environment"])  # type: ignore[call-overload]
        sys.path[:] = asked["path"]  # type: ignore[assignment]
        sys.argv[:] = ["-c", "", str(files[2]), str(asked["runner"])]
        _warn_as(os.environ.get("PYTHONWARNINGS", ""))
        from attn_testkit.running.processes.judge_process import _serve

        _serve()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)

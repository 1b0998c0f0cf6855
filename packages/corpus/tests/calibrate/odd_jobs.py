"""What a child of the calibration does with jobs that end it, hang it or spoil it."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

from attn_testkit_corpus.calibrate import workers
from attn_testkit_corpus.calibrate.jobs import Job


def run(job: Job) -> str:
    if job.name == "dies":
        os._exit(3)
    if job.name == "hangs":
        time.sleep(600)
    if job.name == "spoils":
        return "capture error: sticky"
    return f"eager error: in process {os.getpid()}"


def serve(connection: Connection) -> None:
    workers.run = run
    workers.serve(connection)

"""Cells in processes of their own: a crash is the end of one cell, and no more."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from hal.core.verify.matrix.cells import Site, run_cell
from hal.core.verify.matrix.report import CellResult
from hal.core.verify.matrix.table import Cell

_AHEAD = 2
"""Cells that are handed out for each worker: enough that none waits."""


@dataclass(frozen=True)
class Job:
    """One cell to run, with the requests of its rounds."""

    cell: Cell
    requests: int


def run(site: Site, jobs: Sequence[Job], workers: int) -> Iterator[CellResult]:
    """The results of all jobs as they come; with 0 workers in this process, in order."""
    if workers == 0:
        yield from (run_cell(site, job.cell, job.requests) for job in jobs)
        return
    left = list(jobs)
    while left:
        for job, result in _batch(site, left, workers):
            left.remove(job)
            yield result
        if left:  # a worker has died: whatever did it is among the first that have no result
            suspect = left.pop(0)
            yield _alone(site, suspect)


def _batch(site: Site, jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, CellResult]]:
    """Results until all are there, or a worker dies."""
    waiting = list(reversed(jobs))
    running: dict[Future[CellResult], Job] = {}
    with _pool(workers) as pool:
        while waiting or running:
            while waiting and len(running) < workers * _AHEAD:
                job = waiting.pop()
                try:
                    running[pool.submit(run_cell, site, job.cell, job.requests)] = job
                except BrokenProcessPool:
                    waiting.clear()
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                job = running.pop(future)
                if isinstance(future.exception(), BrokenProcessPool):
                    waiting.clear()
                else:
                    yield job, future.result()


def _alone(site: Site, job: Job) -> CellResult:
    """The result of a job in a process of its own; broken when that dies too."""
    with _pool(1) as pool:
        try:
            return pool.submit(run_cell, site, job.cell, job.requests).result()
        except BrokenProcessPool:
            return CellResult.broken(job.cell, "its process died; run the cell alone to see why")


def _pool(workers: int) -> ProcessPoolExecutor:
    """Fresh interpreters: no device, lock or thread of this process is in them."""
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))

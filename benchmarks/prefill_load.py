"""The load of a prefill benchmark: prompts, clients that send them, and readers that take what is staged."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import threading
import time
from itertools import count
from typing import Any

import numpy as np

from backend.extraction.staging import Staging, StagingError

RUN, READERS = "h200", 3


def prompts(config: dict[str, Any], mean: int, tokens: int, seed: int) -> list[list[int]]:
    """Return prompts of so many tokens in all; their lengths spread as a dataset's do."""
    chance, found, total = np.random.default_rng(seed), [], 0
    while total < tokens:
        length = int(np.clip(chance.lognormal(0, 0.6) * mean / 1.197, 16, 8000))
        found.append(chance.integers(3, config["vocab_size"], length).tolist())
        total += length
    return found


def read(folder: str, session: str, number: int, ready: Any, stop: Any, taken: Any, last: Any) -> None:
    """Take and discard a session's files that fall to this reader; count them, failures below zero."""
    staging = Staging(folder, RUN, session)
    ready.wait()
    while not stop.is_set():
        seen = staging.look()
        for rid in [rid for rid in seen.whole if int(rid.split("-")[2]) % READERS == number]:
            staged = staging.open(rid)
            if len(staged.ids) != int(rid.split("-")[4]):
                raise StagingError(f"{staged.path}: {len(staged.ids)} rows")
            staged.discard()
            taken.value += 1
            last.value = time.monotonic()
        if seen.failed and number == 0:
            print("failed", seen.failed[:3], [staging.reason(rid) for rid in seen.failed[:3]], flush=True)
        time.sleep(0.001)


class Readers:
    """Processes that take what a session stages."""

    def __init__(self, folder: str, session: str) -> None:
        context = multiprocessing.get_context("spawn")
        ready, self._stop = context.Barrier(READERS + 1), context.Event()
        self._taken = [context.Value("q") for _ in range(READERS)]
        self._last = [context.Value("d") for _ in range(READERS)]
        self._processes = [
            context.Process(target=read, args=(folder, session, i, ready, self._stop, self._taken[i], self._last[i]))
            for i in range(READERS)
        ]
        for process in self._processes:
            process.start()
        ready.wait(60)

    def finish(self, wanted: int) -> tuple[int, float]:
        """Wait for what was sent; return how many files came and when the last one did."""
        end = time.monotonic() + 15
        while sum(value.value for value in self._taken) < wanted and time.monotonic() < end:
            time.sleep(0.002)
        self._stop.set()
        for process in self._processes:
            process.join()
        return sum(value.value for value in self._taken), max(value.value for value in self._last)


def load(port: int, ids: list[list[int]], clients: int, new: int, names: list[str]) -> tuple[float, float]:
    """Send everything with so many clients; return when it began and when the last answer came."""
    bodies = [
        json.dumps({"rid": name, "input_ids": tokens, "stream": False, "sampling_params": {
            "max_new_tokens": new, "temperature": 0.0, "ignore_eos": True}}).encode()
        for name, tokens in zip(names, ids, strict=True)
    ]  # fmt: skip
    numbers, lock, wrong = count(), threading.Lock(), []

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        while True:
            with lock:
                number = next(numbers)
            if number >= len(bodies):
                break
            connection.request("POST", "/generate", bodies[number], {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200 or json.loads(text)["meta_info"]["prompt_tokens"] != len(ids[number]):
                wrong.append(text[:300])
        connection.close()

    threads = [threading.Thread(target=client) for _ in range(clients)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ended = time.monotonic()
    if wrong:
        raise RuntimeError(f"{len(wrong)} answers are wrong, the first {wrong[0]!r}")
    return began, ended

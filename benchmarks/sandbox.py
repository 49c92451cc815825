"""Short executions a second in the sandbox, per isolation level and number of clients.

    python benchmarks/sandbox.py [--seconds 3] [--workers 2]

One execution is a fork, a loop of a thousand iterations and a JSON reply: the size of a usual tool call. The figure
depends on what else the machine does; the load average is printed beside it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time

from astrolabe.envs.sandbox import LEVELS, Sandbox, sandbox_level

CODE = """
def tool(n, *, data):
    total = 0
    for i in range(n):
        total += i % 7
    return {"total": total, "of": data["name"]}
"""


def measure(box: Sandbox, clients: int, seconds: float) -> tuple[float, float]:
    """(executions a second, median milliseconds of one)."""
    latencies: list[list[float]] = [[] for _ in range(clients)]
    until = time.perf_counter() + seconds

    def client(mine: list[float]) -> None:
        while (start := time.perf_counter()) < until:
            done = box.run(CODE, "tool", {"n": 1000}, data={"name": "bench"})
            if done.status != "ok":
                raise SystemExit(f"an execution failed: {done}")
            mine.append(time.perf_counter() - start)

    threads = [threading.Thread(target=client, args=(mine,)) for mine in latencies]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = [latency for mine in latencies for latency in mine]
    return len(everything) / (time.perf_counter() - start), 1000 * statistics.median(everything)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    report = sandbox_level()
    print(f"this machine: level {report.level}, namespaces {report.namespaces}, landlock ABI {report.landlock}")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.workers} workers")
    print(f"{'level':10} {'clients':>7} {'exec/s':>8} {'p50 ms':>8}")
    for level in LEVELS:
        if sandbox_level(level).level != level:
            print(f"{level:10} not reached here: {'; '.join(sandbox_level(level).notes)}")
            continue
        with Sandbox("rlimits", workers=options.workers, at_most=level) as box:
            measure(box, options.workers, 0.3)
            for clients in sorted({1, options.workers, 2 * options.workers}):
                rate, median = measure(box, clients, options.seconds)
                print(f"{level:10} {clients:7d} {rate:8.0f} {median:8.2f}", flush=True)
    with Sandbox(workers=options.workers) as box:
        start, calls = time.perf_counter(), [{"n": 1000}] * 500
        box.run_many(CODE, "tool", calls, data={"name": "bench"})
        print(f"{'same child':10} {1:7d} {len(calls) / (time.perf_counter() - start):8.0f}")


if __name__ == "__main__":
    main()

"""One answer while stages fail: steps a second, by failure rate and length, resuming against starting over.

    PYTHONHASHSEED=0 python bench/failure_rates.py [--tokens 128 1024] [--rates 0 1e-4 1e-3 1e-2]

The figure of `meshinfer/testing/failing_stages.py`, alone; `./scripts/chaos` has it too. Virtual time: what limits the
steps are the stated speeds, and what a failure costs is what the protocol waits for. PYTHONHASHSEED, as the order of
sets of words is part of what a seed replays. Exit code 0 only if every token was right and every cell met enough failures.
Last line: the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from functools import partial

from meshinfer.testing import failing_stages


def main() -> int:
    parser = argparse.ArgumentParser(description="Steps a second of an answer while stages fail.")
    parser.add_argument("--tokens", type=int, nargs="+", default=failing_stages.LENGTHS)
    parser.add_argument("--rates", type=float, nargs="+", default=failing_stages.RATES)
    given = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    began = time.monotonic()
    fine = failing_stages.figure(partial(print, flush=True), tuple(given.tokens), tuple(given.rates))
    minutes, cpu_minutes = (time.monotonic() - began) / 60, time.process_time() / 60
    print(json.dumps({"fine": fine, "minutes": round(minutes, 1), "cpu_minutes": round(cpu_minutes, 1)}))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())

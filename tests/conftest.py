"""For all tests: what a property may cost, and what a collection of garbage."""

import gc

from hypothesis import settings

# No deadline for an example: it would be an assertion on time, and fail on a machine that is busy.
settings.register_profile("meshinfer", deadline=None)
settings.load_profile("meshinfer")


def pytest_collection_finish() -> None:
    """What was imported stays; no collection needs to walk through it again, and the engine's tests collect after each."""
    gc.collect()
    gc.freeze()

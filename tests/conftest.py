"""For all tests: what a property may cost."""

from hypothesis import settings

# No deadline for an example: it would be an assertion on time, and fail on a machine that is busy.
settings.register_profile("meshinfer", deadline=None)
settings.load_profile("meshinfer")

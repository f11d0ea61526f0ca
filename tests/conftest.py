"""Makes the tests independent of how busy the machine is and of how they are started."""

import signal

from hypothesis import HealthCheck, settings

# A shell starts background jobs with SIGINT ignored, and their children inherit that; tests send SIGINT to commands.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The time that an example takes depends on how busy the machine is.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")

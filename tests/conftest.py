"""What holds for every test, on an idle machine or a busy one."""

import signal

from hypothesis import HealthCheck, settings

# A shell's background jobs, and all that they start, ignore Ctrl-C; the commands under test are sent it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes, to make or to run, says how busy the machine is.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")

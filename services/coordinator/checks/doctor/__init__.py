"""`lockstep doctor`: checks a host and services before a run starts on them. Changes nothing."""

"""`lockstep doctor`: looks at a host, and at services, before a run is begun on them. Changes nothing."""

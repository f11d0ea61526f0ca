"""Implements `lockstep report`, which writes a run's results as one HTML page that needs no network and no server."""

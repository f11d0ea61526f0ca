"""Implements `lockstep doctor`, which checks a host and services before a run starts on them. Changes nothing."""

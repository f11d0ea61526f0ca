"""Implements `lockstep replay`, which repeats a recorded step and checks that it gives the same rewards and weights."""

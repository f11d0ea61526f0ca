"""`lockstep replay`: repeats a recorded step and checks that it gives the same rewards and weights."""

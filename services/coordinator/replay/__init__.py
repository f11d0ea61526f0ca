"""`lockstep replay`: whether a recorded step gives the same rewards and the same weights again."""

"""The environments in which episodes are played, and the processes that play them."""

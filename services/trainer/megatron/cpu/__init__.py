"""What lets Megatron-Core run without a GPU, over gloo: so that every layout is tested on any machine."""

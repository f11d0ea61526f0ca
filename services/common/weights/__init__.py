"""Publication of weights: what is sent (plan), how it is proven (digest), and between whom (group)."""

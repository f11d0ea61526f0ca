"""What environments with tools share: how the policy calls tools, and what describes them."""

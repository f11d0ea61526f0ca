"""The three services as the loop sees them."""

"""Converts messages to tokens with a model's chat template and tokenizer, and extends the tokens of an episode."""

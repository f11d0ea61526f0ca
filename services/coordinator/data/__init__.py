"""Loads prompts: from dataset files to the token ids of each step."""

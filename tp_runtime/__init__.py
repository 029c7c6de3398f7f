"""Tensor-parallel runtime for language models: one coordinator, one worker process per GPU."""

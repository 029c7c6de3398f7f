"""The OpenAI-compatible HTTP server: a process of its own, and a client of the coordinator like any
other. It loads no torch and knows nothing of scheduling, workers or launching."""

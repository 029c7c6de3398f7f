"""The process on each GPU: it computes what the coordinator's plans say and decides nothing.

Lives here: the loop, the model runner, the device-side batch state, the KV cache, samplers, the
weight loader and the models. Workers are disposable: all they hold can be rebuilt from what the
coordinator knows. Knows nothing of clients, text, queues or of how processes are started.

May import: `tp_runtime.ops`, and of tp_runtime only messages, configs, transport and errors (a test
checks).
"""

"""The coordinator process: owns all truth about requests and decides every step.

Scheduler and KV blocks (sequence, block_pool, scheduler, ...), front end for clients, supervision
of the workers. May import tp_runtime only; loads neither torch nor transformers.
"""

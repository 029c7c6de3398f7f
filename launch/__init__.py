"""Entry points: what a person types, and the processes that hold a server together.

Lives here: the command line, the torchrun entry, keepers and their workers' birth and death, the
supervision around torch's elastic agent, `session` for scripts under torchrun, the demo. Knows
nothing of layers or scheduling.

May import: everything. Importing this package loads neither torch nor transformers.
"""

from tp_runtime.launch.torchrun_session import session

__all__ = ["session"]

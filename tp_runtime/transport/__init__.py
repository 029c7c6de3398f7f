"""How bytes move between processes of a server: shared-memory rings and descriptor passing."""

"""Tests of Client and AsyncClient over real ZeroMQ sockets, with a fake engine behind."""

"""Tests of tp_runtime.text, with small tokenizers made on the fly (see small_tokenizers)."""

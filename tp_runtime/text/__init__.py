"""Text: tokenizer, streaming detokenizer, stop strings, chat template.

Works on files and strings; knows nothing of sockets, requests or the scheduler. Imports
`tokenizers` and jinja2, never torch or transformers."""

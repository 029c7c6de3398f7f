"""`tp-runtime bench`: programs that measure. Each prints a table, and one line of JSON last."""

"""The models, one architecture per file, written as their equations; `registry` finds them by the
`architectures` of a config. Parallelism shows only in the class names of the layers."""

"""Attention back-ends against plain arithmetic in float64, over a cache poisoned with NaN."""

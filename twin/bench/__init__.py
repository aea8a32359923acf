"""Benchmarks on a GPU: results checked first, then time, peers and ceiling in alternating order,
one record.
"""

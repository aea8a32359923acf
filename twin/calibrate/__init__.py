"""Probe, fit, validate: measured numbers in, hardware numbers with intervals out, engine runs held
out.
"""

"""What an NVIDIA GPU has to show beside its speed: repeats, long runs, refusals, and what
compute-sanitizer says.
"""

"""What our kernel makes of a plan: its warps, its memory, its tables, and the options that suit
it.
"""

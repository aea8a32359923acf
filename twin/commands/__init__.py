"""One small module for each command of `twin`: arguments in, a call into the library, text or JSON
out.
"""

"""The Python API behind `import twin` (docs/python.md); commands and servers do without it."""

"""The verification as a matrix: axes as data, cells that cover them, gates in each, and reports."""

"""Proof that what wakes is what slept: a reference engine, cases, and bit-for-bit comparison."""

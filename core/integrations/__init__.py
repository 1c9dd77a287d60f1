"""Plugins and drop-ins that put other engines' sleep modes on this library."""

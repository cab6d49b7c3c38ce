"""Measurements: stages against their floor (`micro`), whole decodes (`sweep`), and what follows from them.

Every result is a row, a line of JSON with the environment in it; tables, plots and `docs/performance.md` are
made of rows alone.
"""

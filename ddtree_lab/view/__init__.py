"""Views of recorded data. Views know the stages' records; no stage knows a view."""

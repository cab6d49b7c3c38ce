"""DDTree Lab."""

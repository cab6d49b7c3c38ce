"""The port doctor: is it the drafter or the port, and where."""

"""Every architecture of the installed library, tiny and random, asked what a port has to know about it."""

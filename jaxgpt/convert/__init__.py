"""Import and export weights of other systems."""

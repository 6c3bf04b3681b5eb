"""Look inside a model, and let the program prove itself."""
